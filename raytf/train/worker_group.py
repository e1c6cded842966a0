"""A warm worker group: its processes, imported TensorFlow and strategy with its collectives outlive a trial.

It is in the placement group of the Tune actor that opened it (`trial.py`), and ends with it. Its workers execute that
actor's commands: begin a trial, continue to the next report, save, stop.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from raytf import activity, events, procfs, timeouts
from raytf.collectives import healing, ring
from raytf.collectives.healing import Waiting
from raytf.compat import autograph, legacy_names, ray_core
from raytf.compat.fast_import import import_keras
from raytf.compat.ray_train import set_train_fn_utils
from raytf.console import once, output
from raytf.errors import RaytfError, first_line, in_a_line
from raytf.events import Kind, RunEvent
from raytf.runtime import cores, process_monitor
from raytf.runtime.answers import NoAnswerError, as_they_come, collect
from raytf.runtime.hang_watch import HangWatch
from raytf.runtime.process_monitor import Frozen, ProcessLocation, ProcessMonitor
from raytf.runtime.processes import Process
from raytf.runtime.resources import placed_actor
from raytf.runtime.settings import Listening
from raytf.storage import scratch
from raytf.timeouts import Timeouts
from raytf.train import backend, ends
from raytf.train.decisions import (
    Decisions,
    Do,
    Drained,
    Lost,
    Phase,
    RunState,
    StopRequested,
)
from raytf.train.entry import import_raytf
from raytf.train.healing import TAKES_ITS_PLACE, Asked, Member, Recovery
from raytf.train.session_functions import Surroundings, TrialTrainFnUtils
from raytf.worker import clearing, ending
from raytf.worker.session import TrialSession, TrialStopped, Within, bytes_of, write_files

# Seconds between two checks of a worker whether the group's actor lives.
_LOOKS_INTERVAL = 5.0
# Seconds for which a worker's process waits for its trial before it answers other calls.
_BEAT_INTERVAL = 0.5
# Event of a worker that waits for the next ring, after the loss of a worker or of all connections.
_WAITS = ("waits", None)
# Seconds between two checks of workers that train.
_LOOK_INTERVAL = 1.0
# Namespace in Ray's key-value store with the standby processes that are workers of a group.
_TAKEN = b"raytf_taken"


class TrialError(RaytfError, RuntimeError):
    """A trial's own code failed: `cause` is its error, `details` the traceback of the worker, `rank` the worker's."""

    rank: int | None = None

    def __init__(self, cause: str, details: str = ""):
        super().__init__(cause, details)
        self.cause, self.details = cause, details

    def __str__(self) -> str:
        return f"{self.cause}\n{self.details}".rstrip()


class WorkerGroupLostError(RaytfError, ConnectionError):
    """A worker died, or failed while the others did not: the worker group cannot be used any more.

    Attributes:
        unhealed: Why the worker was not replaced in place, as a clause, if that was tried; or None.
    """

    unhealed: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    """A trial, for its workers.

    Args:
        train: train(session, config), the loop, which runs on every worker.
        config: Config of the trial.
        name: Name of the trial.
        files: Files of the checkpoint to resume from, by name, or None.
        around: Arguments of the loop's `session_functions.Surroundings`, without the nodes.
        within: Where it saves checkpoints within its epochs, or None.
        heals: Number of lost workers that are replaced in place if possible.
    """

    train: Callable
    config: dict[str, Any]
    name: str
    files: dict[str, bytes] | None = None
    around: dict[str, Any] = field(default_factory=dict)
    within: Within | None = None
    heals: float = 0


@dataclass(frozen=True)
class _Worker:
    """A `healing.Member`."""

    actor: Any


class WorkerGroup:
    """Opens workers in the current placement group, see the module's docstring.

    A worker that is lost within a step is replaced in place if its trial allows it, see `healing`.

    Args:
        setup: The workers' `settings.WorkerSetup`.
        resources: Resources of each worker.
        workers: Number of workers, at least 1.
        environment: Runtime environment of their processes.
        first_bundle: Index of the first worker's bundle in the placement group.
        spares: (node, `GroupWorker`) of each standby process; those that no group uses become workers on their nodes.
        group: The placement group, or None for the current one.
        kind: Class of the workers; `GroupWorker` by default.

    Attributes:
        nodes: Node ids of the workers.
        asked: Why a stop of the trial was requested (`ending.STOP`, `ending.DRAIN`), or None.
        ended: Step after which the trial was stopped, as its loop returned it, or None.
    """

    def __init__(
        self,
        setup,
        resources: dict[str, float],
        workers: int,
        environment: dict,
        first_bundle: int = 0,
        spares: Sequence[tuple[str, Any]] = (),
        group=None,
        kind=None,
    ):
        self._group = group or ray.util.get_current_placement_group()
        self._setup, self._resources, self._environment = setup, resources, environment
        self._first_bundle, self._spares, self._kind = first_bundle, spares, kind or GroupWorker
        cpus = resources.get("CPU", 0)
        self._threads = max(1, int(cpus))
        self.workers = [self._process(rank) for rank in range(workers)]
        self._run: Any = None  # the ref of the trial's TrialRun
        self._anew: Callable[[], TrialRun] | None = None
        self._decisions: Decisions  # decisions of the trial
        self._recovery = Recovery(lambda event: self._decisions.take(event), self._asked)
        self._settled: dict[int, int] = {}  # resident bytes of each rank's process after its first trial
        self._watch: HangWatch | None = None
        self.nodes: frozenset[str] = frozenset()
        self.asked: str | None = None
        self.ended: int | None = None
        self._places: dict[int, ProcessLocation] = {}
        self._monitor = ProcessMonitor()
        try:
            self._open(setup, cpus)
        except BaseException:
            self.close(well=False)
            raise

    def _process(self, rank: int):
        """Returns the actor of a worker's process: a standby process on its node, or a new one."""
        bundle = self._first_bundle + rank
        if self._spares:
            node = placement_group_table(self._group)["bundles_to_node_id"].get(bundle)
            if (taken := _take(self._spares, node)) is not None:
                return taken
        return placed_actor(self._kind, self._group, bundle, self._resources, runtime_env=self._environment)

    def _open(self, setup, cpus: float) -> None:
        request = timeouts.get(), setup.config.listening, backend.to_claim(setup, cpus)
        reservations = self._all(
            "reserve", *request, seconds=timeouts.get().process_start, what="the start of its process"
        )
        addresses = [address for address, _, _ in reservations]
        pinned = cores.agreed(addresses, [claimed for _, claimed, _ in reservations])
        self._config = setup.config
        self._see({rank: place for rank, (_, _, place) in enumerate(reservations)})
        self._all("execute", import_raytf, seconds=timeouts.get().process_start, what="the import of TensorFlow")
        token, nodes = ring.new_token(), tuple(place.node for place in self._places.values())
        common = setup, addresses
        arguments = [(*common, rank, self._threads, token, pinned[rank], nodes) for rank in range(len(addresses))]
        self._each(
            "open", arguments, seconds=timeouts.get().process_start, what="the strategy, for which all workers meet"
        )

    def outgrown(self) -> str | None:
        """Returns which worker exceeds `renew_worker_mb`, as a clause, or None. Called between two trials.

        Raises:
            WorkerGroupLostError: A worker does not answer.
        """
        limit = self._config.renew_worker_mb
        if limit is None:
            return None
        resident = self._all("execute", procfs.memory_bytes, seconds=timeouts.get().trial_answer, what="its memory")
        for rank, size in enumerate(resident):
            grown = (size - self._settled.setdefault(rank, size)) / 1e6
            if grown > limit:
                return f"the memory of worker {rank} has grown by {grown:.0f} MB (renew_worker_mb={limit:g})"
        return None

    def begin(self, job: TrialRun, anew: Callable[[], TrialRun] | None = None) -> None:
        """Starts a trial, which waits for `go_on`.

        Args:
            job: The trial.
            anew: Returns the trial for a replacement worker, if it differs.
        """
        self.asked = self.ended = None
        self._anew = anew
        self._run, workers = ray.put(job), len(self.workers)
        state = RunState(
            workers=workers,
            fewest=workers,
            most=workers,
            failures_left=job.heals,
            recovers=job.heals > 0,
            asks_again=False,
            phase=Phase.TRAINING,
        )
        self._decisions = Decisions(state)
        self._all("begin", self._run, what="the begin of a trial")

    def go_on(self, why: Callable[[], str | None] | None = None) -> dict | None:
        """Calls `go_on_all`, and returns the chief's metrics only."""
        reports = self.go_on_all(why)
        return None if reports is None else reports[0]

    def go_on_all(self, why: Callable[[], str | None] | None = None) -> list[dict] | None:
        """Continues the trial to its next report. Returns the metrics of each worker, or None when the loop has ended.

        Args:
            why: Called repeatedly; returns why the trial must stop after a step, or None. See `ended`.

        Raises:
            TrialError: The loop failed; the worker group can run another trial.
            WorkerGroupLostError: The worker group cannot be used any more.
        """
        with self._watching():
            received = self._answers_of_all(why)
        kinds = {event[0] for event in received.values()}
        if "error" in kinds:
            rank, error = next((rank, event[1]) for rank, event in sorted(received.items()) if event[0] == "error")
            error.rank = rank
            raise error
        if len(kinds) > 1:
            raise WorkerGroupLostError(
                "the workers of a train loop must report equally often; one ended before another"
            )
        if kinds == {"report"}:
            return [event[1] for _, event in sorted(received.items())]
        self.ended = received[0][1]
        return None

    def _answers_of_all(self, why: Callable[[], str | None] | None) -> dict[int, tuple]:
        """Continues the trial until each worker has sent an event; meanwhile the workers answer other calls, too."""
        received: dict[int, tuple] = {}
        waits: set[int] = set()  # ranks that wait for the next ring
        failed = None  # time of the first failure
        self._monitor.begin()
        pending = {worker.go_on.remote(): rank for rank, worker in enumerate(self.workers)}
        while pending:
            done, _ = ray.wait(list(pending), timeout=_LOOK_INTERVAL)
            lost: dict[int, WorkerGroupLostError] = {}
            for ref in done:
                rank = pending.pop(ref)
                try:
                    event = self._get(f"worker {rank}", ref)
                except WorkerGroupLostError as error:
                    lost[rank] = error
                    continue
                if event is None or event == _WAITS:
                    self._monitor.heard(rank)
                    (waits.discard if event is None else waits.add)(rank)
                    pending[self.workers[rank].next_event.remote()] = rank
                    continue
                received[rank] = event
                if event[0] == "error" and failed is None:
                    failed = time.monotonic()
            if pending and not lost:
                lost = self._standing_still()
            new = frozenset()
            if lost:
                new = self._heal(lost, received)
                waits.clear()
            elif pending and failed is not None and time.monotonic() - failed >= timeouts.get().alike_failures:
                raise self._alone(received)
            elif len(waits) == len(self.workers):
                new = self._connect()
                waits.clear()
            elif pending:
                self._ask_to_end(why)
            pending = {ref: rank for ref, rank in pending.items() if rank not in new}
            pending |= {self.workers[rank].next_event.remote(): rank for rank in new}
        return received

    def _connect(self) -> frozenset[int]:
        """Connects workers in a new ring; returns the ranks that were lost and replaced meanwhile."""
        self._recovery.connect(map(_Worker, self.workers))
        ranks, why = self._recover()
        if why is not None:
            events.emit(RunEvent(kind=Kind.RECOVERY_FAILED, why=why))
        return ranks

    def _standing_still(self) -> dict[int, WorkerGroupLostError]:
        """Returns the errors of workers that are frozen, that hang, or whose host is lost, by rank."""
        frozen = {rank: _frozen(process) for process in self._monitor.look() for rank in process.keys}
        if frozen:
            return frozen
        ended = self._watch.ended if self._watch is not None else {}
        return {
            rank: WorkerGroupLostError(f"worker {rank} hangs: {hang}\n{hang.stack}") for rank, hang in ended.items()
        }

    def _heal(self, lost: dict[int, WorkerGroupLostError], said: dict[int, tuple]) -> frozenset[int]:
        """Replaces lost workers in the step that the others are in; returns the ranks of all replacement workers.

        Raises:
            WorkerGroupLostError: Recovery is not allowed, or has failed; contains the reason.
        """
        first = lost[min(lost)]
        action = self._decisions.take(Lost(frozenset(lost), frozenset(said)))
        for rank, error in sorted(lost.items()):
            why = in_a_line(error.__cause__) if error.__cause__ else first_line(error).rstrip(".")
            more = TAKES_ITS_PLACE if action.do is Do.RECOVER else ""
            events.emit(RunEvent(kind=Kind.WORKER_LOST, ranks=(rank,), why=why, more=more))
        if not action.state.recovers:
            first.unhealed = None
            raise first
        self._close_watch()
        for rank in lost:
            ray.kill(self.workers[rank])  # a frozen process still exists
        ranks, why = frozenset(), action.why
        if action.do is Do.RECOVER:
            self._recovery.begin(action.ranks)
            ranks, why = self._recover()
        if why is None:
            return ranks
        first.unhealed = why or None
        raise first

    def _recover(self) -> tuple[frozenset[int], str | None]:
        """Blocks until a recovery ends; returns (ranks of new processes, None), or why there are none, as a clause."""
        while self._recovery.healing is not None:
            self._recovery.healing.wait()
            tried, action = self._recovery.end()
            if tried.healed:
                if tried.new:
                    self._take_in(tried.new)
                return tried.lost, None
            if self._recovery.healing is None:
                tried.give_up()
                return frozenset(), action.why
        return frozenset(), None

    def _asked(self) -> Asked:
        """Returns the functions and settings that a `Healing` needs from this group."""

        def place(rank: int) -> _Worker:
            worker = self._process(rank)
            try:
                location = ray.get(
                    worker.execute.remote(process_monitor.here), timeout=timeouts.get().replacement_report
                )
            except BaseException:
                ray.kill(worker)
                raise
            self._see({rank: location})
            return _Worker(worker)

        def settle(worker: _Worker, addresses: list[str], rank: int, token: bytes, pinned: bool):
            if self._anew is not None:
                self._run, self._anew = ray.put(self._anew()), None
            nodes = tuple(place.node for place in self._places.values())
            return worker.actor.settle.remote(self._setup, addresses, rank, self._threads, token, pinned, nodes)

        return Asked(
            workers={rank: _Worker(worker) for rank, worker in enumerate(self.workers)},
            place=place,
            started=lambda made: None,
            settle=settle,
            begin=lambda worker: worker.actor.take_place.remote(self._run),
            standing=lambda worker, seconds: worker.actor.standing.remote(seconds),
            listening=self._config.listening,
            cores=backend.to_claim(self._setup, self._resources.get("CPU", 0)),
            reported={},
        )

    def _take_in(self, workers: Mapping[int, Member]) -> None:
        """Puts these workers into the group, and continues."""
        for rank, worker in workers.items():
            self.workers[rank] = worker.actor
            self._settled.pop(rank, None)
        self._monitor.begin()
        self._open_watch()

    def _see(self, places: dict[int, ProcessLocation]) -> None:
        """Watches the processes of workers."""
        self._places |= places
        self.nodes = frozenset(place.node for place in self._places.values())
        for rank, place in places.items():
            self._monitor.watch(rank, place)

    def _ask_to_end(self, why: Callable[[], str | None] | None) -> None:
        """Stops all workers after the same step, once there is a reason."""
        if why is None or self.asked is not None or (reason := why()) is None:
            return
        action = self._decisions.take(StopRequested() if reason == ending.STOP else Drained(stays=True))
        if action.do is not Do.END_AFTER_STEP:
            return
        self.asked = action.why
        try:
            ends.agree(self.workers, action.why)
        except NoAnswerError as error:
            raise WorkerGroupLostError(str(error)) from None
        except ray.exceptions.RayActorError as error:
            raise _lost("a worker", error) from error

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Watches the workers for hangs, until the context ends."""
        self._open_watch()
        try:
            yield
        finally:
            self._close_watch()

    def _open_watch(self) -> None:
        if self._config.hang_timeout_s is not None:
            limits = self._config.hang_timeout_s, self._config.first_step_timeout_s
            ask = lambda rank, function: self.workers[rank].execute.remote(function)
            self._watch = HangWatch(ask, self._places, *limits)

    def _close_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _alone(self, said: dict[int, tuple]) -> WorkerGroupLostError:
        """Returns the error for workers that failed while others wait: the cause is a frozen one, or else the first."""
        standing = self._monitor.standing()
        if standing is not None:
            return _frozen(standing)
        rank, error = next((r, e[1]) for r, e in said.items() if e[0] == "error")
        return WorkerGroupLostError(f"worker {rank} failed alone: {error.cause}\n{error.details}")

    def save(self) -> dict[str, bytes] | None:
        """Returns the files of a checkpoint of this report: the chief's, and the own files of others."""
        results = self._answers(
            [worker.save.remote() for worker in self.workers], timeouts.get().trial_save, "a checkpoint"
        )
        files = [part for part in reversed(results) if part is not None]
        return {name: content for part in files for name, content in part.items()} if files else None

    def stop(self) -> None:
        """Ends the trial on all workers, and clears its state."""
        self._all("stop", what="the end of a trial")

    def close(self, well: bool = True) -> None:
        """Ends the workers.

        Args:
            well: Whether they answer, and so can clean up.
        """
        if well:
            with contextlib.suppress(NoAnswerError):
                for _ in as_they_come(
                    [w.stop.remote() for w in self.workers], timeouts.get().worker_parting, "their ends"
                ):
                    pass
        for worker in self.workers:
            ray.kill(worker)
        self._monitor.close()

    def _all(self, method: str, *arguments, **how) -> list:
        return self._each(method, [arguments] * len(self.workers), **how)

    def _each(self, method: str, arguments: list[tuple], *, what: str, seconds: float | None = None) -> list:
        calls = [getattr(w, method).remote(*a) for w, a in zip(self.workers, arguments, strict=True)]
        return self._answers(calls, timeouts.get().trial_answer if seconds is None else seconds, what)

    def _answers(self, calls: list, seconds: float, what: str) -> list:
        """Returns the results of calls; raises WorkerGroupLostError once a worker dies, is stopped, or is late."""
        self._monitor.begin()
        try:
            return collect(calls, seconds, what, look=self._look, failure=_lost)
        except NoAnswerError as error:
            raise WorkerGroupLostError(str(error)) from None

    def _get(self, name: str, ref):
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise _lost(name, error) from error

    def _look(self) -> None:
        for process in self._monitor.look():
            raise _frozen(process)


def _frozen(found: Frozen) -> WorkerGroupLostError:
    if found.seen is None:
        return WorkerGroupLostError(f"the host {found.place.host} {found.how}")
    worker = f"worker {found.keys[0]} on {found.place.host}"
    return WorkerGroupLostError(f"{worker} is frozen: its process {found.place.pid} is {found.how}")


def _lost(name: str, error: Exception) -> Exception:
    if isinstance(error, ray.exceptions.RayActorError):
        lost = WorkerGroupLostError(f"{name} of the trial died: {error}")
        lost.unhealed = "it was lost outside of the trial's steps"
        return lost
    return error


def _take(spares: Sequence[tuple[str, Any]], node: str):
    """Returns a standby process on a node for the worker group of this actor, or None if there is none.

    Ray's key-value store has the used ones, as a worker of another group would answer only after its step.
    """
    leader = ray.get_runtime_context().current_actor
    gone = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError, ray.exceptions.GetTimeoutError)
    for spare_node, actor in spares:
        if spare_node != node or ray_core.put(ray_core.id_of(actor), b"taken", overwrite=False, namespace=_TAKEN):
            continue
        with contextlib.suppress(*gone):
            ray.get(actor.end_with.remote(leader), timeout=timeouts.get().imports)
            return actor
    return None


class GroupWorker(Process):
    """A worker of a worker group; a Ray actor of one thread that executes the commands of `WorkerGroup`."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._session = None
        self._failed: Exception | None = None
        self._told: tuple = ()

    def reserve(self, its: Timeouts, allowed: Listening, count: int) -> tuple[str, bool, ProcessLocation]:
        """Returns its "host:port", whether it has claimed cores for the life of the group, and its process."""
        timeouts.put_in_force(its)
        return *backend.reserve(allowed, count), process_monitor.here()

    def end_with(self, leader) -> None:
        """Ends this process, which the driver started, after the group's actor has ended."""
        threading.Thread(target=_end_with, args=(leader,), daemon=True).start()

    def open(
        self,
        setup,
        addresses: list[str],
        rank: int,
        cpus: int,
        token: bytes,
        pinned: bool,
        nodes: tuple[str, ...],
    ) -> None:
        """Prepares TensorFlow and builds the strategy, on all workers at once."""
        backend.set_environment(setup.config, addresses, rank, cpus, token, pinned)
        from raytf.worker import context

        self._rank, self._size, self._nodes = rank, len(addresses), nodes
        self._stack.enter_context(context.prepared(setup))
        self._stack.enter_context(backend.spoken(rank == 0, None))
        self._stack.enter_context(once.shown(setup.warned))
        with autograph.in_memory():
            context.get_strategy()
        clearing.note()

    def begin(self, job: TrialRun) -> None:
        output.say_who(f"{job.name} worker {self._rank}")
        self._folder = scratch.make(bytes_of(job.files or {}))
        checkpoint = None
        if job.files is not None:
            checkpoint = os.path.join(self._folder, "checkpoint")
            with scratch.named(checkpoint, bytes_of(job.files)):
                write_files(job.files, checkpoint)
        ending.gate.reset()
        self._failed = None
        self._session = TrialSession(self._rank, self._size, checkpoint, job.name, job.within)
        self._thread = threading.Thread(target=self._run, args=(job, self._session, self._folder), daemon=True)
        self._thread.start()

    def settle(self, *told) -> None:
        """Stores the arguments of `open` for `take_place`."""
        self._told = told

    def take_place(self, job: TrialRun) -> None:
        """Opens this replacement worker, and trains; `standing` returns its error."""
        try:
            import_raytf()
            self.open(*self._told)
            self.begin(job)
            self._session.commands.put("go")
        except Exception as error:
            self._failed = error

    def standing(self, seconds: float) -> tuple[Waiting | str | None, Exception | None]:
        """Returns `Healer.waiting(seconds)` of this process, and the trial's error or None."""
        if self._failed is None and self._session is not None and self._session.waits:
            return "it has reported, and waits for the others to do so", None
        return healing.here.waiting(0.0 if self._failed is not None else seconds), self._failed

    def _run(self, job: TrialRun, session, folder: str) -> None:
        surroundings = Surroundings(nodes=self._nodes, **job.around)
        set_train_fn_utils(TrialTrainFnUtils(session, surroundings, _broadcast, folder))
        activity.here.reset()
        activity.here.train_here()
        try:
            import_keras()  # for this thread
            session.park()
            with output.telling(), autograph.in_memory():
                ended = job.train(session, job.config)
            activity.here.at(activity.END)
            session.events.put(("end", ended))
            session.park()
        except TrialStopped:
            pass
        except BaseException as error:
            hint = legacy_names.hint(error)
            cause = f"{in_a_line(error)}; {hint}" if hint else in_a_line(error)
            self._failed = TrialError(cause, traceback.format_exc())
            session.events.put(("error", self._failed))
        finally:
            set_train_fn_utils(None)

    def go_on(self) -> tuple | None:
        """Continues the trial; returns the result of `next_event`."""
        activity.here.renew()
        self._session.commands.put("go")
        return self.next_event()

    def next_event(self) -> tuple | None:
        """Returns the next event of the trial's thread; after a timeout None, or `_WAITS` if it waits for a ring.

        The timeout lets this process answer other calls.
        """
        with contextlib.suppress(queue.Empty):
            return self._session.events.get(timeout=_BEAT_INTERVAL)
        return _WAITS if isinstance(healing.here.waiting(), Waiting) else None

    def save(self) -> dict[str, bytes] | None:
        self._session.commands.put("save")
        kind, value = self._session.events.get()
        if kind == "error":
            raise value
        return value

    def stop(self) -> None:
        """Ends the trial's thread at its report, and clears its state: graphs, variables, seeds, Keras' settings."""
        if self._thread is None:
            return
        self._session.commands.put("stop")
        self._thread.join()
        self._thread = self._session = None
        scratch.remove(self._folder)
        clearing.clear()


def _end_with(actor) -> None:
    while True:
        try:
            ray.get(actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            os._exit(1)
        time.sleep(_LOOKS_INTERVAL)


def _broadcast(value: Any) -> Any:
    """Returns the value of rank 0 on every worker; uses the strategy, as all workers are in the train loop."""
    from raytf.collectives import communicator, signed
    from raytf.worker import context

    distribution = context.get_strategy()
    if not communicator.spans_workers(distribution):
        return value
    return signed.broadcast(distribution, value)
