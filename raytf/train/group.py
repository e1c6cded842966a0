"""A group of workers: follows their events, watches their processes, and replaces lost ones. Driver side.

`run_group.RunGroup` has the workers of a run, `worker_group.WorkerGroup` those of trials and of `raytf.fit`. What
becomes of an event is decided by `decisions.decide`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from raytf import events, timeouts
from raytf.errors import PeerLostError, one_line
from raytf.events import Kind, RunEvent
from raytf.liveness import POLL_INTERVAL, STOPPED_INTERVAL
from raytf.runtime import cores, process_monitor
from raytf.runtime.failures import WorkerFrozenError, is_consequence, user_error
from raytf.runtime.hang_watch import HangMonitor
from raytf.runtime.process_monitor import ProcessKiller, ProcessLocation
from raytf.runtime.processes import Process
from raytf.runtime.settings import Listening
from raytf.timeouts import Timeouts
from raytf.train import backend, decisions, recovery_coordinator
from raytf.train.decisions import ActionKind, Decisions, Lost, WorkerState
from raytf.train.recovery_coordinator import RAISE_LIMIT, REPLACING, RESTARTING, Member, RecoveryCoordinator
from raytf.train.training_events import TrainingEvents
from raytf.worker.stop import DRAIN, StoppedForRestartError

# Seconds between two checks of all that sends no event.
_CHECK_INTERVAL = 0.2
# Seconds between two looks at a recovery, and for which a worker that joins waits for an event.
SOON_INTERVAL = 0.02
# If workers fail only by another's loss, a worker that is silent for so many seconds is the lost one.
_SILENT_INTERVAL = 3.0
# Seconds for Ray to notice the end of a process, that another one has reported.
_LOSS_INTERVAL = 2.0


class WaitingForRing:
    """Event: the training waits for the next ring, after the loss of a worker or of all connections."""


class PeerLossNoticed:
    """Event: the training has just lost another worker."""


@dataclass(frozen=True)
class Report:
    """Event: a report of one worker.

    Args:
        metrics: Metrics by name.
        checkpoint: A checkpoint in the run's folder, or None.
        validation: Whether to validate it, or how.
    """

    metrics: dict[str, Any]
    checkpoint: Any = None
    validation: Any = False


@dataclass(frozen=True)
class LoopEnded:
    """Event: the end of the train loop, with its value or its error."""

    value: Any = None
    error: Exception | None = None


class LostGroupError(Exception):
    """The group has ended.

    Args:
        errors: The error of each worker that has failed, by rank.
        why: Why a lost worker was not replaced in place, as a clause; None if that was not tried.
    """

    def __init__(self, errors: dict[int, Exception], why: str | None = None):
        super().__init__(errors, why)
        self.errors, self.why = errors, why


class EventGroup:
    """What all groups of workers have in common; subclasses start the workers, and take their events.

    Args:
        setup: The workers' `settings.WorkerSetup`.
        worker_resources: Resources of a worker.

    Attributes:
        members: The workers by rank.
        locations: Locations of their processes by rank.
        reported: Number of reports that were received, by rank.
        config: The workers' `settings.TensorflowConfig`.
        cores: Number of cores that each worker claims.
    """

    _decisions: Decisions

    def __init__(self, setup, worker_resources: dict[str, float]):
        self._setup, self.config, self._worker_resources = setup, setup.config, worker_resources
        self.cores = backend.cores_to_claim(setup, worker_resources.get("CPU", 1))
        self.members: list[Member] = []
        self.locations: dict[int, ProcessLocation] = {}
        self.reported: dict[int, int] = {}
        self._generation = 0  # generation of the workers' ring
        self._hangs: HangMonitor | None = None
        self._made = 0  # steps that the groups before have made, for the first hang detection of this one
        self._joining: dict[Any, Member] = {}  # by the ref of the next event
        self._training_events = TrainingEvents()
        limit = self.config.hang_timeout_s
        self._process_killer = ProcessKiller(
            STOPPED_INTERVAL if limit is None else max(1.0, limit - POLL_INTERVAL), self._final_report
        )

    @property
    def actors(self) -> list:
        """The workers' actors by rank."""
        return [member.actor for member in self.members]

    @property
    def nodes(self) -> list[str]:
        """Ray's id of each worker's node, by rank."""
        return [self.locations[rank].node for rank in sorted(self.locations)]

    def _reserve(self) -> tuple[list[str], list[bool]]:
        """Returns the address of each worker, and whether it has cores of its own."""
        calls = [actor.reserve.remote(timeouts.get(), self.config.listening, self.cores) for actor in self.actors]
        reserved = self._answers(calls, timeouts.get().process_start, "the start of its process")
        for rank, (_, _, location) in enumerate(reserved):
            self._record_location(rank, location)
        addresses = [address for address, _, _ in reserved]
        return addresses, cores.agree_on_pinning(addresses, [claimed for _, claimed, _ in reserved])

    def _answers(self, calls: list, seconds: float, action: str) -> list:
        """Returns the answers of the workers, in time; see `answers.collect_answers`."""
        raise NotImplementedError

    def _record_location(self, rank: int, location: ProcessLocation) -> None:
        self.locations[rank] = location
        self._process_killer.watch(rank, location)

    def _final_report(self, rank: int) -> tuple[str, str]:
        hangs = self._hangs
        return ("", "") if hangs is None else hangs.final_report(rank)

    # ------------------------------------------------------------------------------------------ events

    def _take_event(self, member: Member, event: Any) -> bool:
        """Handles an event; returns whether to request the next one from the worker now."""
        raise NotImplementedError

    def _begin_following(self, calls: dict[Any, int]) -> None:
        """Starts to follow the workers, by the ref of the next event of each."""
        now = time.monotonic()
        self._answered_at = dict.fromkeys(range(len(self.members)), now)
        self._errors: dict[int, Exception] = {}
        self._waits: set[int] = set()  # ranks that wait for the next ring
        self._stale: set[Any] = set()  # refs from before a recovery: a worker that waited then may have continued
        self._failed_at: float | None = None
        self._pending = calls
        self._process_killer.mark_alive(*self._answered_at)

    def _poll(self, rank: int) -> None:
        self._pending[self.members[rank].actor.next_event.remote()] = rank

    def _follow(self) -> None:
        """Takes the next events of all workers."""
        self._training_events.check()
        if not self._pending:
            time.sleep(_CHECK_INTERVAL)  # all wait for one that has failed
            return
        ray.wait(list(self._pending), timeout=_CHECK_INTERVAL)
        done, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for ref in done:
            rank = self._pending.pop(ref)
            event = taken(ref)
            if isinstance(event, RayError):
                self._errors[rank] = event
                continue
            self._answered_at[rank] = time.monotonic()
            self._process_killer.mark_alive(rank)
            if isinstance(event, WaitingForRing) and ref not in self._stale:
                self._waits.add(rank)
            elif event is None:
                self._waits.discard(rank)
            elif isinstance(event, PeerLossNoticed):
                self._failed_at = self._failed_at or time.monotonic()
            if self._take_any(self.members[rank], event):
                self._poll(rank)

    def _take_any(self, member: Member, event: Any) -> bool:
        """Takes an event, or None; returns whether the worker is to be asked for the next one now."""
        if isinstance(event, RunEvent):
            self._training_events.take(event)
            return True
        return event is None or isinstance(event, (WaitingForRing, PeerLossNoticed)) or self._take_event(member, event)

    def _handle_failures(self) -> None:
        """Executes the action for what has happened to workers.

        Raises:
            LostGroupError: The group has ended.
        """
        for rank, how in list(self._process_killer.ended.items()):
            self._errors[rank] = WorkerFrozenError(how, self._process_killer.final_reports.get(rank, ""))
        for rank, error in list(self._hangs.ended.items()) if self._hangs is not None else ():
            if rank not in self._process_killer.ended:
                self._errors[rank] = error
        event = decisions.event_of_states([worker_state(self._errors.get(member.rank)) for member in self.members])
        if event is None and self._errors:
            event = self._lost_by_silence(time.monotonic())
        if event is None and self._waits and len(self._waits) == len(self.members):
            self._connect()
        if event is None:
            return
        if isinstance(event, Lost):
            event = Lost(event.ranks, self._reporters())
            causes = [user_error(self._errors[rank]) for rank in event.ranks]
            if all(getattr(cause, "preempted", False) for cause in causes):
                self._decisions.allow_preemption(max(1, len(causes)))
        if isinstance(event, decisions.Ended):
            self._wait_for_all()
            if self._stop_error().why == DRAIN and not self._decisions.allow_preemption(0):
                event = decisions.Failed(frozenset(self._errors))
        action = self._decisions.take(event)
        self._emit(event, action)
        if action.kind is not ActionKind.RECOVER:
            raise LostGroupError(dict(self._errors), action.why if action.state.recovers else None)
        for rank in self._hangs.ended if self._hangs is not None else ():
            ray.kill(self.members[rank].actor)
        self._recover(action.ranks)

    def _reporters(self) -> frozenset[int]:
        """Returns the ranks that have reported, and wait: their step cannot be made again."""
        return frozenset()

    def _stop_error(self) -> StoppedForRestartError:
        return next(
            error for error in map(user_error, self._errors.values()) if isinstance(error, StoppedForRestartError)
        )

    def _emit(self, event, action: decisions.Action) -> None:
        if isinstance(event, decisions.Ended):
            moved = self._stop_error()
            events.emit(RunEvent(kind=Kind.ENDED_AFTER_STEP, step=moved.step, why=str(moved)))
            return
        kind = Kind.WORKER_LOST if isinstance(event, Lost) else Kind.WORKER_FAILED
        reason = "" if action.why in ("", action.failure) else f". It is not replaced in place, as {action.why}"
        more = REPLACING if action.kind is ActionKind.RECOVER else reason + self._describe_end(action)
        for rank in sorted(action.ranks or event.ranks):
            why = one_line(user_error(self._errors[rank]))
            events.emit(RunEvent(kind=kind, ranks=(rank,), why=why, more=more))

    def _describe_end(self, action: decisions.Action) -> str:
        """Returns what follows from the end of the group, and what the user can do, as sentences."""
        if action.kind is ActionKind.FAIL:
            fix = RAISE_LIMIT if action.failure == decisions.NO_FAILURES_LEFT else ""
            return f". The run fails, as {action.failure}; its checkpoints stay{fix}"
        return RESTARTING if action.kind is ActionKind.RESTART else ""

    def _lost_by_silence(self, now: float) -> decisions.Event | None:
        """Returns the event for workers that fail by another's loss, if that loss itself shows in no way."""
        self._failed_at = self._failed_at or now
        silent = {
            rank: now - self._answered_at[rank]
            for rank in self._pending.values()
            if now - self._answered_at[rank] >= _SILENT_INTERVAL
        }
        if not silent:
            return decisions.Failed(frozenset(self._errors)) if now - self._failed_at >= _LOSS_INTERVAL else None
        if now - self._failed_at < timeouts.get().silent_worker:
            return None
        for rank, seconds in silent.items():
            location = self.locations[rank]
            how = f"timeout after {seconds:.0f} s: its process {location.pid} on {location.host} sent nothing"
            self._errors[rank] = WorkerFrozenError(how)
        return Lost(frozenset(silent))

    def _wait_for_all(self) -> None:
        """Waits until all workers have ended after the same step."""
        deadline = time.monotonic() + timeouts.get().workers_leave
        while self._pending and time.monotonic() < deadline:
            self._follow()

    # ------------------------------------------------------------------------------------------ recovery

    def _connect(self) -> None:
        """Reconnects workers in the step that all are in: their connections are lost, and their processes live."""
        action = self._decisions.take(decisions.Disconnected())
        if action.kind is ActionKind.RECOVER:
            self._recover(frozenset())
        else:
            why = f"the workers have lost their connections, and {action.why or 'all workers restart'}"
            recovery_coordinator.give_up(self.members, why)
            self._waits.clear()

    def _recover(self, lost: frozenset[int]) -> None:
        """Replaces these ranks, or reconnects all workers if there are none; raises LostGroupError if that fails."""
        self._stop_watching_for_hangs()
        while True:
            self._generation += 1
            tried = RecoveryCoordinator(self, lost, self._generation)
            while not tried.done:
                self._serve_replacements()
                tried.wait(SOON_INTERVAL)
            if tried.recovered:
                break
            action = self._decisions.take(
                decisions.NotRecovered(tried.why, tried.lost_another, frozenset(tried.also_lost), tried.new_lost)
            )
            if action.kind is not ActionKind.RECOVER:
                self._give_up(tried, action)
            ranks, lost = tuple(sorted(lost)), action.ranks
            events.emit(RunEvent(kind=Kind.RECOVERY_INTERRUPTED, ranks=ranks, why=tried.why))
        self._decisions.take(decisions.Recovered())
        self._adopt_replacements(tried)
        self._waits.clear()
        self._stale = set(self._pending)
        self._watch_for_hangs()

    def _serve_replacements(self) -> None:
        """Handles events of replacement workers, which may request what the driver has before they join."""
        for ref in ray.wait(list(self._joining), timeout=0)[0] if self._joining else ():
            member = self._joining.pop(ref)
            event = taken(ref)
            if isinstance(event, RayError):  # the recovery sees it, too
                continue
            if self._take_any(member, event):
                self._joining[member.actor.next_event.remote(SOON_INTERVAL)] = member

    def _adopt_replacements(self, tried: RecoveryCoordinator) -> None:
        pending = {ref: rank for ref, rank in self._pending.items() if rank not in tried.new}
        joining, self._joining = self._joining, {}
        self._pending = pending | {ref: member.rank for ref, member in joining.items()}
        for rank, member in tried.new.items():
            self.members[rank] = member
            self._errors.pop(rank, None)
            self._process_killer.ended.pop(rank, None)
            self._process_killer.final_reports.pop(rank, None)
            self._process_killer.unreachable.pop(rank, None)
            self._process_killer.watch(rank, self.locations[rank])
            if rank not in self._pending.values():
                self._poll(rank)
        self._answered_at = dict.fromkeys(self._answered_at, time.monotonic())
        self._failed_at = None

    def _give_up(self, tried: RecoveryCoordinator, action: decisions.Action) -> None:
        for rank in tried.lost:  # a call to it would block until Ray detects the loss of its node
            ray.kill(self.members[rank].actor)
        tried.give_up()
        restarts = action.kind is ActionKind.RESTART
        more = f". All workers restart from {tried.restart_point}" if restarts else self._describe_end(action)
        why, ranks = action.why or tried.why, tuple(sorted(tried.lost))
        events.emit(RunEvent(kind=Kind.RECOVERY_FAILED, ranks=ranks, step=tried.saved_step, why=why, more=more))
        # if all processes live, no error of a worker has arrived
        errors = dict(self._errors) or {rank: PeerLostError(rank, why) for rank in range(len(self.members))}
        raise LostGroupError(errors, why)

    def has_room(self, ranks: Iterable[int]) -> bool:
        """Returns whether processes can start for these ranks; True if the group has to wait for room."""
        return True

    def replace(self, rank: int) -> Member:
        """Starts a process that replaces a lost worker, and returns it when its place is known."""
        member = self._start_replacement(rank)
        try:
            call = member.actor.execute.remote(process_monitor.current_process)
            self.locations[rank] = ray.get(call, timeout=timeouts.get().replacement_start)
        except BaseException:
            ray.kill(member.actor)
            raise
        return member

    def _start_replacement(self, rank: int) -> Member:
        raise NotImplementedError

    def send_environment(self, member: Member, addresses: list[str], token: bytes, pinned: bool) -> Any:
        """Returns the ref of the answer of a worker that is sent its environment."""
        raise NotImplementedError

    def start_again(self, member: Member) -> None:
        """Starts the training in a replacement worker."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ hangs, and the end

    def _watch_for_hangs(self) -> None:
        if self.config.hang_timeout_s is not None:
            execute = lambda rank, function: self.members[rank].actor.execute.remote(function)
            limits = self.config.hang_timeout_s, self.config.first_step_timeout_s
            made, self._made = self._made, 0
            self._hangs = HangMonitor(execute, self.locations, *limits, made=made)

    def _stop_watching_for_hangs(self) -> None:
        hangs, self._hangs = self._hangs, None
        if hangs is not None:
            self._decisions.made = max(self._decisions.made, hangs.made)
            hangs.close()

    def end(self, actors: Iterable[Any]) -> None:
        """Ends these workers, and all that watches the group."""
        self._stop_watching_for_hangs()
        self._process_killer.close()
        for actor in actors:
            ray.kill(actor)


class MemberProcess(Process):
    """A worker of a group, a Ray actor of one thread; subclasses train in another one. On a worker."""

    def reserve(self, limits: Timeouts, allowed: Listening, count: int) -> tuple[str, bool, ProcessLocation]:
        """Returns its "host:port", whether it has claimed cores for the life of the group, and its process."""
        timeouts.set_current(limits)
        return *backend.reserve(allowed, count), process_monitor.current_process()


def taken(ref) -> Any:
    """Returns the event of a call that has ended, or its error."""
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def worker_state(error: BaseException | None) -> WorkerState:
    """Returns the state of a worker from its error."""
    cause = user_error(error)
    if isinstance(cause, StoppedForRestartError):
        return WorkerState.ENDED
    if isinstance(cause, (RayActorError, ActorUnschedulableError, WorkerFrozenError)):
        return WorkerState.LOST
    return WorkerState.WELL if error is None else WorkerState.AFFECTED if is_consequence(error) else WorkerState.FAILED
