"""Checkpoints of a run, kept by its chief: what it copies, another process writes, see `snapshots.py`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from raytf.storage import checkpoint_files, snapshots, step_folders
from raytf.storage.snapshots import NotKeptError, SnapshotWriter
from raytf.worker.checkpoint import Moment

# Those that stay: the last, and one for when it is damaged.
_KEPT_STEPS = 2
# The last of them is waited for so long at the end.
_LAST_SECONDS = 30.0
# At the end of an epoch the training waits so long for a slow storage, and for one that fails.
_EPOCH_SECONDS, _FAILING_SECONDS = 900.0, 15.0


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

    def wait_for_others(self) -> None:
        """Waits for what a killed worker of this host had handed over; call before the newest is looked for."""
        if not snapshots.wait_for_writers(self._run):
            warnings.warn(
                f"Another process still writes checkpoints of {self._run!r}: its last ones are not seen", stacklevel=2
            )

    def keep(self, name: str, model, parts: Mapping[str, Any]) -> bool:
        """See `session.RaySession.keep`.

        Raises:
            NotKeptError: the process that writes was killed, and so was another one at once.
        """
        from raytf.worker.model_file import ModelFile

        if self._file is None:
            self._file = ModelFile(model)
        found = {checkpoint_files.MODEL: self._file.content(), **parts}
        if self._writer is not None:
            try:
                self._writer.write(name, found)
                return True
            except NotKeptError as error:  # its process was killed
                warnings.warn(f"{error}; another one is started", stacklevel=2)
                self._writer.close()
        self._writer = SnapshotWriter(self._filesystem, self._run, _KEPT_STEPS)
        self._writer.write(name, found)
        return True

    def keep_now(self, name: str, moment: Moment) -> None:
        """Keeps the checkpoint at the end of an epoch, and waits until it is whole.

        Where that fails for a while, it is handed over once more, as one within epochs: these are looked for when a run
        goes on, and tried again while the training goes on.

        Args:
            name: of its folder in that of the run.
            moment: of the end of the epoch.

        Raises:
            NotKeptError: it is not whole so far.
        """
        parts = moment.parts()
        try:
            self.keep(name, moment.model, parts)
            self._writer.finish(_EPOCH_SECONDS, _FAILING_SECONDS)
        except NotKeptError:
            self.keep(step_folders.name_of(moment.state.step), moment.model, parts)
            raise

    def close(self) -> None:
        """Waits for the last one, when the training has ended or failed.

        What cannot be kept is said: the run has its checkpoints of epochs, and the cause of its end is another one.
        """
        writer, self._writer, self._file = self._writer, None, None
        if writer is None:
            return
        try:
            writer.finish(_LAST_SECONDS)
        except NotKeptError as error:
            warnings.warn(str(error), stacklevel=2)
        finally:
            writer.close()
