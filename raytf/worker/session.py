"""What a train loop asks of the run around it: rank, checkpoint to start from, where to report. On a worker.

Under `fit` that is Ray Train; in a sweep it is the worker group, which stands behind Ray Train's own functions, too,
so that a train loop written for `ray.train.report` and `ray.train.get_context` runs there unchanged
(`session_functions.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import queue
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from raytf.compat.ray_train import CheckpointConsistencyMode
from raytf.storage import checkpoint_files, scratch, step_folders
from raytf.storage.snapshots import NotKeptError
from raytf.worker.checkpoint import Moment
from raytf.worker.keeper import Keeper

# The controller knows the reports of a run that goes on before its workers start.
_LIST_SECONDS = 60.0


class RaySession:
    """A worker of Ray Train.

    Args:
        validate: whether checkpoints are to be evaluated beside the training.
    """

    def __init__(self, validate: bool = False):
        self._validate = validate
        context = ray.train.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()
        self.storage = context.get_storage()
        self._keeper = Keeper(self.storage.storage_filesystem, self.storage.experiment_fs_path)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """The folder of the checkpoint to go on from, or None: the last one that is whole, the same on every worker.

        Raises:
            DamagedCheckpointError: there are some, and none is whole.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._keeper.close)
            name, folder = self._newest(stack) if self.rank == 0 else (None, None)
            if self.size > 1:
                name = broadcast_from_rank_zero(name)
            if self.rank != 0 and name is not None:
                folder = _opened(stack, self._at(name), contents=False)
            yield folder

    def _newest(self, stack: contextlib.ExitStack) -> tuple[str | None, str | None]:
        """(name, folder on this machine) of the last whole checkpoint, of an epoch or within one."""
        self._keeper.wait_for_others()
        steps = step_folders.listed(self.storage.storage_filesystem, self.storage.experiment_fs_path)
        last = ray.train.get_checkpoint()
        if last is None and not steps:
            return None, None
        candidates = checkpoint_files.merged(
            _kept(last) if last is not None else iter(()), [(step, self._at(name)) for step, name in steps]
        )
        saved, folder = checkpoint_files.first_whole(candidates, functools.partial(_opened, stack))
        return posixpath.basename(saved.path.rstrip("/")), folder

    def _at(self, name: str) -> ray.train.Checkpoint:
        path = posixpath.join(self.storage.experiment_fs_path, name)
        return ray.train.Checkpoint(path, filesystem=self.storage.storage_filesystem)

    def keep(self, name: str, model, parts: Mapping[str, Any]) -> bool:
        """Keeps a checkpoint within an epoch; called on the chief.

        Args:
            name: of its folder in that of the run, see `step_folders.name_of`.
            model: a compiled and built `keras.Model`.
            parts: what `checkpoint.parts` gave.

        Returns:
            Whether it was taken: the process that writes it may be behind, and says what it could not write.
        """
        return self._keeper.keep(name, model, parts)

    def report(self, metrics: dict, moment: Moment | None) -> bool | NotKeptError:
        """Reports metrics and, from the chief, a checkpoint, once it is whole; every worker calls it.

        Where the storage fails, the metrics are reported without, and the checkpoint is tried again as one within
        epochs is, while the training goes on.

        Returns:
            True, or why the storage has not kept it.
        """
        if moment is None or self.rank != 0:
            ray.train.report(metrics)
            return True
        name = self.storage.make_default_checkpoint_dir_name()
        try:
            self._keeper.keep_now(name, moment)
        except NotKeptError as error:
            warnings.warn(
                f"The checkpoint at the end of epoch {moment.state.epoch} is not kept so far, and the training goes "
                f"on: {error.why}",
                stacklevel=2,
            )
            ray.train.report(metrics)
            return error
        ray.train.report(
            metrics,
            checkpoint=self._at(name),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
            validation=self._validate,
        )
        return True


def _kept(last: ray.train.Checkpoint) -> Iterator[ray.train.Checkpoint]:
    """The last checkpoint of the run, and then those before it, which are asked for only if they are needed."""
    yield last
    reported = ray.train.get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=_LIST_SECONDS
    )
    yield from (c for c in checkpoint_files.newest_first(r.checkpoint for r in reported) if c.path != last.path)


def _opened(stack: contextlib.ExitStack, saved: ray.train.Checkpoint, contents: bool = True) -> str:
    """The folder of a checkpoint on this machine, once it is checked."""
    folder = stack.enter_context(saved.as_directory())
    checkpoint_files.check(folder, contents, posixpath.basename(saved.path))
    return folder


def report(metrics: dict, write: Callable[[str], None] | None) -> None:
    """`ray.train.report`, with the checkpoint that `write(folder)` writes on the chief."""
    if write is None or ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with scratch.folder() as folder:
        write(folder)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


class TrialStopped(BaseException):
    """Ends a trial's train loop at a report; no `except Exception` of the user's holds it up."""


class TrialSession:
    """A trial in a worker group: its thread stops at each report until it is told to go on, to save or to stop.

    Args:
        rank, size: of this worker.
        folder: of the checkpoint to go on from, or None.
        name: of the trial.
    """

    storage = None
    keep = None  # Tune says when a trial is saved

    def __init__(self, rank: int, size: int, folder: str | None, name: str):
        self.rank, self.size, self.name = rank, size, name
        self.folder = folder
        self._write: Callable[[str], None] | None = None
        self._mine = rank == 0  # whether this worker has files of its own
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.events: queue.SimpleQueue = queue.SimpleQueue()

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """See `RaySession`; Tune names one checkpoint, which is taken or refused."""
        if self.folder is not None:
            checkpoint_files.check(self.folder, contents=self.rank == 0)
        yield self.folder

    def report(
        self, metrics: dict, write: Callable[[str], None] | None, keep: bool = False, everyone: bool = False
    ) -> None:
        """Hands the metrics to the group, and waits for what it says; a checkpoint is written only when asked for.

        Args:
            metrics: by name.
            write: write(folder) writes a checkpoint of this moment; None leaves that of an earlier report in force.
            keep: write it now, as it will be asked for when this moment is over.
            everyone: what other workers than the chief write belongs to the checkpoint, too.
        """
        if write is not None:
            self._write, self._mine = write, everyone or self.rank == 0
            if keep and self.rank == 0:
                files = self._files()
                self._write = lambda folder: write_files(files, folder)
        self.events.put(("report", metrics))
        self.park()

    def park(self) -> None:
        """Does as it is told until that is to go on.

        Raises:
            TrialStopped: it was told to stop.
        """
        while (command := self.commands.get()) != "go":
            if command == "stop":
                raise TrialStopped
            self.events.put(("saved", self._files()))

    def _files(self) -> dict[str, bytes] | None:
        """The files of a checkpoint of this moment, by name; None where the loop wrote none here."""
        if self._write is None or not self._mine:
            return None
        with scratch.folder() as folder:
            self._write(folder)
            return read_files(folder)


def read_files(folder: str) -> dict[str, bytes]:
    """The files below a folder, by their path in it."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    return found


def write_files(files: dict[str, bytes], folder: str) -> None:
    """Writes what `read_files` gave."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
