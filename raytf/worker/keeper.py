"""Checkpoints of a run, kept by its chief: what it copies, another process writes, see `snapshots.py`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from raytf import activity, timeouts
from raytf.runtime import cores
from raytf.storage import checkpoint_files, division, snapshots
from raytf.storage.division import Cutter
from raytf.storage.images import Archive, Image
from raytf.storage.snapshots import NoRoomError, NotKeptError, SnapshotWriter
from raytf.timeouts import deadline
from raytf.worker.checkpoint import Moment

# Those that stay: the last, and one for when it is damaged.
_KEPT_STEPS = 2
# Of what is in a checkpoint beside the model: callbacks, metrics, history.
_OTHER_BYTES = 1 << 20


class Keeper:
    """Keeps the checkpoints of one training, at the ends of epochs and within them.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: the run's folder there.
    """

    def __init__(self, filesystem, run: str):
        self._filesystem, self._run = filesystem, run
        self._writer: SnapshotWriter | None = None
        self._file: Any = None  # a `model_file.ModelFile`
        self._cutter: Cutter | None = None
        self._layout: tuple[Image, int] | None = None
        self._alone = False

    def wait_for_others(self) -> None:
        """Waits for what killed workers had handed over; call before the newest is looked for."""
        if not snapshots.wait_for_all(self._filesystem, self._run):
            warnings.warn(
                f"Another process still writes checkpoints of {self._run!r}, or its host has gone meanwhile: its last "
                "ones are not seen",
                stacklevel=2,
            )

    def ready(self, model, held: bool = False) -> None:
        """Prepares all that the first checkpoint needs, before the first step: its layout, its memory, who writes it.

        Args:
            model: a compiled and built `keras.Model`.
            held: some are to be held.
        """
        size = self._laid_out(model).size
        if self._writer is None:
            self._start()
            self._writer.ready(size + _OTHER_BYTES, held)

    def keep(self, name: str, model, parts: Mapping[str, Any], writers: int = 1, last: bool = False) -> bool:
        """See `session.RaySession.keep`.

        Args:
            last: none comes behind it: it is not left out, and waited for where the one before is still being written.

        Raises:
            NotKeptError: the process that writes was killed, and so was another one at once.
        """
        self._take(name, model, parts, writers=writers, pinned=last)
        return True

    def hold(self, name: str, model, parts: Mapping[str, Any]) -> bool:
        """Holds a checkpoint in memory: it is written only if this worker ends, and not well, before the next one."""
        self._take(name, model, parts, held=True)
        return True

    def keep_part(self, name: str, model, index: int, writers: int, pinned: bool = False) -> bool:
        """Keeps one part of a model whose checkpoint several workers write; the chief makes it whole.

        Args:
            name: of the checkpoint's folder in that of the run.
            model: a compiled and built `keras.Model`.
            index: of this worker among those that write, from 1.
            writers: how many these are, with the chief.
            pinned: newer ones do not make it needless.
        """
        if self._cutter is None or self._cutter.of != (index, writers):
            self._cutter = Cutter(index, writers)
        piece = self._cutter.piece(self._content(model))
        self._write(name, {checkpoint_files.MODEL: piece}, writers=writers, index=index, pinned=pinned)
        return True

    def layout(self, model) -> int:
        """A number that workers have alike whose files of a model have the same arrays at the same places."""
        image = self._content(model).image
        if self._layout is None or self._layout[0] is not image:
            self._layout = image, division.layout(image)
        return self._layout[1]

    def writes_alone(self) -> bool:
        """Whether parts of others did not come before."""
        return self._alone or (self._writer is not None and self._writer.alone)

    def _content(self, model) -> Archive:
        return self._laid_out(model).content()

    def _laid_out(self, model):
        from raytf.worker.model_file import ModelFile

        if self._file is None:
            self._file = ModelFile(model)
        return self._file

    def _take(self, name: str, model, parts: Mapping[str, Any], **how: Any) -> int:
        return self._write(name, {checkpoint_files.MODEL: self._content(model), **parts}, **how)

    def _write(self, name: str, found: Mapping[str, Any], **how: Any) -> int:
        """Hands it to the process that writes, which is another one where that was killed; its number there."""
        if self._writer is not None:
            try:
                return self._writer.write(name, found, **how)
            except NoRoomError:
                raise
            except NotKeptError as error:  # its process was killed
                warnings.warn(f"{error}; another one is started", stacklevel=2)
                self._alone = self._writer.alone
                self._writer.close()
        self._start()
        return self._writer.write(name, found, **how)

    def _start(self) -> None:
        self._writer = SnapshotWriter(self._filesystem, self._run, _KEPT_STEPS, cores.before())
        activity.here.queued_writer = self._writer.queued
        activity.here.failing_storage = functools.partial(getattr, self._writer, "failing")

    def keep_at_end(self, name: str, moment: Moment) -> Callable[[], None]:
        """Keeps the checkpoint at the end of an epoch: copies it; newer ones do not make it needless.

        Args:
            name: of its folder in that of the run.
            moment: of the end of the epoch.

        Returns:
            Waits until it is whole, in any thread; raises NotKeptError where it is not in the time that it has. From
            then on newer ones, which are tried again and again, may take its place.

        Raises:
            NotKeptError: the process that writes was killed, and so was another one at once.
        """
        number = self._take(name, moment.model, moment.parts(), writers=moment.writers, pinned=True)
        writer = self._writer

        def wait() -> None:
            try:
                writer.finish(timeouts.get().checkpoint_write, timeouts.get().checkpoint_failing, number)
            except NotKeptError:
                writer.unpin(number)
                raise

        return wait

    def held_up(self) -> contextlib.AbstractContextManager[None]:
        """See `SnapshotWriter.held_up`."""
        return contextlib.nullcontext() if self._writer is None else self._writer.held_up()

    def keep_now(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """See `session.RaySession.keep_now`."""
        number = self._take(name, model, parts, pinned=True)
        with self._writer.held_up():
            self._writer.finish(self._last_seconds(), timeouts.get().checkpoint_failing, number)

    def _last_seconds(self) -> float:
        return deadline(timeouts.get().checkpoint_last, 0 if self._file is None else self._file.size)

    def close(self, well: bool = True) -> None:
        """Waits for the last one, when the training has ended or failed.

        What cannot be kept is said: the run has its checkpoints of epochs, and the cause of its end is another one.

        Args:
            well: the training came to its end, so that what is held is needless; else it is kept.
        """
        seconds = self._last_seconds()
        writer, self._writer, self._file = self._writer, None, None
        if writer is None:
            return
        try:
            if well:
                writer.release()
            else:
                writer.promote()
            with writer.held_up():
                writer.finish(seconds)
        except NotKeptError as error:
            warnings.warn(str(error), stacklevel=2)
        finally:
            writer.close()
