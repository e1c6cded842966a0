"""Events of a run, such as lost workers and restarts. `emit` records each in the run's folder and logs it.

Each event is a separate JSON file. Drivers and trial actors share no file, which works on
any storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pyarrow.fs
from pyarrow.fs import FileSelector, FileType

from raytf import logs, timeouts, validation
from raytf.errors import ConfigError, first_line
from raytf.storage import stored_json

logger = logs.get_logger(__name__)

# In a run's folder, next to the figures of its workers.
FOLDER = "figures/events"


class Kind(enum.StrEnum):
    """Kinds of events."""

    RESOURCES_AWAITED = "resources_awaited"
    RESOURCES_GIVEN = "resources_given"
    WORKERS_STARTED = "workers_started"
    WORKER_LOST = "worker_lost"
    WORKER_FAILED = "worker_failed"
    WORKER_REPLACED = "worker_replaced"
    WORKERS_DISCONNECTED = "workers_disconnected"
    WORKERS_RECONNECTED = "workers_reconnected"
    RECOVERY_INTERRUPTED = "recovery_interrupted"
    RECOVERY_FAILED = "recovery_failed"
    TRIAL_RESTARTED = "trial_restarted"
    RESIZED = "resized"
    RESIZE_DELAYED = "resize_delayed"
    STEPS_REPEATED = "steps_repeated"
    NODE_DRAINED = "node_drained"
    ENDED_AFTER_STEP = "ended_after_step"
    STOP_NOT_DELIVERED = "stop_not_delivered"
    STOP_REQUESTED = "stop_requested"
    STOPPED = "stopped"
    STANDBY_STARTED = "standby_started"
    STANDBY_LOST = "standby_lost"
    STANDBY_LIMITED = "standby_limited"
    STANDBY_GIVEN_UP = "standby_given_up"
    WORKER_HUNG = "worker_hung"
    WORKER_CONTINUED = "worker_continued"
    STRAGGLER = "straggler"
    WORKERS_RENEWED = "workers_renewed"
    LOSS_NOT_FINITE = "loss_not_finite"
    VALIDATION_NOT_FINITE = "validation_not_finite"
    WEIGHTS_NOT_FINITE = "weights_not_finite"
    WORKERS_DIVERGED = "workers_diverged"


# Kinds of what a training itself has found; its workers send these events to the driver.
TRAINING_KINDS = frozenset(
    {Kind.LOSS_NOT_FINITE, Kind.VALIDATION_NOT_FINITE, Kind.WEIGHTS_NOT_FINITE, Kind.WORKERS_DIVERGED}
)
# Values of kinds in older files, and the present ones.
_FORMER_KINDS = {"not_told": "stop_not_delivered", "worker_went_on": "worker_continued"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Describes an event of a run.

    Attributes:
        kind: Kind of the event.
        ranks: World ranks of the affected workers.
        step: Number of training steps made in all, or None.
        epoch: Number of the epoch, from 1, or None.
        steps: Number of steps that are made again, at least, or None.
        seconds: Duration in seconds, or None.
        workers: Number of workers after the event, or None.
        before: Number of workers before the event, or None.
        node: Ray's id of the node, or "".
        name: Name of a worker that is not identified by a rank, of metrics or of weights, or "".
        why: The cause, as a clause.
        more: Additional text, such as a stack.
        time: Time of the event, in seconds since 1970.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    step: int | None = None
    epoch: int | None = None
    steps: int | None = None
    seconds: float | None = None
    workers: int | None = None
    before: int | None = None
    node: str = ""
    name: str = ""
    why: str = ""
    more: str = ""
    time: float = dataclasses.field(default_factory=time.time, compare=False)

    def __str__(self) -> str:
        return _TEXTS[self.kind](self)


def worker_names(ranks: Collection[int]) -> str:
    """Returns the names of workers, as "worker 0 and worker 2"."""
    return " and ".join(f"worker {rank}" for rank in sorted(ranks))


def _subject(event: RunEvent) -> str:
    return event.name or worker_names(event.ranks)


def _failed(event: RunEvent) -> str:
    subject = _subject(event)
    outcome = f"{subject} could not be replaced in place" if subject else "the workers could not be reconnected"
    return f"{outcome}: {event.why}{event.more}"


def _loss_not_finite(event: RunEvent) -> str:
    rows = ""
    if event.ranks and event.workers != 1:
        of_all = len(event.ranks) == event.workers
        rows = f", with the rows of {'all workers' if of_all else worker_names(event.ranks)}"
    return f"The loss is NaN or infinite {event.why}{rows}. {event.more}"


_TEXTS: dict[Kind, Callable[[RunEvent], str]] = {
    Kind.RESOURCES_AWAITED: lambda event: f"{event.why}; waiting for {event.seconds:.0f} s{event.more}",
    Kind.RESOURCES_GIVEN: lambda event: "the cluster has given the run its resources",
    Kind.WORKERS_STARTED: lambda event: f"{event.workers} worker(s) start",
    Kind.WORKER_LOST: lambda event: f"{_subject(event)} was lost: {event.why.rstrip('.')}{event.more}",
    Kind.WORKER_FAILED: lambda event: f"{_subject(event)} failed: {event.why}",
    Kind.WORKER_REPLACED: lambda event: (
        f"{_subject(event)} was lost and is replaced in place after {event.seconds:.1f} s; "
        "the others kept their processes"
    ),
    Kind.WORKERS_DISCONNECTED: lambda event: (
        "the workers have lost their connections, and all processes live: they are reconnected"
    ),
    Kind.WORKERS_RECONNECTED: lambda event: (
        f"the workers are connected again after {event.seconds:.1f} s; all kept their processes"
    ),
    Kind.RECOVERY_INTERRUPTED: lambda event: (
        f"{event.why}, while {f'{_subject(event)} was replaced' if event.ranks else 'they were reconnected'}; "
        "recovery restarts"
    ),
    Kind.RECOVERY_FAILED: _failed,
    Kind.TRIAL_RESTARTED: lambda event: (
        f"{event.why}.{event.more} All workers of the trial restart from its last checkpoint, unless it has failed "
        "more often than FailureConfig allows"
    ),
    Kind.RESIZED: lambda event: f"scaling from {event.before} to {event.workers} workers after the current step",
    Kind.RESIZE_DELAYED: lambda event: (
        f"scaling to {event.workers} workers is delayed, as their processes are not ready: {event.why}. The run "
        "continues with the workers that it has, and retries. Examine the new nodes: raytf doctor"
    ),
    Kind.STEPS_REPEATED: lambda event: (
        f"the run resumes from step {event.step}; at least {event.steps} step(s) made since are repeated. More "
        "frequent checkpoints (checkpoint_every=, memory_every=) repeat fewer"
    ),
    Kind.NODE_DRAINED: lambda event: f"node {event.node[:8]} is drained",
    Kind.ENDED_AFTER_STEP: lambda event: event.why,
    Kind.STOP_NOT_DELIVERED: lambda event: (
        f"{event.more}, and the request to stop did not reach all workers: {event.why}. They continue, and recover if "
        "a worker is lost. Ctrl-C stops the run instead"
    ),
    Kind.STOP_REQUESTED: lambda event: f"{event.why}: {event.more}",
    Kind.STOPPED: lambda event: f"{event.why}: {event.more}",
    Kind.STANDBY_STARTED: lambda event: f"a standby worker starts on node {event.node[:8]}",
    Kind.STANDBY_LOST: lambda event: f"the standby worker on node {event.node[:8]} cannot be used: {event.why}",
    Kind.STANDBY_LIMITED: lambda event: (
        f"the warm-up step of a standby worker failed: {event.why}. Standby workers only import TensorFlow, and "
        "replacing a lost worker takes longer, until the cause is mended"
    ),
    Kind.STANDBY_GIVEN_UP: lambda event: (
        f"no standby worker starts on node {event.node[:8]}: {event.why}. A replacement there starts when a worker is "
        "lost, which takes longer. Mend the cause, often memory, or set spares=0"
    ),
    Kind.WORKER_HUNG: lambda event: (
        f"Hang: the other workers wait for {_subject(event)}: {event.why}. If that lasts, its process is ended, and is "
        "replaced or restarted where failures are allowed. Raise the hang timeout (hang_timeout_s=, --hang-timeout) if "
        "it is that slow by intent"
        f"\n{event.more}"
    ).rstrip(),
    Kind.WORKER_CONTINUED: lambda event: f"Hang resolved: {_subject(event)} continues",
    Kind.STRAGGLER: lambda event: (
        f"Straggler: {_subject(event)} on {event.node} is {event.why}. Training continues at its pace. Look at that "
        "host: other load, a slow disk, a slow CPU"
    ),
    Kind.WORKERS_RENEWED: lambda event: f"{event.why}: new workers {event.more}",
    Kind.LOSS_NOT_FINITE: _loss_not_finite,
    Kind.VALIDATION_NOT_FINITE: lambda event: (
        f"{event.name}: NaN or infinite in the validation of epoch {event.epoch}, and the training continues. Look for "
        "rows of the validation that are NaN or infinite"
    ),
    Kind.WEIGHTS_NOT_FINITE: lambda event: (
        f"{event.name} has weights that are NaN or infinite at the end of epoch {event.epoch}, though the loss is "
        f"finite. {event.more}. Look for rows that are NaN or infinite"
    ),
    Kind.WORKERS_DIVERGED: lambda event: (
        f"Worker{'s' * (len(event.ranks) > 1)} {', '.join(map(str, event.ranks))} and worker 0 have other weights or "
        f"rates than each other at the end of epoch {event.epoch}: {event.name}. Something changes them on each worker "
        "for itself, as a callback or a step does that draws a number or reads a clock. Draw from a seed that all "
        "have, or let the optimizer change them"
    ),
}
# Recorded but not logged: a run has many of them, or another line reports the outcome.
_SILENT = {Kind.WORKERS_STARTED, Kind.WORKER_FAILED, Kind.NODE_DRAINED, Kind.STANDBY_STARTED, Kind.STANDBY_LOST}
_LEVELS = dict.fromkeys(
    (
        Kind.WORKER_LOST,
        Kind.WORKERS_DISCONNECTED,
        Kind.RECOVERY_INTERRUPTED,
        Kind.RECOVERY_FAILED,
        Kind.TRIAL_RESTARTED,
        Kind.STEPS_REPEATED,
        Kind.STOP_NOT_DELIVERED,
        Kind.STANDBY_GIVEN_UP,
        Kind.WORKER_HUNG,
        Kind.STRAGGLER,
        *TRAINING_KINDS,
    ),
    logging.WARNING,
)
# Functions that receive the events of this process.
_takers: list[Callable[[RunEvent], object]] = []
# Kinds that this process does not log, as another one logs what it records.
_logged_elsewhere: set[Kind] = set()


def emit(event: RunEvent) -> None:
    """Records an event, and logs it."""
    if event.kind not in _SILENT | _logged_elsewhere:
        logger.log(_LEVELS.get(event.kind, logging.INFO), str(event))
    for take in list(_takers):
        take(event)


def record(take: Callable[[RunEvent], object], logged_elsewhere: Collection[Kind] = ()) -> None:
    """Sends all further events of this process to one function only, such as a `Recorder`.

    Args:
        take: The function.
        logged_elsewhere: Kinds that another process logs, so that this one does not.
    """
    _takers[:] = [take]
    _logged_elsewhere.clear()
    _logged_elsewhere.update(logged_elsewhere)


@contextlib.contextmanager
def recorded(take: Callable[[RunEvent], object]) -> Iterator[None]:
    """Sends the events of this process also to a function, until the context ends."""
    _takers.append(take)
    try:
        yield
    finally:
        _takers.remove(take)


class Recorder:
    """Writes events into a run's folder. A failed write ends recording; a slow one does not delay recovery.

    Args:
        filesystem: The `pyarrow.fs.FileSystem` of the run.
        run: Path of the run's folder there.
    """

    def __init__(self, filesystem: pyarrow.fs.FileSystem, run: str):
        self._filesystem, self._folder, self._failed = filesystem, posixpath.join(run, FOLDER), False
        self._writing: threading.Thread | None = None

    def __call__(self, event: RunEvent) -> None:
        if self._failed:
            return
        path = posixpath.join(self._folder, f"{time.time_ns()}_{os.getpid()}.json")
        is_slow = self._writing is not None and self._writing.is_alive()
        self._writing = threading.Thread(target=self._write, args=(path, event), daemon=True, name="raytf_event")
        self._writing.start()
        if not is_slow:
            self._writing.join(timeouts.get().event_record)

    def _write(self, path: str, event: RunEvent) -> None:
        try:
            self._filesystem.create_dir(self._folder)
            with self._filesystem.open_output_stream(path) as file:
                file.write(json.dumps(dataclasses.asdict(event)).encode())
        except OSError as error:
            self._failed = True
            logger.warning(
                f"Events for `raytf report` end here, as they cannot be written: {first_line(error)}. Training "
                "continues without them. Mend the storage; a restart of the run writes them again"
            )


def run_events(run: Any) -> list[RunEvent]:
    """Returns the events of a run in order of time, such as lost and replaced workers, restarts, stops and resizes.

    Args:
        run: The `Result` of a `KerasTrainer` or of a trial, or the path or URI of its folder.

    Returns:
        A list of `RunEvent`; `str(event)` is its line in the log; some kinds are only recorded.

    Raises:
        ConfigError: There is no such folder.

    Example:
        >>> import raytf, tempfile
        >>> len(raytf.run_events(tempfile.mkdtemp()))
        0
    """
    if hasattr(run, "filesystem"):
        filesystem, path = run.filesystem, run.path
    else:
        expected = "the Result of a run, or the path or URI of its folder"
        validation.check_kind("run", run, (str, os.PathLike), expected, "Pass what fit() returned", optional=False)
        location = os.fspath(run)
        try:
            uri = location if "://" in location else os.path.abspath(location)
            filesystem, path = pyarrow.fs.FileSystem.from_uri(uri)
        except ValueError as error:
            rule = "Events are read from a folder, or from a URI that pyarrow knows"
            raise ConfigError(rule, f"{location!r} ({first_line(error)})", "Check it") from error
    if filesystem.get_file_info(path).type != FileType.Directory:
        raise ConfigError("Events are read from the folder of a run", repr(run), "Name the folder that it printed")
    return read_events(filesystem, path)


def read_events(filesystem: pyarrow.fs.FileSystem, run: str) -> list[RunEvent]:
    """Returns the events in a run's folder, sorted by time, without truncated or crafted ones."""
    infos = filesystem.get_file_info(FileSelector(posixpath.join(run, FOLDER), allow_not_found=True))
    events = []
    for info in infos:
        with contextlib.suppress(stored_json.UnreadableError, TypeError, ValueError, KeyError, OverflowError):
            events.append(_event(stored_json.read_object(filesystem, info.path)))
    return sorted(events, key=lambda event: event.time)


def _event(fields: dict[str, Any]) -> RunEvent:
    kind = Kind(_FORMER_KINDS.get(fields["kind"], fields["kind"]))
    event = RunEvent(**{**fields, "kind": kind, "ranks": tuple(map(int, fields["ranks"]))})
    optional = (event.step, event.epoch, event.seconds, event.workers, event.before)
    numbers = (event.time, *(n for n in optional if n is not None))
    texts = (event.node, event.name, event.why, event.more)
    if not all(type(number) in (int, float) for number in numbers) or not all(type(text) is str for text in texts):
        raise ValueError(fields)
    if not 0 <= event.time < 1 << 36:  # no date, which a report shows
        raise ValueError(fields)
    str(event)  # raises where an attribute that its kind needs is missing
    return event
