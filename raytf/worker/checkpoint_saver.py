"""Saves the checkpoints of a run on its chief: copies them, and another process writes them, see `snapshots.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from raytf import activity, logs, timeouts
from raytf.runtime import cores
from raytf.storage import checkpoint_files, sharded_write, snapshots
from raytf.storage.file_template import FileTemplate, ZipTemplate
from raytf.storage.sharded_write import RangeCutter
from raytf.storage.snapshots import BufferFullError, NotWrittenError, SnapshotWriter
from raytf.timeouts import deadline
from raytf.worker.checkpoint import CheckpointSnapshot

logger = logs.get_logger(__name__)

# Number of checkpoints within epochs that remain: the last one, and one in case that it is damaged.
_KEPT_STEPS = 2
# Estimated bytes of a checkpoint without the model: callbacks, metrics, history.
_OTHER_BYTES = 1 << 20


class CheckpointSaver:
    """Saves the checkpoints of one training, at the ends of epochs and within them.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder in the file system.
    """

    def __init__(self, filesystem, run: str):
        self._filesystem, self._run = filesystem, run
        self._writer: SnapshotWriter | None = None
        self._file: Any = None  # a `model_file.ModelFile`
        self._cutter: RangeCutter | None = None
        self._layout: tuple[FileTemplate, int] | None = None
        self._writes_all_parts = False

    def wait_for_others(self) -> None:
        """Blocks until checkpoints of killed workers are written; call it before the newest one is selected."""
        if not snapshots.wait_for_all(self._filesystem, self._run):
            logger.warning(
                f"timeout: another process still writes checkpoints of {self._run!r}, or its host was lost. The run "
                "resumes without its last ones"
            )

    def ready(self, model, in_memory: bool = False, parts: int = 1) -> None:
        """Prepares the first checkpoint before the first step: layout, memory, and the process that writes.

        Args:
            model: A compiled and built `keras.Model`.
            in_memory: Whether some checkpoints stay in memory.
            parts: Number of equal parts of the file, of which this worker writes one.
        """
        size = self._layout_of(model).size // parts
        if self._writer is None:
            self._start()
            self._writer.ready(size + _OTHER_BYTES, in_memory)

    def save_async(self, name: str, model, parts: Mapping[str, Any], writers: int = 1, last: bool = False) -> None:
        """Saves a checkpoint, see `session.Session.save_step`.

        Args:
            name: Name of the checkpoint's folder in the run's folder.
            model: A compiled and built `keras.Model`.
            parts: Result of `checkpoint.checkpoint_parts`.
            writers: Number of workers that write it together, at least 1.
            last: Whether it is the last one of the training: it waits for the one before instead of being dropped.

        Raises:
            NotWrittenError: The writer process was killed, and its replacement too.
        """
        self._copy(name, model, parts, writers=writers, pinned=last)

    def hold_in_memory(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """Keeps a checkpoint in memory; it is written only if this worker fails before the next one."""
        self._copy(name, model, parts, in_memory=True)

    def save_part(self, name: str, model, index: int, writers: int, pinned: bool = False) -> None:
        """Saves one part of a checkpoint that several workers write; the chief completes it.

        Args:
            name: Name of the checkpoint's folder in the run's folder.
            model: A compiled and built `keras.Model`.
            index: Index of this worker among the writers, from 1.
            writers: Number of writers, including the chief.
            pinned: Whether newer checkpoints do not replace it before it is written.
        """
        if self._cutter is None or self._cutter.index_and_count != (index, writers):
            self._cutter = RangeCutter(index, writers)
        piece = self._cutter.piece(self._content(model))
        self._write(name, {checkpoint_files.MODEL: piece}, writers=writers, index=index, pinned=pinned)

    def layout(self, model) -> int:
        """Returns a number that is equal on workers whose model files have the same arrays at the same offsets."""
        template = self._content(model).template
        if self._layout is None or self._layout[0] is not template:
            self._layout = template, sharded_write.layout_checksum(template)
        return self._layout[1]

    def writes_all_parts(self) -> bool:
        """Returns whether this worker must write alone, as parts of other workers did not arrive before."""
        return self._writes_all_parts or (self._writer is not None and self._writer.parts_are_missing)

    def _content(self, model) -> ZipTemplate:
        return self._layout_of(model).content()

    def _layout_of(self, model):
        from raytf.worker.model_file import ModelFile

        if self._file is None:
            self._file = ModelFile(model)
        return self._file

    def _copy(self, name: str, model, parts: Mapping[str, Any], **how: Any) -> int:
        return self._write(name, {checkpoint_files.MODEL: self._content(model), **parts}, **how)

    def _write(self, name: str, parts: Mapping[str, Any], **how: Any) -> int:
        """Sends a checkpoint to the writer process, and restarts that if it was killed; returns its number there."""
        if self._writer is not None:
            try:
                return self._writer.write(name, parts, **how)
            except BufferFullError:
                raise
            except NotWrittenError as error:  # the writer process was killed
                logger.warning(f"{error}; another one is started")
                self._writes_all_parts = self._writer.parts_are_missing
                self._writer.close()
        self._start()
        return self._writer.write(name, parts, **how)

    def _start(self) -> None:
        self._writer = SnapshotWriter(self._filesystem, self._run, _KEPT_STEPS, cores.cores_before())
        activity.tracker.queued_writer = self._writer.queued
        activity.tracker.failing_storage = functools.partial(getattr, self._writer, "failing")

    def save_epoch_end(self, name: str, snapshot: CheckpointSnapshot) -> Callable[[], None]:
        """Saves the checkpoint at the end of an epoch; newer ones do not replace it before it is written.

        Args:
            name: Name of the checkpoint's folder in the run's folder.
            snapshot: State of the training at the end of the epoch.

        Returns:
            A function that blocks until the checkpoint is whole, in any thread, or raises NotWrittenError.
            From then on newer checkpoints, which are retried, may replace it.

        Raises:
            NotWrittenError: The writer process was killed, and its replacement too.
        """
        number = self._copy(name, snapshot.model, snapshot.parts(), writers=snapshot.writers, pinned=True)
        writer = self._writer

        def wait() -> None:
            try:
                writer.finish(timeouts.get().checkpoint_write, timeouts.get().checkpoint_failing, number)
            except NotWrittenError:
                writer.unpin(number)
                raise

        return wait

    def writer_priority(self) -> contextlib.AbstractContextManager[None]:
        """Marks the time for which the training waits, see `SnapshotWriter.writer_priority`."""
        return contextlib.nullcontext() if self._writer is None else self._writer.writer_priority()

    def save_sync(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """Saves a checkpoint at once, see `session.RaySession.save_sync`."""
        number = self._copy(name, model, parts, pinned=True)
        with self._writer.writer_priority():
            self._writer.finish(self._last_seconds(), timeouts.get().checkpoint_failing, number)

    def _last_seconds(self) -> float:
        return deadline(timeouts.get().checkpoint_last, 0 if self._file is None else self._file.size)

    def close(self, well: bool = True) -> None:
        """Waits for the last checkpoint, when the training has ended or failed.

        It warns instead of raising if that fails: the run has its checkpoints of epochs, and its end another cause.

        Args:
            well: Whether the training was successful, so that checkpoints in memory are dropped; else they are written.
        """
        seconds = self._last_seconds()
        writer, self._writer, self._file = self._writer, None, None
        if writer is None:
            return
        try:
            if well:
                writer.release()
            else:
                writer.flush()
            with writer.writer_priority():
                writer.finish(seconds)
        except NotWrittenError as error:
            logger.warning(f"The training has ended, and {error}")
        finally:
            writer.close()
