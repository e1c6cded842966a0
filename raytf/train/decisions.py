"""Decides how a run reacts to events of its workers. Pure: no Ray, no TensorFlow, no clock.

The groups of workers (`group.py`) and the engine (`engine.py`) send events to `Decisions`, and execute its actions.
`decide` is the whole table; tests simulate it.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from raytf.events import worker_names
from raytf.worker.stop import DRAIN, RESIZE, STOP

# Reasons as clauses.
NO_FAILURES_LEFT = "FailureConfig allows no more failures"
STOPPING = "a stop of the run was requested"


class Phase(enum.Enum):
    """Phase of a run."""

    STARTING = enum.auto()  # no worker group trains; one starts next
    TRAINING = enum.auto()
    RECOVERING = enum.auto()  # the other workers wait in their step
    LEAVING = enum.auto()  # all workers received a request to stop after a step
    ENDED = enum.auto()


class ActionKind(enum.Enum):
    """Kind of an action."""

    IGNORE = enum.auto()
    RECOVER = enum.auto()  # replace `ranks` in place; if there are none, reconnect all workers
    RESTART = enum.auto()  # all workers, from the last checkpoint
    END_AFTER_STEP = enum.auto()  # request it from all workers, with `why` as the reason
    RESIZE = enum.auto()  # to the other number of workers, at once
    FAIL = enum.auto()


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run.

    Args:
        workers: Number of workers of its group.
        fewest, most: Range of the number of workers.
        failures_left: Number of failures still allowed: losses of workers, and restarts because of one.
        preemptions_left: Number of times that drained nodes may still interrupt the run, and it counts as no failure.
        recovers: Whether a lost worker is replaced in place if possible.
        ends_after_step: Whether workers can be requested to stop after a step.
        resends_stop: Whether the request to stop is sent again after a recovery.
        phase: Phase of the run.
        lost: Ranks that are being replaced.
        stopping: Whether a stop of the run was requested.
    """

    workers: int
    fewest: int
    most: int
    failures_left: float
    recovers: bool
    ends_after_step: bool = True
    resends_stop: bool = True
    preemptions_left: float = float("inf")
    phase: Phase = Phase.STARTING
    lost: frozenset[int] = frozenset()
    stopping: bool = False

    @property
    def is_whole(self) -> bool:
        """Returns whether all workers train, and none is missing."""
        return self.phase in (Phase.TRAINING, Phase.LEAVING)


@dataclass(frozen=True)
class Started:
    """A worker group trains."""

    workers: int


@dataclass(frozen=True)
class Lost:
    """Processes of workers have died, or froze and were killed.

    Workers in `reported` have ended their step meanwhile.
    """

    ranks: frozenset[int]
    reported: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Failed:
    """Workers have failed by themselves."""

    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Disconnected:
    """All processes live, and wait for new connections."""


@dataclass(frozen=True)
class Recovered:
    """All lost workers are replaced, or all workers are connected again."""


@dataclass(frozen=True)
class NotRecovered:
    """The recovery failed, for the reason `why`.

    `lost_another` is True if more workers were lost: the ranks in `also_lost`, and `new_lost` replacement workers.
    """

    why: str
    lost_another: bool = False
    also_lost: frozenset[int] = frozenset()
    new_lost: int = 0


@dataclass(frozen=True)
class StopRequested:
    """A request to stop the run after a step."""


@dataclass(frozen=True)
class Drained:
    """A node of the workers is drained; `stays` if workers can start on other nodes."""

    stays: bool


@dataclass(frozen=True)
class CapacityChanged:
    """The cluster has room for `workers` workers; `overdue` if a requested stop after a step is overdue."""

    workers: int
    overdue: bool = False


@dataclass(frozen=True)
class StopNotDelivered:
    """The request to stop after a step did not reach all workers."""


@dataclass(frozen=True)
class Ended:
    """All workers have ended after the same step."""


Event = (
    Started
    | Lost
    | Failed
    | Disconnected
    | Recovered
    | NotRecovered
    | StopRequested
    | Drained
    | CapacityChanged
    | StopNotDelivered
    | Ended
)


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action, and the state of the run after it.

    Args:
        kind: Kind of the action.
        state: State of the run after it.
        ranks: Lost ranks that the action handles.
        why: Reason as a clause, or why workers stop after a step (`stop.STOP`, `DRAIN`, `RESIZE`).
        failure: Why the run fails, as a clause; "" if it does not.
    """

    kind: ActionKind
    state: RunState
    ranks: frozenset[int] = frozenset()
    why: str = ""
    failure: str = ""


def decide(state: RunState, event: Event) -> Action:
    """Returns the action that follows from an event."""
    ignore = Action(kind=ActionKind.IGNORE, state=state)
    if state.phase is Phase.ENDED and not isinstance(event, Started):
        return ignore
    match event:
        case Started(workers):  # also after the end, as an end after a step is no failure
            return _with_state(ignore, workers=workers, phase=_phase(state))
        case Lost(ranks, reported):
            return _recover(state, ranks, reported) if state.is_whole else ignore
        case Failed():
            return ignore if state.phase is Phase.STARTING else _restart_all(state, "a worker failed by itself")
        case Disconnected():
            return _recover(state, frozenset()) if state.is_whole else ignore
        case Recovered() if state.phase is Phase.RECOVERING:
            failures_left = state.failures_left - len(state.lost)
            return _with_state(ignore, phase=_phase(state), lost=frozenset(), failures_left=failures_left)
        case NotRecovered(why, lost_another, also_lost, new_lost) if state.phase is Phase.RECOVERING:
            state = dataclasses.replace(state, failures_left=state.failures_left - new_lost)
            action = _recover(state, state.lost | also_lost) if lost_another else _restart_all(state, why)
            complete = action.kind is ActionKind.RECOVER or not lost_another
            return action if complete else dataclasses.replace(action, why=f"{why}, and {action.why}")
        case StopRequested():
            state = dataclasses.replace(state, stopping=True)
            if state.phase is Phase.STARTING or not state.ends_after_step:
                return _fail_run(state, STOPPING, STOPPING)
            return _end_after_step(state, STOP)
        case Drained(stays):
            if state.phase is Phase.STARTING:
                return ignore
            return _end_after_step(state, DRAIN if stays and not state.stopping else STOP)
        case CapacityChanged(workers, overdue):
            waits = state.phase is not Phase.TRAINING and not (overdue and state.phase is Phase.LEAVING)
            if waits or state.stopping or workers == state.workers or not state.fewest <= workers <= state.most:
                return ignore
            if state.ends_after_step and not overdue:
                return _end_after_step(state, RESIZE)
            return _with_state(Action(kind=ActionKind.RESIZE, state=state), phase=Phase.STARTING)
        case StopNotDelivered() if state.phase is Phase.LEAVING and not state.stopping:
            return _with_state(ignore, phase=Phase.TRAINING)
        case Ended() if state.phase is not Phase.STARTING:
            if state.stopping:
                return _with_state(ignore, phase=Phase.ENDED)
            return _with_state(Action(kind=ActionKind.RESTART, state=state), phase=Phase.STARTING, lost=frozenset())
    return ignore


def _with_state(action: Action, **changes) -> Action:
    return dataclasses.replace(action, state=dataclasses.replace(action.state, **changes))


def _phase(state: RunState) -> Phase:
    return Phase.LEAVING if state.stopping else Phase.TRAINING


def _end_after_step(state: RunState, why: str) -> Action:
    action = Action(kind=ActionKind.END_AFTER_STEP, state=state, why=why)
    leaves = state.ends_after_step and state.phase is not Phase.RECOVERING
    return _with_state(action, phase=Phase.LEAVING) if leaves else action


def _recover(state: RunState, ranks: frozenset[int], reported: frozenset[int] = frozenset()) -> Action:
    """Replaces workers in place, or reconnects all; restarts all if that is not allowed."""
    count = len(ranks) or 1  # failures: one for lost connections; one per lost worker, when it is replaced
    reporters = reported - ranks
    if not state.recovers:
        return _restart_all(state, "")
    if len(ranks) == state.workers:
        return _restart_all(state, "no other worker is left that holds the training's state")
    if count > state.failures_left:
        return _restart_all(state, NO_FAILURES_LEFT)
    if state.phase is Phase.LEAVING and not state.resends_stop:
        return _restart_all(state, "the trial stops after that step")
    if reporters:
        return _restart_all(
            state, f"{worker_names(ranks)} was lost between two steps, after a report of {worker_names(reporters)}"
        )
    failures_left = state.failures_left - (0 if ranks else 1)
    action = Action(kind=ActionKind.RECOVER, state=state, ranks=ranks)
    return _with_state(action, phase=Phase.RECOVERING, lost=ranks, failures_left=failures_left)


def _restart_all(state: RunState, why: str) -> Action:
    """Restarts all workers, which counts as a failure, unless no failure is left or the run stops."""
    if state.stopping:
        return _fail_run(state, why or STOPPING, STOPPING)
    if state.failures_left < 1:
        return _fail_run(state, why, NO_FAILURES_LEFT)
    failures_left = state.failures_left - 1
    action = Action(kind=ActionKind.RESTART, state=state, why=why)
    return _with_state(action, phase=Phase.STARTING, failures_left=failures_left, lost=frozenset())


def _fail_run(state: RunState, why: str, failure: str) -> Action:
    action = Action(kind=ActionKind.FAIL, state=state, why=why, failure=failure)
    return _with_state(action, phase=Phase.ENDED, lost=frozenset())


class Decisions:
    """Makes the decisions of a run, one after another.

    Attributes:
        state: State after the last decision.
        made: Number of steps that workers of any group are known to have made.
    """

    def __init__(self, state: RunState):
        self.state, self.made, self._lock = state, 0, threading.Lock()

    def allow_preemption(self, failures: int) -> bool:
        """Allows so many more failures for a drained node, and returns True, unless no preemption is left."""
        with self._lock:
            state, allowed = self.state, self.state.preemptions_left >= 1
            if allowed:
                limits = {
                    "failures_left": state.failures_left + failures,
                    "preemptions_left": state.preemptions_left - 1,
                }
                self.state = dataclasses.replace(state, **limits)
            return allowed

    def take(self, event: Event) -> Action:
        """Returns the action for the next event, and updates the state."""
        with self._lock:
            action = decide(self.state, event)
            self.state = action.state
            return action


class WorkerState(enum.Enum):
    """State of a worker, as the driver sees it."""

    WELL = enum.auto()
    ENDED = enum.auto()  # after a step, as requested from all workers
    LOST = enum.auto()
    FAILED = enum.auto()  # by itself
    AFFECTED = enum.auto()  # by the loss of another worker


def event_of_states(states: Sequence[WorkerState]) -> Ended | Failed | Lost | None:
    """Returns the event that follows from the states of all workers, by rank; None without one."""
    if WorkerState.ENDED in states:  # the others stop after that step, too
        return Ended()
    if failed := ranks_of(states, WorkerState.FAILED):
        return Failed(failed)
    lost = ranks_of(states, WorkerState.LOST)
    return Lost(lost) if lost else None


def reusable_ranks(states: Sequence[WorkerState]) -> frozenset[int]:
    """Returns the ranks whose processes the next group can use: none if a worker has failed by itself."""
    return (
        frozenset()
        if WorkerState.FAILED in states
        else frozenset(range(len(states))) - ranks_of(states, WorkerState.LOST)
    )


def ranks_of(states: Sequence[WorkerState], kind: WorkerState) -> frozenset[int]:
    """Returns the ranks with this state."""
    return frozenset(rank for rank, state in enumerate(states) if state is kind)
