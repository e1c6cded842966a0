"""The workers of a run: starts them in its reservation, answers their requests, keeps standby workers. Driver side."""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from raytf import events, timeouts
from raytf.collectives import ring_token
from raytf.compat import ray_core
from raytf.compat.ray_configs import Preemption
from raytf.events import Kind, RunEvent
from raytf.runtime import answers, processes, resources
from raytf.runtime.failures import WorkerFailedError, WorkerFrozenError, user_error
from raytf.runtime.spares import StandbyPool
from raytf.train import backend, decisions, entry, graceful_stop
from raytf.train.checkpoint_list import CheckpointList
from raytf.train.decisions import ActionKind, Decisions, Drained
from raytf.train.group import SOON_INTERVAL, EventGroup, LoopEnded, Report, taken, worker_state
from raytf.train.recovery_coordinator import Member
from raytf.train.run_worker import Request, RunJob, RunWorker

# Seconds between two checks for drained nodes; each is a request to the head of a millisecond.
_DRAINS_INTERVAL = 1.0
# Seconds after which a drained node is taken to be gone if its deadline is unknown, as in Ray Train.
_DEADLINE_INTERVAL = 120.0


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What the groups of a run have in common.

    Args:
        setup: The workers' `settings.WorkerSetup`.
        scaling: ScalingConfig of the run.
        worker_resources: Resources of a worker.
        environment: Runtime environment of the workers' processes.
        warm_up_job: See `entry.warm_up_standby`.
        stays: Whether processes stay when the number of workers changes; they are outside of the reservation then.
        elastic: Whether the number of workers may change.
        drop: Ends a process that becomes no worker.
        check: Raises the error of a run that was cancelled.
        preemption: Options for drained nodes.
    """

    setup: Any
    scaling: Any
    worker_resources: dict[str, float]
    environment: dict[str, Any]
    warm_up_job: list
    stays: bool
    elastic: bool
    drop: Callable[[Any], None]
    check: Callable[[], None]
    preemption: Preemption

    @property
    def cpus(self) -> int:
        return processes.cpus_of(self.worker_resources)

    def start_process(self, node: str):
        """Starts a process outside of the reservation, which may become a worker."""
        variables = processes.thread_variables(self.cpus)
        environment = self.environment | {"env_vars": variables | self.environment["env_vars"]}
        return processes.start_process(RunWorker, node, environment)


class RunGroup(EventGroup):
    """Starts the workers of a run; raises RayError or NoAnswerError if that fails.

    Args:
        spec: What all groups of the run have in common.
        group: Placement group of the run.
        size: Number of workers.
        existing: (node, actor) of processes that may become workers; those that do not are ended.
        run: Decisions of the run.
    """

    def __init__(self, spec: GroupSpec, group, size: int, existing: Iterable[tuple[str, Any]], run: Decisions):
        super().__init__(spec.setup, spec.worker_resources)
        self._spec, self._group, self._decisions, self._made = spec, group, run, run.made
        self._spares: StandbyPool | None = None
        self._held_actors: list = []  # actors in the reservation, which end with it
        self._job: Any = None
        self._drained: list[str] = []
        self._deadlines: dict[str, float] = {}  # of drained nodes, in seconds of UNIX time
        self.members = self._start(size, existing)
        try:
            addresses, pinned = self._reserve()
            token = ring_token.new_token()
            calls = [self.send_environment(member, addresses, token, pinned[member.rank]) for member in self.members]
            self._answers(calls, timeouts.get().process_setup, "its environment")
        except BaseException as error:
            frozen = dict(self._process_killer.ended)
            self.close()
            if not frozen:
                raise
            text = "; ".join(f"worker {rank} was frozen at its start: {how}" for rank, how in sorted(frozen.items()))
            raise WorkerFrozenError(text) from error

    def _answers(self, calls: list, seconds: float, action: str) -> list:
        return answers.collect_answers(calls, seconds, action, check=self._spec.check)

    def _start(self, size: int, existing: Iterable[tuple[str, Any]]) -> list[Member]:
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        actors: dict[int, Any] = {}
        for node, actor in existing:
            bundle = next((i for i in range(size) if nodes[i] == node and i not in actors), None)
            if bundle is None:
                self._spec.drop(actor)
            else:
                actors[bundle] = actor
        made = [*actors, *(i for i in range(size) if i not in actors)]
        order = list(dict.fromkeys(nodes[i] for i in made))  # workers of a node have consecutive ranks
        made.sort(key=lambda i: order.index(nodes[i]))
        for i in made:
            if i not in actors:
                actors[i] = self._spec.start_process(nodes[i]) if self._spec.stays else self._placed(i)
        return [Member(actors[i], rank, i) for rank, i in enumerate(made)]

    def _placed(self, bundle: int):
        options = {"runtime_env": self._spec.environment}
        actor = resources.placed_actor(RunWorker, self._group, bundle, self._worker_resources, **options)
        self._held_actors.append(actor)
        return actor

    def send_environment(self, member: Member, addresses: list[str], token: bytes, pinned: bool) -> Any:
        arguments = self.config, addresses, member.rank, self._spec.cpus, token, pinned
        return member.actor.execute.remote(backend.set_environment, *arguments)

    def begin(self, job: RunJob) -> None:
        """Starts the train loop on all workers."""
        self._job = ray.put(job)
        calls = [member.actor.begin.remote(self._job, member.rank) for member in self.members]
        self._answers(calls, timeouts.get().process_setup, "the start of its training")

    def follow(self, listed: CheckpointList, context, tick, check_cancelled) -> Any:
        """Follows the train loop to its end; returns rank 0's value.

        Args:
            listed: The run's checkpoints.
            context: Ray's TrainRunContext.
            tick: Called several times a second, with this group.
            check_cancelled: Raises the error of a cancelled run, which has ended its workers itself.

        Raises:
            LostGroupError: All workers have to restart, or the run fails.
        """
        self._list, self._context = listed, context
        self._begin_following({})
        self._received: dict[int, deque] = defaultdict(deque)
        self._process_reports = dict.fromkeys(self._answered_at, 0)  # reports of each rank's process
        self._values: dict[int, Any] = {}
        self._waiting_requests: dict[int, tuple[Member, Request, float]] = {}
        self._gathered: dict[int, Any] = {}
        self._drains_at = time.monotonic()
        self._watch_for_hangs()
        for rank in self._answered_at:
            self._poll(rank)
        try:
            while len(self._values) < len(self.members):
                self._follow()
                self._take_reports()
                self._answer_requests()
                if self._errors:
                    check_cancelled()
                if not self._survivors_continue():
                    self._handle_failures()
                if not self._errors:
                    self._keep_spares()
                    self._check_drains()
                tick(self)
        finally:
            self._training_events.flush()
        return self._values[0]

    def _take_event(self, member: Member, event: Any) -> bool:
        rank = member.rank
        if isinstance(event, Report):
            self._received[rank].append(event)
            self.reported[rank] = self.reported.get(rank, 0) + 1
            self._process_reports[rank] += 1
            self._take_reports()
            return True
        if isinstance(event, LoopEnded) and event.error is not None:
            self._errors[rank] = event.error
        elif isinstance(event, LoopEnded):
            self._values[rank] = event.value
            if self._hangs is not None:
                self._hangs.record_finished(rank)
        elif event.kind == "meet":
            self._gathered[rank] = event.value
        elif member is not self.members[rank]:  # it joins, and none of its own reports is to be waited for
            member.actor.answer.remote(self._list.answer(event.kind))
            return True
        else:
            self._waiting_requests[rank] = member, event, time.monotonic()
        return False

    def _needed(self) -> list[Member]:
        """Returns the workers whose reports and meetings are waited for, see `Preemption.relaxed`."""
        relaxed = self._spec.preemption.relaxed and 0 not in self._errors
        return [member for member in self.members if not (relaxed and member.rank in self._errors)]

    def _take_reports(self) -> None:
        while all(self._received[member.rank] for member in self._needed()):
            self._list.take([self._received[member.rank].popleft() for member in self._needed()], self._context)

    def _answer_requests(self) -> None:
        """Answers requests of training threads, those for reported checkpoints when a worker's own are listed."""
        settled = self._gathered.keys() | self._values.keys() | self._waiting_requests.keys()  # others may have died
        if all(member.rank in self._gathered for member in self._needed()):
            value, self._gathered = self._gathered[0], {}
            for member in self._needed():
                member.actor.answer.remote(value)
                self._poll(member.rank)
        elif self._gathered and self._values and not self._errors and len(settled) == len(self.members):
            why = "the workers of a train loop must report equally often; one ended before another"
            raise WorkerFailedError(None, why)
        for rank, (member, event, requested_at) in list(self._waiting_requests.items()):
            if event.kind == "reported":
                validated, seconds = event.value
                waits = (self._process_reports[rank] and self._received[rank]) or (validated and self._list.validates())
                if waits and (seconds is None or time.monotonic() - requested_at < seconds):
                    continue
            del self._waiting_requests[rank]
            member.actor.answer.remote(self._list.answer(event.kind))
            self._poll(rank)

    # ------------------------------------------------------------------------------------------ recovery

    def _start_replacement(self, rank: int) -> Member:
        """Replaces a lost worker on the node of its bundle by a standby worker or a new process."""
        bundle, spare = self.members[rank].bundle, None
        if self._spares is not None:
            node = placement_group_table(self._group)["bundles_to_node_id"][bundle]
            spare = self._spares.take(node, lambda actor: actor.execute.remote(time.monotonic))
        return Member(self._placed(bundle) if spare is None else spare[0], rank, bundle)

    def start_again(self, member: Member) -> None:
        member.actor.begin.remote(self._job, member.rank)
        self._process_reports[member.rank] = 0
        self._waiting_requests.pop(member.rank, None)
        self._joining[member.actor.next_event.remote(SOON_INTERVAL)] = member

    def has_room(self, ranks: Iterable[int]) -> bool:
        """Returns whether processes can start for these ranks: their bundles are on a living node, or fit on one."""
        if not self._spec.elastic:
            return True
        living = resources.living({self.locations[rank].node for rank in ranks})
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        homeless = sum(nodes.get(self.members[rank].bundle) not in living for rank in ranks)
        free = [capacity for node, capacity in ray_core.free_by_node().items() if node in living]
        return not homeless or resources.count_fitting(free, self._worker_resources) >= homeless

    # ------------------------------------------------------------------------------- standby workers, drains, the end

    def _keep_spares(self) -> None:
        state = self._decisions.state
        if not self.config.spares or not state.recovers or not state.is_whole:
            return
        if self._spares is None:
            begin = functools.partial(entry.warm_up_standby, self._spec.warm_up_job, len(self.members), self._spec.cpus)
            self._spares = StandbyPool(self.config.spares, self._spec.start_process, begin)
        self._spares.keep(set(self.nodes))

    def _check_drains(self) -> None:
        """Stops the workers after a step as soon as one of their nodes, or the driver's, is drained.

        If it is the driver's, no other workers can be started, and the run ends.
        """
        if time.monotonic() < self._drains_at:
            return
        self._drains_at = time.monotonic() + _DRAINS_INTERVAL
        draining = ray_core.draining()
        for node, deadline in draining.items():
            self._deadlines.setdefault(node, deadline / 1000 or time.time() + _DEADLINE_INTERVAL)
        own_node = ray.get_runtime_context().get_node_id()
        drained = [node for node in dict.fromkeys([*self.nodes, own_node]) if node in draining]
        if not drained or drained == self._drained:
            return
        self._drained = drained
        for node in drained:
            ranks = tuple(rank for rank, home in enumerate(self.nodes) if home == node)
            events.emit(RunEvent(kind=Kind.NODE_DRAINED, ranks=ranks, node=node))
        action = self._decisions.take(Drained(stays=own_node not in drained))
        if action.kind is ActionKind.END_AFTER_STEP and not graceful_stop.try_stop(
            self.actors, action.why, "a node is drained"
        ):
            self._decisions.take(decisions.StopNotDelivered())

    def _survivors_continue(self) -> bool:
        """Returns whether workers of a drained node have ended, before its deadline for the others' own loops."""
        preempted = [rank for rank, error in self._errors.items() if getattr(user_error(error), "preempted", False)]
        if not preempted or self._decisions.state.ends_after_step:
            return False
        deadline = max(self._deadlines.get(self.nodes[rank], 0.0) for rank in preempted) + self._spec.preemption.seconds
        return time.time() < deadline and len(self._errors.keys() | self._values.keys()) < len(self.members)

    def reusable_workers(self, errors: Mapping[int, Exception]) -> list[tuple[str, Any]]:
        """Returns (node, actor) of the workers whose processes the next group can use, ready for another training."""
        if not self._spec.stays:
            return []
        stay = decisions.reusable_ranks([worker_state(errors.get(member.rank)) for member in self.members])
        requests = {
            member.actor.leave.remote(timeouts.get().workers_stay): member
            for member in self.members
            if member.rank in stay and member.actor not in self._held_actors
        }
        seconds = 2 * timeouts.get().workers_stay
        done, _ = ray.wait(list(requests), num_returns=len(requests), timeout=seconds) if requests else ([], [])
        stayers = [member for ref, member in requests.items() if ref in done and taken(ref) is True]
        self.members = [member for member in self.members if member not in stayers]
        return [(self.locations[member.rank].node, member.actor) for member in stayers]

    def close(self) -> None:
        """Ends the workers that do not stay, and all that watches them."""
        if self._spares is not None:
            self._spares.close()
        self.end(self.actors)
