"""What a train loop asks of the run around it: rank, checkpoint to start from, where to report. On a worker.

Under `fit` that is Ray Train; in a sweep it is the worker group, which stands behind Ray Train's own functions, too,
so that a train loop written for `ray.train.report` and `ray.train.get_context` runs there unchanged
(`session_functions.py`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import posixpath
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from raytf import activity, timeouts
from raytf.collectives import healing
from raytf.compat import ray_train
from raytf.compat.ray_train import CheckpointConsistencyMode
from raytf.storage import checkpoint_files, scratch, step_folders
from raytf.storage.checkpoint_files import DamagedCheckpointError
from raytf.storage.snapshots import NotKeptError
from raytf.worker import ending
from raytf.worker.checkpoint import Moment
from raytf.worker.ending import MovedError
from raytf.worker.keeper import Keeper

# Beside the files of a trial's checkpoints: what its sweep needs to know of them.
TRIAL = "trial.json"
# So many reports may wait for Ray Train's controller, and one may be so old; then the training waits, at most so long.
_MOST_REPORTS = 5
# What a controller that takes none may be at, as a clause that follows "it" or "which".
_WAITS_FOR = "waits for its storage or in a callback of RunConfig, or has no processor"


@dataclasses.dataclass(frozen=True)
class Holders:
    """Who holds checkpoints in memory.

    Args:
        mine: whether this worker does.
        peer: whether one does on another host than the chief's; the same on all workers.
    """

    mine: bool
    peer: bool


class Pending:
    """A checkpoint that is to be whole before it is reported, and before the next one; each in a thread of its own.

    Args:
        wait: returns when the checkpoint is whole; raises NotKeptError.
        epoch: at whose end it is written.
        held_up: around the time for which the training waits for it.
    """

    def __init__(
        self, wait: Callable[[], None], epoch: int, held_up: Callable[[], contextlib.AbstractContextManager[None]]
    ):
        self._wait, self._epoch, self._held_up = wait, epoch, held_up
        self._settled, self._lock = False, threading.Lock()
        self._error: NotKeptError | None = None

    def settle(self) -> bool:
        """Waits for the checkpoint, in the thread that reports; whether it is whole."""
        with self._lock:
            if not self._settled:
                self._settle()
        return self._error is None

    def _settle(self) -> None:
        try:
            self._wait()
        except NotKeptError as error:
            self._error = error
            warnings.warn(
                f"The checkpoint at the end of epoch {self._epoch} is not kept so far, and the training continues: "
                f"{error.why}",
                stacklevel=2,
            )
        self._settled = True

    def __call__(self) -> NotKeptError | None:
        """Waits, in the thread that trains, and says why the storage has not kept it; None where it has.

        It does not wait for the reports before it: who takes those may be slow.
        """
        with contextlib.nullcontext() if self._settled else self._held_up():
            self.settle()
        return self._error


class Reports:
    """Those that another thread makes, one after the other, as Ray Train's controller takes them."""

    def __init__(self):
        self._made: collections.deque[tuple[float, concurrent.futures.Future]] = collections.deque()

    def add(self, report: concurrent.futures.Future) -> None:
        """Notes one, which is done when it is made."""
        self._made.append((time.monotonic(), report))

    def wait(self) -> None:
        """Waits where many are left, or one is old: what judges a trial, and removes checkpoints, is to follow it.

        Raises:
            TimeoutError: the controller takes none.
        """
        while self._made and self._made[0][1].done():
            self._made.popleft()
        if not self._made:
            return
        its = timeouts.get()
        made, oldest = self._made[0]
        if len(self._made) < _MOST_REPORTS and time.monotonic() - made < its.report_old:
            return
        with activity.here.within(activity.CONTROLLER):
            done, _ = concurrent.futures.wait([oldest], its.report_taken)
        if not done:
            raise TimeoutError(
                f"Ray Train's controller was to take a report within {its.report_taken:g} s and has not: "
                f"it {_WAITS_FOR}"
            )

    def end(self) -> None:
        """Says, when the training has ended, why the run has not, where that takes long."""
        seconds = timeouts.get().report_old
        _, left = concurrent.futures.wait([report for _, report in self._made], seconds)
        if left:
            warnings.warn(
                f"The training has ended, and {len(left)} of its reports wait since {seconds:g} s for Ray Train's "
                f"controller, which {_WAITS_FOR}",
                stacklevel=2,
            )


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
        self._pending: Pending | None = None
        self._reports = Reports()
        self._whole: tuple[int, str] | None = None  # an epoch, and the checkpoint of its end that a lost chief has kept
        self._told = 0  # reports to come that a lost worker has made

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """The folder of the checkpoint to go on from, or None: the last one that is whole, the same on every worker.

        One that takes a lost worker's place has what another held in memory.

        Raises:
            DamagedCheckpointError: there are some, and none is whole.
        """
        with contextlib.ExitStack() as stack:
            stack.push(self._close)
            if healing.here.place is not None:
                folder = stack.enter_context(scratch.folder(bytes_of(healing.here.place.files)))
                write_files(healing.here.place.files, folder)
                self._report_for(healing.here.place, checkpoint_files.read_state(folder).history)
                yield folder
                return
            name, folder, unlisted = self._newest(stack) if self.rank == 0 else (None, None, [])
            if self.size > 1:
                with activity.here.meeting(activity.REPORT):
                    name, unlisted = broadcast_from_rank_zero((name, unlisted))
            if self.rank != 0 and name is not None:
                folder = _opened(stack, self._at(name), contents=False)
            for end, metrics in unlisted:
                self._report_kept(metrics, end if self.rank == 0 else None)
            yield folder

    def _report_for(self, place: healing.ReplacementState, history: list[dict]) -> None:
        """Reports the epochs that a lost worker, whose place this one takes, had not come to report.

        It may have reported the one whose end this one makes again.
        """
        missing = max(0, place.agreed["missing"])
        self._told = max(0, -place.agreed["missing"])
        ray_train.count_reports(place.agreed["reports"] - missing)
        ends: dict[int, str] = {}
        if (missing or place.behind) and self.rank == 0:
            self._keeper.wait_for_others()
            unlisted = checkpoint_files.unlisted(
                self.storage.storage_filesystem, self.storage.experiment_fs_path, _names_reported
            )
            ends = {state.epoch: name for name, state in dict(unlisted).items()}
        for row in history[len(history) - missing :]:
            self._report_kept(row, ends.get(row["epoch"]))
        if place.behind and (epoch := len(history) + 1) in ends:
            self._whole = epoch, ends[epoch]

    def _report_kept(self, metrics: dict, name: str | None) -> None:
        """Reports metrics with a checkpoint that is whole, or without one."""
        kept = (None, False) if name is None else (self._at(name), self._validate)
        self._reports.add(ray_train.report_later(metrics, lambda: kept))

    def reports_made(self) -> int:
        """See `ray_train.reports_made`."""
        return ray_train.reports_made()

    def tell_of_loss(self) -> None:
        """See `ray_train.tell_of_loss`."""
        ray_train.tell_of_loss()

    def _close(self, kind: type[BaseException] | None, *_) -> None:
        """Ends what keeps checkpoints; one that is held is needless where the training ended with one."""
        self._keeper.close(well=kind is None or issubclass(kind, MovedError))
        if kind is None:
            self._reports.end()

    def _newest(self, stack: contextlib.ExitStack) -> tuple[str | None, str | None, list[tuple[str, dict]]]:
        """The last whole checkpoint, of an epoch or within one.

        Returns:
            Its name, its folder on this machine, and (name, metrics) of those that were whole and no longer reported.
        """
        self._keeper.wait_for_others()
        filesystem, run = self.storage.storage_filesystem, self.storage.experiment_fs_path
        last = ray.train.get_checkpoint()
        unlisted = dict(checkpoint_files.unlisted(filesystem, run, _names_reported))
        steps = step_folders.listed(filesystem, run) + [(state.step, name) for name, state in unlisted.items()]
        if last is None and not steps:
            return None, None, []
        steps.sort(key=lambda found: (found[0], found[1] in unlisted), reverse=True)  # validation is behind an epoch's
        candidates = checkpoint_files.merged(
            _kept(last) if last is not None else iter(()), [(step, self._at(name)) for step, name in steps]
        )
        saved, folder = checkpoint_files.first_whole(candidates, functools.partial(_opened, stack))
        name = posixpath.basename(saved.path.rstrip("/"))
        from_here, listed = checkpoint_files.read_state(folder).step, -1
        if unlisted and last is not None:
            with contextlib.suppress(DamagedCheckpointError):  # it has been named
                listed = checkpoint_files.read_state_of(last).step
        late = sorted((s.step, end, s.reported) for end, s in unlisted.items() if listed < s.step <= from_here)
        return name, folder, [(end, metrics) for _, end, metrics in late]

    def _at(self, name: str) -> ray.train.Checkpoint:
        path = posixpath.join(self.storage.experiment_fs_path, name)
        return ray.train.Checkpoint(path, filesystem=self.storage.storage_filesystem)

    def keep(self, name: str, model, parts: Mapping[str, Any], writers: int = 1) -> bool:
        """Keeps a checkpoint within an epoch; called on the chief.

        Args:
            name: of its folder in that of the run, see `step_folders.name_of`.
            model: a compiled and built `keras.Model`.
            parts: what `checkpoint.parts` gave.
            writers: so many workers write it together, each of which calls `keep_part`.

        Returns:
            Whether it was taken: the process that writes it may be behind, and says what it could not write.
        """
        return self._keeper.keep(name, model, parts, writers, last=ending.gate.why is not None)

    def ready(self, model, held: bool) -> None:
        """Prepares what the first checkpoint needs, on a worker that keeps some, or holds them; before the first step.

        Args:
            model: a compiled and built `keras.Model`.
            held: some are to be held in memory.
        """
        if self.rank == 0 or (held and self.holders().mine):
            self._keeper.ready(model, held)

    def keep_now(self, name: str, model, parts: Mapping[str, Any]) -> None:
        """Keeps a checkpoint, on any worker and in any thread while the training waits; returns when it is whole.

        Raises:
            NotKeptError: it is not in the time that it has.
        """
        self._keeper.keep_now(name, model, parts)

    def keep_part(self, name: str, model, writers: int, pinned: bool = False) -> None:
        """Keeps this worker's part of a checkpoint; called on all but the chief, see `Keeper.keep_part`."""
        if self.rank < writers:
            self._keeper.keep_part(name, model, self.rank, writers, pinned)

    def layout(self, model) -> int:
        """See `Keeper.layout`."""
        return self._keeper.layout(model)

    def writes_alone(self) -> bool:
        """See `Keeper.writes_alone`."""
        return self._keeper.writes_alone()

    def hold(self, name: str, model, parts: Mapping[str, Any]) -> bool:
        """Holds a checkpoint in this host's memory, with the arguments of `keep`; see `Keeper.hold`."""
        return self._keeper.hold(name, model, parts)

    def holders(self) -> Holders:
        """Who holds checkpoints in memory: the chief, and the first worker of the second host, if there is one."""
        context = ray.train.get_context()
        peer = context.get_node_rank() == 1 and context.get_local_rank() == 0
        return Holders(self.rank == 0 or peer, context.get_local_world_size() < self.size)

    def report(self, metrics: dict, moment: Moment | None) -> Callable[[], NotKeptError | None]:
        """Reports metrics and, from the chief, a checkpoint; every worker calls it, and none waits for it.

        The report is made when the checkpoint is whole. The training waits for that of the epoch before: a storage that
        takes longer than an epoch holds it up, as every epoch has its own. Where the storage fails, the metrics are
        reported without; what is kept within epochs, and the next one, are tried while the training goes on.

        Returns:
            Waits, and says why the storage has not kept it, or None; it is the chief's that knows.
        """
        if self._pending is not None:
            self._pending()
        self._reports.wait()
        name = self.storage.make_default_checkpoint_dir_name()
        if moment is not None and moment.agreed is not None:
            name = moment.agreed(name)
        if self._told:  # by the worker whose place this one has taken
            self._told -= 1
            ray_train.count_reports(ray_train.reports_made() + 1)
            return lambda: None
        if moment is None or self.rank != 0:
            if moment is not None and moment.agreed is not None:
                self.keep_part(name, moment.model, moment.writers, pinned=True)
            self._report_kept(metrics, None)
            return lambda: None
        if self._whole is not None and self._whole[0] == moment.state.epoch:
            self._report_kept(metrics, self._whole[1])
            return lambda: None
        pending = self._pending = Pending(self._kept_at_end(name, moment), moment.state.epoch, self._keeper.held_up)
        kept = self._at(name), self._validate
        self._reports.add(ray_train.report_later(metrics, lambda: kept if pending.settle() else (None, False)))
        return pending

    def _kept_at_end(self, name: str, moment: Moment) -> Callable[[], None]:
        """What waits until the checkpoint is whole, see `Keeper.keep_at_end`."""
        try:
            return self._keeper.keep_at_end(name, moment)
        except NotKeptError as error:
            failed = error

        def raises() -> None:
            raise failed

        return raises


def _names_reported() -> set[str]:
    return {posixpath.basename(its.checkpoint.path.rstrip("/")) for its in _reported()}


def _reported() -> list:
    return ray.train.get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=timeouts.get().reports_listed
    )


def _kept(last: ray.train.Checkpoint) -> Iterator[ray.train.Checkpoint]:
    """The last checkpoint of the run, and then those before it, which are asked for only if they are needed."""
    yield last
    yield from (c for c in checkpoint_files.newest_first(r.checkpoint for r in _reported()) if c.path != last.path)


def _opened(stack: contextlib.ExitStack, saved: ray.train.Checkpoint, contents: bool = True) -> str:
    """The folder of a checkpoint on this machine, once it is checked."""
    with scratch.named():  # of another storage it is copied there
        folder = stack.enter_context(saved.as_directory())
    checkpoint_files.check(folder, contents, posixpath.basename(saved.path))
    return folder


def report(metrics: dict, write: Callable[[str], None] | None) -> None:
    """`ray.train.report`, with the checkpoint that `write(folder)` writes on the chief."""
    if write is None or ray.train.get_context().get_world_rank() != 0:
        _report(metrics)
        return
    with scratch.folder() as folder:
        write(folder)
        _report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _report(metrics: dict, **how: Any) -> None:
    """`ray.train.report`, in which all workers wait for each other."""
    with activity.here.meeting(activity.REPORT):
        ray.train.report(metrics, **how)


class TrialStopped(BaseException):
    """Ends a trial's train loop at a report; no `except Exception` of the user's holds it up."""


@dataclasses.dataclass(frozen=True)
class Within:
    """Where a trial keeps checkpoints within its epochs; those of their ends Tune asks for.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: there; the trial's own.
        reports: that the trial has made before.
    """

    filesystem: Any
    folder: str
    reports: int


class TrialSession:
    """A trial in a worker group: its thread stops at each report until it is told to go on, to save or to stop.

    Args:
        rank, size: of this worker.
        folder: of the checkpoint to go on from, or None.
        name: of the trial.
        within: None where the trial keeps none within its epochs.

    Attributes:
        keep: see `RaySession.keep`, or None.
        waits: whether it stands at a report.
    """

    storage = None

    def __init__(self, rank: int, size: int, folder: str | None, name: str, within: Within | None = None):
        self.rank, self.size, self.name = rank, size, name
        self.folder = folder
        self.keep = None if within is None else self._keep
        self._keeper = Keeper(within.filesystem, within.folder) if within is not None and rank == 0 else None
        self._reports = 0 if within is None else within.reports
        self._write: Callable[[str], None] | None = None
        self._taken: dict[str, bytes] | None = None  # the files that it has written
        self._mine = rank == 0  # whether this worker has files of its own
        self.waits = False
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.events: queue.SimpleQueue = queue.SimpleQueue()

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[str | None]:
        """See `RaySession`; Tune names one checkpoint, which is taken or refused."""
        with contextlib.ExitStack() as stack:
            if self._keeper is not None:
                stack.callback(self._keeper.close)
            if (place := healing.here.place) is not None:
                self.folder = stack.enter_context(scratch.folder(bytes_of(place.files)))
                write_files(place.files, self.folder)
                self._reports = place.agreed["reports"]
            if self.folder is not None:
                checkpoint_files.check(self.folder, contents=self.rank == 0)
            yield self.folder

    def reports_made(self) -> int:
        """How many the trial has made; the same on all workers within a step."""
        return self._reports

    def tell_of_loss(self) -> None:
        """Tells nobody: who runs a trial waits for its workers all the time, and sees at once which one is lost."""

    def _keep(self, name: str, model, parts: Mapping[str, Any]) -> bool:
        parts = {**parts, TRIAL: json.dumps({"reports": self._reports})}
        return self._keeper.keep(name, model, parts, last=ending.gate.why is not None)

    def ready(self, model, held: bool) -> None:
        """See `RaySession.ready`."""
        if self._keeper is not None:
            self._keeper.ready(model, held)

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
        self._reports += 1
        # a training that is asked to end may end behind this report, and nobody else keeps it then
        if self._keeper is not None and isinstance(write, Moment) and ending.gate.why is not None:
            self._keep(step_folders.name_of(write.state.step), write.model, write.parts())
        if write is not None:
            self._write, self._mine, self._taken = write, everyone or self.rank == 0, None
            if keep and self.rank == 0:
                self._taken = self._files()
        self.events.put(("report", metrics))
        self.waits = True
        with activity.here.meeting(activity.REPORT):
            self.park()
        self.waits = False

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
        if self._taken is not None:
            return self._taken
        if isinstance(self._write, Moment):
            return self._write.files()
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


def fetched(saved: ray.train.Checkpoint) -> dict[str, bytes]:
    """The files of a stored checkpoint, by their path in it.

    Raises:
        DamagedCheckpointError: it is not whole.
    """
    with scratch.named(), saved.as_directory() as folder:
        checkpoint_files.check(folder, name=posixpath.basename(saved.path))
        return read_files(folder)


def bytes_of(files: Mapping[str, bytes]) -> int:
    """Bytes of what `read_files` gave."""
    return sum(map(len, files.values()))


def write_files(files: dict[str, bytes], folder: str) -> None:
    """Writes what `read_files` gave."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
