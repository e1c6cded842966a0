"""The workers of a run: starts them in its reservation, follows their events, replaces lost ones. Driver side.

`engine.Engine` starts one group after another; `decisions.decide` says what becomes of each event.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.placement_group import placement_group_table

from raytf import events, timeouts
from raytf.collectives import ring
from raytf.compat import ray_core
from raytf.errors import in_a_line
from raytf.events import Kind, RunEvent
from raytf.liveness import LOOK_INTERVAL, STOPPED_INTERVAL
from raytf.runtime import answers, cores, process_monitor, processes, resources
from raytf.runtime.failures import WorkerFrozenError, cause_of, is_consequence
from raytf.runtime.hang_watch import HangWatch
from raytf.runtime.process_monitor import ProcessLocation, Watchdog
from raytf.runtime.spares import Spares
from raytf.train import backend, decisions, ends, entry
from raytf.train.checkpoint_list import CheckpointList
from raytf.train.decisions import Decisions, Do, Drained, Lost, WorkerState
from raytf.train.healing import TAKES_ITS_PLACE, Asked, Healing, Recovery
from raytf.train.run_worker import Ended, Report, Request, RunJob, RunWorker, Wait, Woken
from raytf.worker.ending import DRAIN, MovedError

# Seconds between two checks of all that sends no event.
_LOOK_INTERVAL = 0.2
# Seconds between two looks at a recovery, and for which a worker that joins waits for an event.
_SOON_INTERVAL = 0.02
# If workers fail only by another's loss, a worker that is silent for so many seconds is the lost one.
_SILENT_INTERVAL = 3.0
# Seconds for Ray to notice the end of a process, of which another one has told.
_LOSS_INTERVAL = 2.0
# Seconds between two checks for drained nodes; each is a request to the head of a millisecond.
_DRAINS_INTERVAL = 1.0


class LostGroupError(Exception):
    """The group has ended, and another one can start. `errors`: the error of each worker that has failed, by rank."""

    def __init__(self, errors: dict[int, Exception]):
        super().__init__(errors)
        self.errors = errors


@dataclass(frozen=True)
class Member:
    """A `healing.Member` with its rank and the bundle of its resources."""

    actor: Any
    rank: int
    bundle: int


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What the groups of a run have in common.

    Args:
        setup: The workers' `settings.WorkerSetup`.
        scaling: ScalingConfig of the run.
        each: Resources of a worker.
        environment: Runtime environment of the workers' processes.
        rehearsed: See `entry.rehearse`.
        stays: Whether processes stay when the number of workers changes; they are outside of the reservation then.
        elastic: Whether the number of workers may change.
    """

    setup: Any
    scaling: Any
    each: Mapping[str, float]
    environment: dict[str, Any]
    rehearsed: list
    stays: bool
    elastic: bool

    @property
    def cpus(self) -> int:
        return processes.cpus_of(self.each)

    def start_process(self, node: str):
        """Starts a process outside of the reservation, which may become a worker."""
        variables = processes.threads(self.cpus)
        environment = self.environment | {"env_vars": variables | self.environment["env_vars"]}
        return processes.start(RunWorker, node, environment)


class RunGroup:
    """Starts the workers of a run; raises RayError or NoAnswerError if that fails.

    Args:
        spec: What all groups of the run have in common.
        group: Placement group of the run.
        size: Number of workers.
        there: (node, actor) of processes that may become workers; those that do not are ended.
        run: Decisions of the run.

    Attributes:
        members: The workers by rank.
        places: Locations of their processes by rank.
        nodes: Node of each worker by rank.
    """

    def __init__(self, spec: GroupSpec, group, size: int, there: Iterable[tuple[str, Any]], run: Decisions):
        self._spec, self._group, self._decisions = spec, group, run
        self._config = spec.setup.config
        self.places: dict[int, ProcessLocation] = {}
        self._recovery = Recovery(run.take, self._asked)
        self._hangs: HangWatch | None = None
        self._spares: Spares | None = None
        self._within: list = []  # actors in the reservation, which end with it
        self._job: Any = None
        self._drained: list[str] = []
        limit = self._config.hang_timeout_s
        self._watchdog = Watchdog(STOPPED_INTERVAL if limit is None else max(1.0, limit - LOOK_INTERVAL), self._words)
        self.members = self._start(size, there)
        try:
            self._settle()
        except BaseException as error:
            frozen = dict(self._watchdog.ended)
            self.close()
            if not frozen:
                raise
            text = "; ".join(f"worker {rank} was frozen at its start: {how}" for rank, how in sorted(frozen.items()))
            raise WorkerFrozenError(text) from error

    def _start(self, size: int, there: Iterable[tuple[str, Any]]) -> list[Member]:
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        existing: dict[int, Any] = {}
        for node, actor in there:
            bundle = next((i for i in range(size) if nodes[i] == node and i not in existing), None)
            if bundle is None:
                ray.kill(actor)
            else:
                existing[bundle] = actor
        made = [*existing, *(i for i in range(size) if i not in existing)]
        order = list(dict.fromkeys(nodes[i] for i in made))  # workers of a node have consecutive ranks
        made.sort(key=lambda i: order.index(nodes[i]))
        self.nodes = [nodes[i] for i in made]
        for i in made:
            if i not in existing:
                existing[i] = self._spec.start_process(nodes[i]) if self._spec.stays else self._placed(i)
        return [Member(existing[i], rank, i) for rank, i in enumerate(made)]

    def _placed(self, bundle: int):
        options = {"runtime_env": self._spec.environment}
        actor = resources.placed_actor(RunWorker, self._group, bundle, dict(self._spec.each), **options)
        self._within.append(actor)
        return actor

    def _settle(self) -> None:
        setup = self._spec.setup
        request = timeouts.get(), self._config.ports, backend.to_claim(setup, self._spec.each.get("CPU", 1))
        calls = [member.actor.reserve.remote(*request) for member in self.members]
        reserved = answers.collect(calls, timeouts.get().process_start, "the start of its process")
        addresses = [address for address, _, _ in reserved]
        pinned = cores.agreed(addresses, [claimed for _, claimed, _ in reserved])
        for member, (_, _, place) in zip(self.members, reserved, strict=True):
            self._see(member.rank, place)
        token = ring.new_token()
        calls = [self._environment(member, addresses, token, pinned[member.rank]) for member in self.members]
        answers.collect(calls, timeouts.get().process_setup, "its environment")

    def _environment(self, member: Member, addresses: list[str], token: bytes, pinned: bool):
        arguments = self._config, addresses, member.rank, self._spec.cpus, token, pinned
        return member.actor.execute.remote(backend.set_environment, *arguments)

    def _see(self, rank: int, place: ProcessLocation) -> None:
        self.places[rank] = place
        self._watchdog.watch(rank, place)

    def _words(self, rank: int) -> tuple[str, str]:
        hangs = self._hangs
        return ("", "") if hangs is None else hangs.last_words(rank)

    # ------------------------------------------------------------------------------------------ following

    def begin(self, job: RunJob) -> None:
        """Starts the train loop on all workers."""
        self._job = ray.put(job)
        calls = [member.actor.begin.remote(self._job, member.rank) for member in self.members]
        answers.collect(calls, timeouts.get().process_setup, "the begin of its training")

    def follow(self, listed: CheckpointList, take: Callable[[list[Report]], None], tick) -> Any:
        """Follows the train loop to its end; returns rank 0's value.

        Args:
            listed: The run's checkpoints.
            take: Called with the next report of each worker.
            tick: Called several times a second, with this group.

        Raises:
            LostGroupError: All workers have to restart, or the run fails.
        """
        self._list, self._take = listed, take
        now = time.monotonic()
        self._heard = dict.fromkeys(range(len(self.members)), now)
        self._received: dict[int, deque] = defaultdict(deque)
        self._counts: dict[int, int] = {}
        self._own = dict.fromkeys(self._heard, 0)  # reports of each rank's process
        self._asking: dict[int, tuple[Request, float]] = {}
        self._errors: dict[int, Exception] = {}
        self._values: dict[int, Any] = {}
        self._waits: set[int] = set()
        self._stale: set[Any] = set()  # refs from before a recovery: what waits there may have gone on
        self._meeting: dict[int, Any] = {}
        self._pending: dict[Any, int] = {}
        self._failed_at: float | None = None
        self._drains_at = now
        self._watch_for_hangs()
        for rank in range(len(self.members)):
            self._poll(rank)
        while len(self._values) < len(self.members):
            self._follow()
            self._answer_requests()
            self._judge()
            tick(self)
        return self._values[0]

    def _poll(self, rank: int) -> None:
        self._pending[self.members[rank].actor.next_event.remote()] = rank

    def _follow(self) -> None:
        """Takes the next events."""
        if not self._pending:
            time.sleep(_LOOK_INTERVAL)  # all wait for one that has failed
            return
        done, _ = ray.wait(list(self._pending), timeout=_LOOK_INTERVAL)
        more, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for ref in {*done, *more}:
            rank = self._pending.pop(ref)
            try:
                event = ray.get(ref)
            except RayError as error:
                self._errors[rank] = error
                continue
            self._heard[rank] = time.monotonic()
            self._watchdog.heard(rank)
            if isinstance(event, Wait) and ref not in self._stale:
                self._waits.add(rank)
            elif event is None:
                self._waits.discard(rank)
            if isinstance(event, Ended):
                self._end(rank, event)
            elif isinstance(event, Request) and event.what == "meet":
                self._meet(rank, event.value)
            elif isinstance(event, Request):
                self._asking[rank] = event, time.monotonic()
            else:
                if isinstance(event, Report):
                    self._report(rank, event)
                elif isinstance(event, Woken):
                    self._failed_at = self._failed_at or time.monotonic()
                self._poll(rank)

    def _answer_requests(self) -> None:
        """Answers requests of training threads, those for reported checkpoints when a worker's own are listed."""
        for rank, (event, since) in list(self._asking.items()):
            if event.what == "reported":
                validated, seconds = event.value
                waits = (self._own[rank] and self._received[rank]) or (validated and self._list.validates())
                if waits and (seconds is None or time.monotonic() - since < seconds):
                    continue
            del self._asking[rank]
            self.members[rank].actor.answer.remote(self._list.answer(event.what))
            self._poll(rank)

    def _end(self, rank: int, event: Ended) -> None:
        if event.error is not None:
            self._errors[rank] = event.error
        else:
            self._values[rank] = event.value
            if self._hangs is not None:
                self._hangs.over(rank)

    def _meet(self, rank: int, value: Any) -> None:
        self._meeting[rank] = value
        if len(self._meeting) == len(self.members):
            value, self._meeting = self._meeting[0], {}
            for member in self.members:
                member.actor.answer.remote(value)
                self._poll(member.rank)

    def _report(self, rank: int, report: Report) -> None:
        self._received[rank].append(report)
        self._own[rank] += 1
        self._counts[rank] = self._counts.get(rank, 0) + 1
        while all(self._received[member.rank] for member in self.members):
            self._take([self._received[member.rank].popleft() for member in self.members])

    def _judge(self) -> None:
        """Executes the action for what has happened to workers."""
        now = time.monotonic()
        for rank, how in list(self._watchdog.ended.items()):
            self._errors[rank] = WorkerFrozenError(how, self._watchdog.kept.get(rank, ""))
        for rank, error in list(self._hangs.ended.items()) if self._hangs is not None else ():
            if rank not in self._watchdog.ended:
                self._errors[rank] = error
        seen = [_seen(self._errors.get(member.rank)) for member in self.members]
        event = decisions.happened(seen)
        if event is None and self._errors:
            event = self._lost_by_silence(now)
        if event is None:
            self._keep_spares()
            self._look_at_drains(now)
            if self._waits and len(self._waits) == len(self.members):
                self._waits.clear()
                self._recovery.connect(self.members)
                self._recover()
            return
        if isinstance(event, decisions.Ended):
            self._wait_for_all()
        action = self._decisions.take(event)
        self._emit(event, action)
        if action.do is not Do.RECOVER:
            raise LostGroupError(dict(self._errors))
        for rank in self._hangs.ended if self._hangs is not None else ():
            ray.kill(self.members[rank].actor)
        self._recovery.begin(action.ranks)
        self._recover()

    def _emit(self, event, action: decisions.Action) -> None:
        if isinstance(event, decisions.Ended):
            errors = map(cause_of, self._errors.values())
            moved = next(error for error in errors if isinstance(error, MovedError))
            events.emit(RunEvent(kind=Kind.ENDED_AFTER_STEP, step=moved.step, why=str(moved)))
            return
        kind = Kind.WORKER_LOST if isinstance(event, Lost) else Kind.WORKER_FAILED
        more = TAKES_ITS_PLACE if action.do is Do.RECOVER else ""
        for rank in sorted(action.ranks or event.ranks):
            why = in_a_line(cause_of(self._errors[rank]))
            events.emit(RunEvent(kind=kind, ranks=(rank,), why=why, more=more))

    def _lost_by_silence(self, now: float) -> decisions.Event | None:
        """Returns the event for workers that fail by another's loss, if that loss itself shows in no way."""
        self._failed_at = self._failed_at or now
        silent = {
            rank: now - self._heard[rank]
            for rank in self._pending.values()
            if now - self._heard[rank] >= _SILENT_INTERVAL
        }
        if not silent:
            return decisions.Failed(frozenset(self._errors)) if now - self._failed_at >= _LOSS_INTERVAL else None
        if now - self._failed_at < timeouts.get().silent_worker:
            return None
        for rank, seconds in silent.items():
            place = self.places[rank]
            how = f"its process {place.pid} on {place.host} gives no sign of life since {seconds:.0f} s"
            self._errors[rank] = WorkerFrozenError(how)
        return Lost(frozenset(silent))

    def _wait_for_all(self) -> None:
        """Waits until all workers have ended after the same step."""
        until = time.monotonic() + timeouts.get().workers_leave
        while self._pending and time.monotonic() < until:
            self._follow()

    # ------------------------------------------------------------------------------------------ recovery

    def _recover(self) -> None:
        """Blocks until a recovery has ended; raises LostGroupError if it has failed."""
        self._stop_watching_for_hangs()
        while (healing := self._recovery.healing) is not None:
            self._joining = {}
            while not healing.done:
                self._serve_joining()
                healing.wait(_SOON_INTERVAL)
            tried, action = self._recovery.end()
            if tried.healed:
                self._take_in(tried)
            elif self._recovery.healing is None:
                self._give_up(tried, action)
        self._watch_for_hangs()

    def _begin(self, member: Member) -> None:
        """Starts the training in a replacement worker; it may request what the driver has before it joins."""
        member.actor.begin.remote(self._job, member.rank)
        self._own[member.rank] = 0
        self._joining[member.actor.next_event.remote(_SOON_INTERVAL)] = member

    def _serve_joining(self) -> None:
        for ref in ray.wait(list(self._joining), timeout=0)[0] if self._joining else ():
            member = self._joining.pop(ref)
            try:
                event = ray.get(ref)
            except RayError:  # the recovery sees it, too
                continue
            if isinstance(event, Request):
                member.actor.answer.remote(self._list.answer(event.what))
            elif isinstance(event, Report):
                self._report(member.rank, event)
            if not isinstance(event, Ended):
                self._joining[member.actor.next_event.remote(_SOON_INTERVAL)] = member

    def _take_in(self, tried: Healing) -> None:
        for rank, member in tried.new.items():
            self.members[rank] = member
            self._errors.pop(rank, None)
            self._asking.pop(rank, None)
            self._watchdog.ended.pop(rank, None)
            self._watchdog.kept.pop(rank, None)
            self._watchdog.watch(rank, self.places[rank])
        self._pending = {ref: rank for ref, rank in self._pending.items() if rank not in tried.new}
        self._pending |= {ref: member.rank for ref, member in self._joining.items()}
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._waits.clear()
        self._stale = set(self._pending)
        self._failed_at = None

    def _give_up(self, tried: Healing, action: decisions.Action) -> None:
        for rank in tried.lost:  # a call to it would block until Ray detects the loss of its node
            ray.kill(self.members[rank].actor)
        tried.give_up()
        more = f". All workers restart from {tried.place}" if action.do is Do.RESTART else ""
        why, ranks = action.why or tried.why, tuple(sorted(tried.lost))
        events.emit(RunEvent(kind=Kind.RECOVERY_FAILED, ranks=ranks, step=tried.kept, why=why, more=more))
        raise LostGroupError(dict(self._errors))

    def _asked(self) -> Asked:
        return Asked(
            workers={member.rank: member for member in self.members},
            place=self._replace,
            started=lambda made: None,
            settle=lambda member, addresses, rank, token, pinned: self._environment(member, addresses, token, pinned),
            begin=self._begin,
            standing=lambda member, seconds: member.actor.standing.remote(seconds),
            ports=self._config.ports,
            cores=backend.to_claim(self._spec.setup, self._spec.each.get("CPU", 1)),
            reported=self._counts,
            has_room=self._has_room if self._spec.elastic else None,
        )

    def _replace(self, rank: int) -> Member:
        """Replaces a lost worker on the node of its bundle by a standby worker or a new process. Returns it."""
        bundle, taken = self.members[rank].bundle, None
        if self._spares is not None:
            node = placement_group_table(self._group)["bundles_to_node_id"][bundle]
            taken = self._spares.take(node, lambda actor: actor.execute.remote(process_monitor.here))
        if taken is None:
            actor = self._placed(bundle)
            call = actor.execute.remote(process_monitor.here)
            taken = actor, ray.get(call, timeout=timeouts.get().replacement_start)
        self.places[rank] = taken[1]
        return Member(taken[0], rank, bundle)

    def _has_room(self, ranks: Iterable[int]) -> bool:
        """Whether processes can start for these ranks: their bundles are on a living node, or fit on one."""
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - ray_core.draining().keys()
        living -= resources.silent({self.nodes[rank] for rank in ranks})
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        homeless = sum(nodes.get(self.members[rank].bundle) not in living for rank in ranks)
        wanted = {name: amount for name, amount in self._spec.each.items() if amount > 0}
        free = [capacity for node, capacity in ray_core.free_by_node().items() if node in living]
        return not homeless or not wanted or resources.count_fitting(free, wanted) >= homeless

    # ------------------------------------------------------------------------------------------ watching

    def _keep_spares(self) -> None:
        state = self._decisions.state
        if not self._config.spares or not state.recovers or not state.is_whole:
            return
        if self._spares is None:
            begin = functools.partial(entry.rehearse, self._spec.rehearsed, len(self.members), self._spec.cpus)
            self._spares = Spares(self._config.spares, self._spec.start_process, begin)
        self._spares.keep({place.node for place in self.places.values()})

    def _look_at_drains(self, now: float) -> None:
        """Stops the workers after a step as soon as one of their nodes is drained.

        If the driver's node is drained, no other workers can be started, and the run ends.
        """
        if now < self._drains_at:
            return
        self._drains_at = now + _DRAINS_INTERVAL
        drained = [node for node in dict.fromkeys(self.nodes) if node in ray_core.draining()]
        if not drained or not self._decisions.state.is_whole or drained == self._drained:
            return
        self._drained = drained
        for node in drained:
            ranks = tuple(rank for rank, its in enumerate(self.nodes) if its == node)
            events.emit(RunEvent(kind=Kind.NODE_DRAINED, ranks=ranks, node=node))
        stays = ray.get_runtime_context().get_node_id() not in drained
        action = self._decisions.take(Drained(stays=stays))
        if action.do is Do.END_AFTER_STEP and not ends.end_of_drained(self.actors, stay=action.why == DRAIN):
            self._decisions.take(decisions.NotTold())

    @property
    def actors(self) -> list:
        return [member.actor for member in self.members]

    def _watch_for_hangs(self) -> None:
        if self._config.hang_timeout_s is not None:
            execute = lambda rank, function: self.members[rank].actor.execute.remote(function)
            self._hangs = HangWatch(
                execute, self.places, self._config.hang_timeout_s, self._config.first_step_timeout_s
            )

    def _stop_watching_for_hangs(self) -> None:
        hangs, self._hangs = self._hangs, None
        if hangs is not None:
            hangs.close()

    # ------------------------------------------------------------------------------------------ the end

    def staying(self, errors: Mapping[int, Exception]) -> list[tuple[str, Any]]:
        """Returns (node, actor) of the workers whose processes the next group can use, ready for another training."""
        if not self._spec.stays:
            return []
        stay = decisions.staying([_seen(errors.get(member.rank)) for member in self.members])
        asked = {
            member.actor.leave.remote(timeouts.get().workers_stay): member
            for member in self.members
            if member.rank in stay and member.actor not in self._within
        }
        seconds = 2 * timeouts.get().workers_stay
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        kept = [member for ref, member in asked.items() if ref in done and _is_true(ref)]
        self.members = [member for member in self.members if member not in kept]
        return [(self.nodes[member.rank], member.actor) for member in kept]

    def close(self) -> None:
        """Ends the workers that do not stay, and all that watches them."""
        self._stop_watching_for_hangs()
        self._watchdog.close()
        if self._spares is not None:
            self._spares.close()
        for member in self.members:
            ray.kill(member.actor)


def _seen(error: BaseException | None) -> WorkerState:
    """Returns the state of a worker from its error."""
    cause = cause_of(error)
    if isinstance(cause, MovedError):
        return WorkerState.ENDED
    if isinstance(cause, (RayActorError, ActorUnschedulableError, WorkerFrozenError)):
        return WorkerState.LOST
    return WorkerState.WELL if error is None else WorkerState.AFFECTED if is_consequence(error) else WorkerState.FAILED


def _is_true(ref) -> bool:
    with contextlib.suppress(RayError):  # it has died since
        return ray.get(ref) is True
    return False
