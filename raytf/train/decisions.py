"""What a run does when something happens to its workers. Pure: no Ray, no TensorFlow, no clock.

Ray Train's controller (`startup.py`) and the group of a trial's workers (`worker_group.py`) tell `Decisions` what they
see, and do what it says. `decide` is the whole table; tests simulate it.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from raytf.events import names
from raytf.worker.ending import DRAIN, RESIZE, STOP


class Phase(enum.Enum):
    """Where a run stands."""

    STARTING = enum.auto()  # no group of workers trains; one is to start
    TRAINING = enum.auto()
    RECOVERING = enum.auto()  # the others wait in their step
    LEAVING = enum.auto()  # all were asked to end after a step
    OVER = enum.auto()


class Do(enum.Enum):
    """What can be done."""

    IGNORE = enum.auto()
    RECOVER = enum.auto()  # replace `ranks` in place; of none, connect all anew
    INTERRUPT = enum.auto()  # tell the recovery that `ranks` were lost, too
    RESTART = enum.auto()  # all workers, from the last checkpoint
    END_AFTER_STEP = enum.auto()  # ask all to, with `why` as the reason
    RESIZE = enum.auto()  # to `workers`, at once
    FAIL = enum.auto()


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run.

    Args:
        workers: of its group.
        fewest, most: that it may have.
        failures_left: how many losses of workers, and restarts for one, are allowed.
        recovers: whether a lost worker is replaced in place, where that can be done.
        ends_after_step: whether workers can be asked to end after a step.
        asks_again: whether those that were asked are asked again behind a recovery.
        phase: see `Phase`.
        lost: ranks that are being replaced.
        also: those that were lost since.
        stopping: whether it was asked to stop.
    """

    workers: int
    fewest: int
    most: int
    failures_left: float
    recovers: bool
    ends_after_step: bool = True
    asks_again: bool = True
    phase: Phase = Phase.STARTING
    lost: frozenset[int] = frozenset()
    also: frozenset[int] = frozenset()
    stopping: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all workers train, and none is missing."""
        return self.phase in (Phase.TRAINING, Phase.LEAVING)


@dataclass(frozen=True)
class Started:
    """A group of workers trains; `failures_left` where others count them, too."""

    workers: int
    failures_left: float | None = None


@dataclass(frozen=True)
class Lost:
    """Processes of workers have ended, or stood still and were ended; `reported` have ended their step meanwhile."""

    ranks: frozenset[int]
    reported: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Failed:
    """Workers have failed by themselves."""

    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Disconnected:
    """The processes of all live, and wait for other connections."""


@dataclass(frozen=True)
class Recovered:
    """The places of lost workers are taken, or all are connected again."""


@dataclass(frozen=True)
class NotRecovered:
    """They are not, for a reason; `again` if more were lost: `also` of the others, and so many `new_lost` new ones."""

    why: str
    again: bool = False
    also: frozenset[int] = frozenset()
    new_lost: int = 0


@dataclass(frozen=True)
class StopRequested:
    """The run is to end after a step."""


@dataclass(frozen=True)
class Drained:
    """A node of the workers is to go; `stays` if others can be started in their place."""

    stays: bool


@dataclass(frozen=True)
class Room:
    """There is room for so many workers; `late` if those that were asked to end after a step have not."""

    workers: int
    late: bool = False


@dataclass(frozen=True)
class NotTold:
    """The workers could not be asked to end after a step."""


@dataclass(frozen=True)
class Ended:
    """All workers have ended after the same step."""


Event = (
    Started | Lost | Failed | Disconnected | Recovered | NotRecovered | StopRequested | Drained | Room | NotTold | Ended
)


@dataclass(frozen=True, kw_only=True)
class Action:
    """What is done, and the state from then on.

    Args:
        do: what.
        state: from then on.
        ranks: whose places are taken.
        workers: how many there are to be.
        failures: to count now; that of a restart counts who restarts.
        why: a clause, or why workers end after a step (`ending.STOP`, `DRAIN`, `RESIZE`).
    """

    do: Do
    state: RunState
    ranks: frozenset[int] = frozenset()
    workers: int = 0
    failures: int = 0
    why: str = ""


_NONE: dict[str, frozenset[int]] = {"lost": frozenset(), "also": frozenset()}


def decide(state: RunState, event: Event) -> Action:
    """Returns what follows from an event."""
    ignore = Action(do=Do.IGNORE, state=state)
    if state.phase is Phase.OVER and not isinstance(event, Started):
        return ignore
    match event:
        case Started(workers, left):  # also what Ray starts all the same, as it counts some losses as no failure
            left = state.failures_left if left is None else left
            return _then(ignore, workers=workers, failures_left=left, phase=_phase(state))
        case Lost(ranks, reported):
            if state.phase is Phase.RECOVERING:
                also = ranks - state.lost - state.also
                interrupt = Action(do=Do.INTERRUPT, state=state, ranks=also)
                return _then(interrupt, also=state.also | also) if also else ignore
            return _recover(state, ranks, reported) if state.is_whole else ignore
        case Failed():
            return ignore if state.phase is Phase.STARTING else _anew(state, "a worker failed by itself")
        case Disconnected():
            return _recover(state, frozenset()) if state.is_whole else ignore
        case Recovered() if state.phase is Phase.RECOVERING:
            count = len(state.lost)
            done = dataclasses.replace(ignore, failures=count)
            return _then(done, phase=_phase(state), **_NONE, failures_left=state.failures_left - count)
        case NotRecovered(why, again, also, new_lost) if state.phase is Phase.RECOVERING:
            state = dataclasses.replace(state, failures_left=state.failures_left - new_lost)
            action = _recover(state, state.lost | state.also | also) if again else _anew(state, why)
            more = {"why": action.why if action.do is Do.RECOVER or not again else f"{why}, and {action.why}"}
            return dataclasses.replace(action, failures=action.failures + new_lost, **more)
        case StopRequested():
            state = dataclasses.replace(state, stopping=True)
            if state.phase is Phase.STARTING or not state.ends_after_step:
                return _over(state, "the run is to stop")
            return _end_after_step(state, STOP)
        case Drained(stays):
            if state.phase is Phase.STARTING:
                return ignore
            return _end_after_step(state, DRAIN if stays and not state.stopping else STOP)
        case Room(workers, late):
            waits = state.phase is not Phase.TRAINING and not (late and state.phase is Phase.LEAVING)
            if waits or state.stopping or workers == state.workers or not state.fewest <= workers <= state.most:
                return ignore
            if state.ends_after_step and not late:
                return dataclasses.replace(_end_after_step(state, RESIZE), workers=workers)
            return _then(Action(do=Do.RESIZE, state=state, workers=workers), phase=Phase.STARTING)
        case NotTold() if state.phase is Phase.LEAVING and not state.stopping:
            return _then(ignore, phase=Phase.TRAINING)
        case Ended() if state.phase is not Phase.STARTING:
            if state.stopping:
                return _then(ignore, phase=Phase.OVER)
            return _then(Action(do=Do.RESTART, state=state), phase=Phase.STARTING, **_NONE)
    return ignore


def _then(action: Action, **changes) -> Action:
    return dataclasses.replace(action, state=dataclasses.replace(action.state, **changes))


def _phase(state: RunState) -> Phase:
    return Phase.LEAVING if state.stopping else Phase.TRAINING


def _end_after_step(state: RunState, why: str) -> Action:
    action = Action(do=Do.END_AFTER_STEP, state=state, why=why)
    leaves = state.ends_after_step and state.phase is not Phase.RECOVERING
    return _then(action, phase=Phase.LEAVING) if leaves else action


def _recover(state: RunState, ranks: frozenset[int], reported: frozenset[int] = frozenset()) -> Action:
    """Replaces workers in place, or connects all anew; where that is not allowed, all start anew."""
    count = len(ranks) or 1  # failures: of lost connections one, of lost workers each, when it is replaced
    said = reported - ranks
    if not state.recovers:
        return _anew(state, "")
    if len(ranks) == state.workers:
        return _anew(state, "no other worker is left that holds the training's state")
    if count > state.failures_left:
        return _anew(state, "FailureConfig allows no more failures")
    if state.phase is Phase.LEAVING and not state.asks_again:
        return _anew(state, "the trial was to end after that step")
    if said:
        return _anew(state, f"{names(ranks)} was lost between two steps, after a report of {names(said)}")
    now = 0 if ranks else 1
    action = Action(do=Do.RECOVER, state=state, ranks=ranks, failures=now)
    return _then(action, phase=Phase.RECOVERING, lost=ranks, also=frozenset(), failures_left=state.failures_left - now)


def _anew(state: RunState, why: str) -> Action:
    """Starts all workers anew, for which a failure counts, unless none is left or the run is to stop."""
    if state.stopping:
        return _over(state, why or "the run is to stop")
    if state.failures_left < 1:
        return _over(state, why)
    left = state.failures_left - 1
    action = Action(do=Do.RESTART, state=state, why=why)
    return _then(action, phase=Phase.STARTING, failures_left=left, **_NONE)


def _over(state: RunState, why: str) -> Action:
    return _then(Action(do=Do.FAIL, state=state, why=why), phase=Phase.OVER, **_NONE)


class Decisions:
    """Those of a run, one after the other.

    Attributes:
        state: after the last one.
    """

    def __init__(self, state: RunState):
        self.state, self._lock = state, threading.Lock()

    def take(self, event: Event) -> Action:
        """Takes the next one."""
        with self._lock:
            action = decide(self.state, event)
            self.state = action.state
            return action


class WorkerState(enum.Enum):
    """How a worker is seen."""

    WELL = enum.auto()
    ENDED = enum.auto()  # after a step, as all do that were asked to
    LOST = enum.auto()
    FAILED = enum.auto()  # by itself
    AFFECTED = enum.auto()  # by another's loss


def happened(seen: Sequence[WorkerState]) -> Ended | Failed | Lost | None:
    """Returns the event that a look at all workers shows, by rank."""
    if WorkerState.ENDED in seen:  # the others end after that step, too
        return Ended()
    if failed := ranks_of(seen, WorkerState.FAILED):
        return Failed(failed)
    lost = ranks_of(seen, WorkerState.LOST)
    return Lost(lost) if lost else None


def staying(seen: Sequence[WorkerState]) -> frozenset[int]:
    """Returns the workers whose processes are of use to the next group: none where one has failed by itself."""
    return frozenset() if WorkerState.FAILED in seen else frozenset(range(len(seen))) - ranks_of(seen, WorkerState.LOST)


def ranks_of(seen: Sequence[WorkerState], kind: WorkerState) -> frozenset[int]:
    """Returns the ranks that are seen so."""
    return frozenset(rank for rank, its in enumerate(seen) if its is kind)
