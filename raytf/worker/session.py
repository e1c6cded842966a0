"""Connects a train loop to its run: rank, checkpoint to resume from, reports. Runs on a worker.

In `fit` the run is on `train.run_worker`. In a sweep it is a worker group. Both implement Ray Train's own functions. So
train loops with `ray.train.report` and `ray.train.get_context` run unchanged (`session_functions.py`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from raytf import activity, events, logs, timeouts
from raytf.collectives import recovery_client
from raytf.compat import ray_train
from raytf.compat.ray_train import CheckpointConsistencyMode
from raytf.storage import checkpoint_files, scratch, step_folders
from raytf.storage.checkpoint_files import DamagedCheckpointError
from raytf.storage.folder_contents import local_folder, read_files, size_of_files, write_files
from raytf.storage.snapshots import NotWrittenError
from raytf.worker import stop
from raytf.worker.checkpoint import CheckpointSnapshot
from raytf.worker.checkpoint_saver import CheckpointSaver
from raytf.worker.stop import StoppedForRestartError

logger = logs.get_logger(__name__)

# File in a trial's checkpoints with state of the sweep.
TRIAL = "trial.json"
# Pending reports to the driver at which the training waits, up to a timeout; it also waits for an old one.
_MOST_REPORTS = 5
# Reasons why the driver does not process reports, as a clause that follows "it" or "which".
_WAITS_FOR = "waits for its storage or in a callback of RunConfig, or has no processor"


@dataclasses.dataclass(frozen=True)
class MemoryReplicas:
    """Workers that keep checkpoints in memory.

    Args:
        local: Whether this worker does.
        peer: Whether a worker on another host than the chief's does; the same on all workers.
    """

    local: bool
    peer: bool


NO_HOLDERS = MemoryReplicas(local=False, peer=False)


class PendingCheckpoint:
    """A checkpoint that must be whole before its report and before the next one. Threads of their own wait for it.

    Args:
        wait: Function that blocks until the checkpoint is whole, or raises NotWrittenError.
        epoch: Epoch at whose end it is written, from 1.
        while_waiting: Function that returns a context manager for the time in which the training waits.
    """

    def __init__(
        self, wait: Callable[[], None], epoch: int, while_waiting: Callable[[], contextlib.AbstractContextManager[None]]
    ):
        self._wait, self._epoch, self._while_waiting = wait, epoch, while_waiting
        self._finalized, self._lock = False, threading.Lock()
        self._error: NotWrittenError | None = None

    def wait_until_done(self) -> bool:
        """Blocks until the checkpoint is done, in the thread that reports. Returns whether it is whole."""
        with self._lock:
            if not self._finalized:
                self._finalize()
        return self._error is None

    def _finalize(self) -> None:
        try:
            self._wait()
        except NotWrittenError as error:
            self._error = error
            logger.warning(
                f"The checkpoint at the end of epoch {self._epoch} is not saved so far: {error.why}. Training "
                "continues. Free space on the storage, or mend it, to have later checkpoints saved"
            )
        self._finalized = True

    def __call__(self) -> NotWrittenError | None:
        """Blocks the training thread until the checkpoint is done. Returns the error, or None if it is whole.

        It does not wait for earlier reports, as their receiver may be slow.
        """
        with contextlib.nullcontext() if self._finalized else self._while_waiting():
            self.wait_until_done()
        return self._error


class ReportQueue:
    """Queue of reports that another thread makes in order, as fast as the driver processes them."""

    def __init__(self):
        self._made: collections.deque[tuple[float, concurrent.futures.Future]] = collections.deque()

    def add(self, report: concurrent.futures.Future) -> None:
        """Adds a future that is done when the report is made."""
        self._made.append((time.monotonic(), report))

    def wait(self) -> None:
        """Blocks if many reports are pending, or one is old, as trials are judged and checkpoints deleted after them.

        Raises:
            TimeoutError: The driver does not process reports.
        """
        while self._made and self._made[0][1].done():
            self._made.popleft()
        if not self._made:
            return
        limits = timeouts.get()
        added_at, oldest = self._made[0]
        if len(self._made) < _MOST_REPORTS and time.monotonic() - added_at < limits.report_old:
            return
        with activity.tracker.in_phase(activity.DRIVER):
            done, _ = concurrent.futures.wait([oldest], limits.report_taken)
        if not done:
            raise TimeoutError(
                f"timeout after {limits.report_taken:g} s: the driver did not take a report; it {_WAITS_FOR}"
            )

    def end(self) -> None:
        """Warns after the end of the training if pending reports delay the end of the run."""
        seconds = timeouts.get().report_old
        _, pending = concurrent.futures.wait([report for _, report in self._made], seconds)
        if pending:
            logger.warning(
                f"The training has ended, and {len(pending)} of its reports wait since {seconds:g} s for the "
                f"driver, which {_WAITS_FOR}. The run ends after them. Look at the storage, and at the callbacks"
            )


class Session:
    """Connects a training on this worker to its run. This base class is for a training without a run.

    Args:
        rank: Rank of this worker.
        size: Number of workers.

    Attributes:
        storage: Storage of the run, a `StorageContext` of Ray Train, or None.
        saves: Whether checkpoints within epochs can be saved.
        recovers: Whether lost workers can be replaced in place.
        numbers_reports: Whether reports are only counted, so that a loss between two of them is recoverable.
        saves_at_loss: Whether any worker can save a checkpoint with `save_sync`.
        shares_writing: Whether several workers can write a checkpoint together.
    """

    storage: Any = None
    saves = recovers = numbers_reports = saves_at_loss = shares_writing = False

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """Yields the folder of the checkpoint to resume from, the same on every worker, or None without one."""
        yield None

    def report(self, metrics: dict, snapshot: CheckpointSnapshot | ReportedFiles | None, keep: bool = False) -> Any:
        """Reports metrics and, from the chief, a checkpoint. Every worker calls it.

        Args:
            metrics: Values by name.
            snapshot: The checkpoint, see `CheckpointSnapshot`, or None without one.
            keep: Whether to copy it now, if it would be written only on request.

        Returns:
            None, or a function that blocks until the checkpoint is done, and returns the error or None.
        """

    def reports_made(self) -> int:
        """Returns the number of reports of the run; the same on all workers within a step."""
        return 0

    def report_loss(self) -> None:
        """Reports the loss of another worker to the driver, if that does not notice it at once."""

    def emit(self, event: events.RunEvent) -> None:
        """Sends an event of the training to the driver, which logs and records it; logs it without a driver."""
        events.emit(event)

    def ready(self, model, in_memory: bool, writers: int = 1) -> None:
        """Prepares the first checkpoint before the first step, on workers that save checkpoints or keep them in memory.

        Args:
            model: A compiled and built `keras.Model`.
            in_memory: Whether some checkpoints stay in memory.
            writers: Number of workers that write a checkpoint together, see `WriterCount.most`.
        """

    def save_step(self, name: str, model, parts: Mapping[str, Any], writers: int = 1) -> None:
        """Saves a checkpoint within an epoch; the chief calls it.

        The writer process may be slower, and warns of checkpoints that it could not write.

        Args:
            name: Name of the checkpoint's folder in the run's folder, see `step_folders.folder_name`.
            model: A compiled and built `keras.Model`.
            parts: Result of `checkpoint.checkpoint_parts`.
            writers: Number of workers that write it together, each of which calls `save_part`.
        """

    def holders(self) -> MemoryReplicas:
        """Returns which workers keep checkpoints in memory."""
        return NO_HOLDERS

    def stop_request(self) -> str | None:
        """Returns why the training is requested to stop, see `stop.StopBarrier`, or None."""
        return stop.stop_barrier.why


class RaySession(Session):
    """Session of a worker of a run.

    Args:
        validate: Whether checkpoints are evaluated in parallel to the training.
    """

    saves = recovers = numbers_reports = saves_at_loss = True

    def __init__(self, validate: bool = False):
        self._validate = validate
        context = ray.train.get_context()
        super().__init__(context.get_world_rank(), context.get_world_size())
        self.shares_writing = self.size > 1
        self.storage = context.get_storage()
        self._saver = CheckpointSaver(self.storage.storage_filesystem, self.storage.experiment_fs_path)
        self._pending: PendingCheckpoint | None = None
        self._reports = ReportQueue()
        self._whole: tuple[int, str] | None = None  # epoch, and checkpoint of its end that a lost chief has saved
        self._reported_ends = 0  # number of next reports that a lost worker has already made

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """Yields the folder of the last checkpoint that is whole, the same on every worker, or None without one.

        On a replacement worker it contains the state from another worker's memory.

        Raises:
            DamagedCheckpointError: There are checkpoints, but none is whole.
        """
        with contextlib.ExitStack() as stack:
            stack.push(self._close)
            if recovery_client.client.replacement_state is not None:
                folder = stack.enter_context(
                    scratch.temporary_folder(size_of_files(recovery_client.client.replacement_state.files))
                )
                write_files(recovery_client.client.replacement_state.files, folder)
                self._report_for(recovery_client.client.replacement_state, checkpoint_files.read_state(folder).history)
                yield folder
                return
            name, folder, unlisted = self._newest(stack) if self.rank == 0 else (None, None, [])
            if self.size > 1:
                with activity.tracker.collective(activity.REPORT):
                    name, unlisted = broadcast_from_rank_zero((name, unlisted))
            if self.rank != 0 and name is not None:
                folder = _open_checkpoint(stack, self._snapshot_path(name), contents=False)
            for end, metrics in unlisted:
                self._report_stored(metrics, end if self.rank == 0 else None)
            yield folder

    def _report_for(self, state: recovery_client.ReplacementState, history: list[dict]) -> None:
        """Reports the epochs that the lost worker did not report before this one replaced it.

        That worker may have reported the epoch whose end this one repeats.
        """
        missing = max(0, state.shared_state["missing"])
        self._reported_ends = max(0, -state.shared_state["missing"])
        ray_train.count_reports(state.shared_state["reports"] - missing)
        ends: dict[int, str] = {}
        if (missing or state.after_step) and self.rank == 0:
            self._saver.wait_for_others()
            unlisted = checkpoint_files.unlisted_checkpoints(
                self.storage.storage_filesystem, self.storage.experiment_fs_path, _names_reported
            )
            ends = {state.epoch: name for name, state in dict(unlisted).items()}
        for row in history[len(history) - missing :]:
            self._report_stored(row, ends.get(row["epoch"]))
        if state.after_step and (epoch := len(history) + 1) in ends:
            self._whole = epoch, ends[epoch]

    def _report_stored(self, metrics: dict, name: str | None) -> None:
        """Reports metrics with a checkpoint that is whole, or without a checkpoint."""
        checkpoint_and_validate = (None, False) if name is None else (self._snapshot_path(name), self._validate)
        self._reports.add(ray_train.report_later(metrics, lambda: checkpoint_and_validate))

    def reports_made(self) -> int:
        return ray_train.reports_made()

    def report_loss(self) -> None:
        ray_train.report_loss()

    def emit(self, event: events.RunEvent) -> None:
        ray_train.send_run_event(event)

    def _close(self, kind: type[BaseException] | None, *_) -> None:
        """Closes the saver of checkpoints; drops a checkpoint in memory if the training ended with a saved one."""
        self._saver.close(well=kind is None or issubclass(kind, StoppedForRestartError))
        if kind is None:
            self._reports.end()

    def _newest(self, stack: contextlib.ExitStack) -> tuple[str | None, str | None, list[tuple[str, dict]]]:
        """Finds the last whole checkpoint, of an epoch's end or within an epoch.

        Returns:
            Its name, its folder on this machine, and (name, metrics) of whole ones that were not reported in time.
        """
        self._saver.wait_for_others()
        filesystem, run = self.storage.storage_filesystem, self.storage.experiment_fs_path
        last = ray.train.get_checkpoint()
        unlisted = dict(checkpoint_files.unlisted_checkpoints(filesystem, run, _names_reported))
        steps = step_folders.finished_folders(filesystem, run) + [
            (state.step, name) for name, state in unlisted.items()
        ]
        if last is None and not steps:
            return None, None, []
        # on a tie those of ends of epochs first, as they include the validation
        steps.sort(key=lambda entry: (entry[0], entry[1] in unlisted), reverse=True)
        candidates = checkpoint_files.merge_newest_first(
            _run_checkpoints(last) if last is not None else iter(()),
            [(step, self._snapshot_path(name)) for step, name in steps],
        )
        saved, folder = checkpoint_files.first_whole(candidates, functools.partial(_open_checkpoint, stack))
        name = posixpath.basename(saved.path.rstrip("/"))
        resumed_step, listed = checkpoint_files.read_state(folder).step, -1
        if unlisted and last is not None:
            with contextlib.suppress(DamagedCheckpointError):  # a warning has already named it
                listed = checkpoint_files.read_state_of(last).step
        unreported = sorted((s.step, end, s.reported) for end, s in unlisted.items() if listed < s.step <= resumed_step)
        return name, folder, [(end, metrics) for _, end, metrics in unreported]

    def _snapshot_path(self, name: str) -> ray.train.Checkpoint:
        path = posixpath.join(self.storage.experiment_fs_path, name)
        return ray.train.Checkpoint(path, filesystem=self.storage.storage_filesystem)

    def save_step(self, name: str, model, parts: Mapping[str, Any], writers: int = 1) -> None:
        self._saver.save_async(name, model, parts, writers, last=self.stop_request() is not None)

    def ready(self, model, in_memory: bool, writers: int = 1) -> None:
        copies_all = self.rank == 0 or (in_memory and self.holders().local)
        if copies_all or self.rank < writers:
            self._saver.ready(model, in_memory, 1 if copies_all else writers)

    def save_sync(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """Saves a checkpoint while the training waits, on any worker and in any thread. Returns when it is whole.

        Raises:
            NotWrittenError: It was not whole before the timeout.
        """
        self._saver.save_sync(name, model, parts)

    def save_part(self, name: str, model, writers: int, pinned: bool = False) -> None:
        """Saves this worker's part of a checkpoint; not called by the chief, see `CheckpointSaver.save_part`."""
        if self.rank < writers:
            self._saver.save_part(name, model, self.rank, writers, pinned)

    def layout(self, model) -> int:
        """Returns a number for the layout of the model's file, see `CheckpointSaver.layout`."""
        return self._saver.layout(model)

    def writes_all_parts(self) -> bool:
        """Returns whether the chief must write alone, see `CheckpointSaver.writes_all_parts`."""
        return self._saver.writes_all_parts()

    def hold_in_memory(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """Keeps a checkpoint in this host's memory, as `save_step`; see `CheckpointSaver.hold_in_memory`."""
        self._saver.hold_in_memory(name, model, parts)

    def holders(self) -> MemoryReplicas:
        """Returns which workers keep checkpoints in memory: the chief, and the first worker of another host."""
        context = ray.train.get_context()
        peer = context.get_node_rank() == 1 and context.get_local_rank() == 0
        return MemoryReplicas(self.rank == 0 or peer, context.get_local_world_size() < self.size)

    def report(self, metrics: dict, snapshot: Any, keep: bool = False) -> Callable[[], NotWrittenError | None]:
        """Reports metrics and, from the chief, a checkpoint. Every worker calls it, and none waits for its end.

        The report follows when the checkpoint is whole. The training waits for the checkpoint of the epoch before, as
        every epoch has one. A storage that needs longer than an epoch delays it. If the storage fails, the metrics are
        reported without a checkpoint. Later checkpoints are tried while the training continues.

        Returns:
            A function that blocks until the checkpoint is done, and returns the error or None. Only the chief's can
            return an error.
        """
        if self._pending is not None:
            self._pending()
        self._reports.wait()
        name = self.storage.make_default_checkpoint_dir_name()
        if snapshot is not None and snapshot.broadcast_name is not None:
            name = snapshot.broadcast_name(name)
        if self._reported_ends:  # the worker that this one replaced has made this report
            self._reported_ends -= 1
            ray_train.count_reports(ray_train.reports_made() + 1)
            return lambda: None
        if snapshot is None or self.rank != 0:
            if snapshot is not None and snapshot.broadcast_name is not None:
                self.save_part(name, snapshot.model, snapshot.writers, pinned=True)
            self._report_stored(metrics, None)
            return lambda: None
        if self._whole is not None and self._whole[0] == snapshot.state.epoch:
            (_, name), self._whole = self._whole, None  # `on_train_end` may report this epoch again, with other weights
            self._report_stored(metrics, name)
            return lambda: None
        pending = self._pending = PendingCheckpoint(
            self._save_epoch_end(name, snapshot), snapshot.state.epoch, self._saver.writer_priority
        )
        checkpoint_and_validate = self._snapshot_path(name), self._validate
        self._reports.add(
            ray_train.report_later(
                metrics, lambda: checkpoint_and_validate if pending.wait_until_done() else (None, False)
            )
        )
        return pending

    def _save_epoch_end(self, name: str, snapshot: CheckpointSnapshot) -> Callable[[], None]:
        """Returns a function that blocks until the checkpoint is whole, see `CheckpointSaver.save_epoch_end`."""
        try:
            return self._saver.save_epoch_end(name, snapshot)
        except NotWrittenError as error:
            failed = error

        def raises() -> None:
            raise failed

        return raises


def _names_reported() -> set[str]:
    return {posixpath.basename(entry.checkpoint.path.rstrip("/")) for entry in _newest_reported()}


def _newest_reported() -> list:
    return ray.train.get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=timeouts.get().reports_listed
    )


def _run_checkpoints(last: ray.train.Checkpoint) -> Iterator[ray.train.Checkpoint]:
    """Returns the last checkpoint of the run, and then those before it, which are only listed if needed."""
    yield last
    yield from (
        c for c in checkpoint_files.newest_first(r.checkpoint for r in _newest_reported()) if c.path != last.path
    )


def _open_checkpoint(stack: contextlib.ExitStack, saved: ray.train.Checkpoint, contents: bool = True) -> str:
    """Returns the folder of a checkpoint on this machine, after checking it."""
    folder = stack.enter_context(local_folder(saved))
    checkpoint_files.check_folder(folder, contents, posixpath.basename(saved.path))
    return folder


def report_to_ray(metrics: dict, write: Callable[[str], None] | None) -> None:
    """Calls `ray.train.report`, with the checkpoint that `write(folder)` writes on the chief."""
    if write is None or ray.train.get_context().get_world_rank() != 0:
        _report(metrics)
        return
    with scratch.temporary_folder() as folder:
        write(folder)
        _report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _report(metrics: dict, **how: Any) -> None:
    """Calls `ray.train.report`, which is a barrier of all workers."""
    with activity.tracker.collective(activity.REPORT):
        ray.train.report(metrics, **how)


@dataclasses.dataclass(frozen=True)
class ReportedFiles:
    """Files that a train loop of the user's has reported as a checkpoint, instead of a `CheckpointSnapshot`.

    Args:
        folder: Folder with a copy of the files, which the next report replaces.
    """

    folder: str
    everyone = True
    step = None

    def files(self) -> dict[str, bytes]:
        """Returns the files by relative path."""
        return read_files(self.folder)
