"""A warm worker group: its processes, imported TensorFlow and strategy with its collectives outlive a trial.

It is in the placement group of the Tune actor that opened it (`trial.py`), and ends with it. Its workers execute that
actor's commands: begin a trial, continue to the next report, save, stop.

Over 500 lines: both sides of one conversation: the group, and its workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from raytf import activity, procfs, timeouts
from raytf.collectives import recovery_client, ring_token
from raytf.collectives.recovery_client import BlockedWorker
from raytf.compat import autograph, legacy_names, ray_core
from raytf.compat.fast_import import import_keras
from raytf.compat.ray_train import set_train_fn_utils
from raytf.console import output, shared_warnings
from raytf.errors import PeerLostError, RaytfError, one_line
from raytf.events import RunEvent
from raytf.runtime.answers import NoAnswerError, collect_answers, in_completion_order
from raytf.runtime.failures import WorkerFrozenError
from raytf.runtime.resources import placed_actor
from raytf.storage import scratch
from raytf.storage.folder_contents import size_of_files, write_files
from raytf.train import backend, graceful_stop
from raytf.train.decisions import (
    Action,
    ActionKind,
    Decisions,
    Drained,
    Phase,
    RunState,
    StopRequested,
)
from raytf.train.entry import import_raytf
from raytf.train.group import EventGroup, LoopEnded, LostGroupError, MemberProcess, Report, WaitingForRing
from raytf.train.recovery_coordinator import Member
from raytf.train.session_functions import TrialSetup, TrialTrainFnUtils
from raytf.train.training_events import TrainingEvents
from raytf.worker import clearing, stop
from raytf.worker.trial_session import TrialCheckpointDir, TrialSession, TrialStopped

# Seconds between two checks of a worker whether the group's actor lives.
_POLL_INTERVAL = 5.0
# Seconds for which a worker's process waits for its trial before it answers other calls.
_BEAT_INTERVAL = 0.5
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
        why_not_recovered: Why the worker was not replaced in place, as a clause, if that was tried; or None.
    """

    why_not_recovered: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    """A trial, for its workers.

    Args:
        train: train(session, config), the loop, which runs on every worker.
        config: Config of the trial.
        name: Name of the trial.
        files: Files of the checkpoint to resume from, by name, or None.
        trial_setup: Arguments of the loop's `session_functions.TrialSetup`, without the nodes.
        step_checkpoints: Where it saves checkpoints within its epochs, or None.
        max_recoveries: Number of lost workers that are replaced in place if possible.
    """

    train: Callable
    config: dict[str, Any]
    name: str
    files: dict[str, bytes] | None = None
    trial_setup: dict[str, Any] = field(default_factory=dict)
    step_checkpoints: TrialCheckpointDir | None = None
    max_recoveries: float = 0


class WorkerGroup(EventGroup):
    """Opens workers in the current placement group, see the module's docstring.

    A worker that is lost within a step is replaced in place if its trial allows it, see `recovery_coordinator`.

    Args:
        setup: The workers' `settings.WorkerSetup`.
        resources: Resources of each worker.
        workers: Number of workers, at least 1.
        environment: Runtime environment of their processes.
        first_bundle: Index of the first worker's bundle in the placement group.
        spares: (node, `GroupWorker`) of each standby process; those that no group uses become workers on their nodes.
        group: The placement group, or None for the current one.

    Attributes:
        stop_reason: Why a stop of the trial was requested (`stop.STOP`, `stop.DRAIN`), or None.
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
    ):
        super().__init__(setup, resources)
        self._group = group or ray.util.get_current_placement_group()
        self._environment, self._spares = environment, spares
        self._threads = max(1, int(resources.get("CPU", 0)))
        self.members = [self._process(rank, first_bundle + rank) for rank in range(workers)]
        self._run: Any = None  # the ref of the trial's TrialRun
        self._replacement_trial: Callable[[], TrialRun] | None = None
        self._settled: dict[int, int] = {}  # resident bytes of each rank's process after its first trial
        self.stop_reason: str | None = None
        self.ended: int | None = None
        try:
            self._open()
        except BaseException:
            self.close(well=False)
            raise

    def _process(self, rank: int, bundle: int) -> Member:
        """Returns a worker: a standby process on its node, or a new one."""
        taken = None
        if self._spares:
            node = placement_group_table(self._group)["bundles_to_node_id"].get(bundle)
            taken = _take(self._spares, node)
        if taken is None:
            taken = placed_actor(
                GroupWorker, self._group, bundle, self._worker_resources, runtime_env=self._environment
            )
        return Member(taken, rank, bundle)

    def _open(self) -> None:
        addresses, pinned = self._reserve()
        self._call_all("execute", import_raytf, seconds=timeouts.get().process_start, action="the import of TensorFlow")
        token = ring_token.new_token()
        arguments = [self._opening(rank, addresses, token, pinned[rank]) for rank in range(len(addresses))]
        self._each_of(
            "open", arguments, seconds=timeouts.get().process_start, action="the strategy, for which all workers meet"
        )

    def _opening(self, rank: int, addresses: list[str], token: bytes, pinned: bool) -> tuple:
        """Returns the arguments of `GroupWorker.open`."""
        return self._setup, addresses, rank, self._threads, token, pinned, tuple(self.nodes)

    def outgrown(self) -> str | None:
        """Returns which worker exceeds `renew_worker_mb`, as a clause, or None. Called between two trials.

        Raises:
            WorkerGroupLostError: A worker does not answer.
        """
        limit = self.config.renew_worker_mb
        if limit is None:
            return None
        resident = self._call_all(
            "execute", procfs.memory_bytes, seconds=timeouts.get().trial_answer, action="its memory"
        )
        for rank, size in enumerate(resident):
            grown = (size - self._settled.setdefault(rank, size)) / 1e6
            if grown > limit:
                return f"the memory of worker {rank} has grown by {grown:.0f} MB (renew_worker_mb={limit:g})"
        return None

    def begin(self, job: TrialRun, replacement_trial: Callable[[], TrialRun] | None = None) -> None:
        """Starts a trial, which waits for `continue_trial`.

        Args:
            job: The trial.
            replacement_trial: Returns the trial for a replacement worker, if it differs.
        """
        self.stop_reason = self.ended = None
        self._training_events = TrainingEvents()
        self._replacement_trial = replacement_trial
        self._run, workers = ray.put(job), len(self.members)
        state = RunState(
            workers=workers,
            fewest=workers,
            most=workers,
            failures_left=job.max_recoveries,
            recovers=job.max_recoveries > 0,
            resends_stop=False,
            phase=Phase.TRAINING,
        )
        self._decisions = Decisions(state)
        self._call_all("begin", self._run, action="the begin of a trial")

    def continue_trial(self, why: Callable[[], str | None] | None = None) -> list[dict] | None:
        """Continues the trial to its next report. Returns the metrics of each worker, or None when the loop has ended.

        Args:
            why: Called repeatedly; returns why the trial must stop after a step, or None. See `ended`.

        Raises:
            TrialError: The loop failed; the worker group can run another trial.
            WorkerGroupLostError: The worker group cannot be used any more.
        """
        self._received: dict[int, Report | LoopEnded] = {}
        self._first_error_at: float | None = None
        self._watch_for_hangs()
        try:
            self._begin_following({member.actor.continue_trial.remote(): member.rank for member in self.members})
            while len(self._received) < len(self.members):
                self._follow()
                self._handle_failures()
                self._check_single_failure()
                self._request_stop(why)
        except LostGroupError as lost:
            raise self._lost_group(lost) from None
        finally:
            self._training_events.flush()
            self._stop_watching_for_hangs()
        received = [event for _, event in sorted(self._received.items())]
        for rank, event in enumerate(received):
            if isinstance(event, LoopEnded) and isinstance(event.error, TrialError):
                event.error.rank = rank
                raise event.error
        reports = [event.metrics for event in received if isinstance(event, Report)]
        if reports and len(reports) < len(received):
            raise WorkerGroupLostError(
                "the workers of a train loop must report equally often; one ended before another"
            )
        if not reports:
            self.ended = received[0].value
        return reports or None

    def _take_event(self, member: Member, event: Any) -> bool:
        self._received[member.rank] = event
        if isinstance(event, LoopEnded) and event.error is not None:
            self._first_error_at = self._first_error_at or time.monotonic()
        return False

    def _final_report(self, rank: int) -> tuple[str, str]:
        return "", ""  # the others wait for its report, too

    def _handle_failures(self) -> None:
        for rank, how in list(self._process_killer.unreachable.items()):  # Ray would notice it later
            self._errors[rank] = WorkerFrozenError(how)
        super()._handle_failures()

    def _reporters(self) -> frozenset[int]:
        return frozenset(self._received)

    def _check_single_failure(self) -> None:
        """Raises the error for workers that failed while others wait: the cause is a frozen one, or else the first."""
        if not self._pending or self._first_error_at is None:
            return
        if time.monotonic() - self._first_error_at < timeouts.get().same_failure:
            return
        if (frozen := self._process_killer.stopped_process()) is not None:
            raise WorkerGroupLostError(
                self._frozen(frozen.keys[0], f"its process {frozen.location.pid} is {frozen.how}")
            )
        rank, error = next((r, e.error) for r, e in sorted(self._received.items()) if getattr(e, "error", None))
        raise WorkerGroupLostError(f"worker {rank} failed alone: {error.cause}\n{error.details}")

    def _lost_group(self, lost: LostGroupError) -> WorkerGroupLostError:
        rank, error = min(lost.errors.items())
        if isinstance(error, PeerLostError):  # all processes live
            return WorkerGroupLostError(f"the workers could not be reconnected: {lost.why}")
        if rank in self._process_killer.unreachable:
            error_found = WorkerGroupLostError(self._process_killer.unreachable[rank])
        elif rank in self._process_killer.ended:
            error_found = WorkerGroupLostError(self._frozen(rank, self._process_killer.ended[rank]))
        elif isinstance(error, WorkerFrozenError):
            error_found = WorkerGroupLostError(f"worker {rank} hangs: {error}\n{error.stack}")
        else:
            error_found = WorkerGroupLostError(f"worker {rank} of the trial was lost: {error}")
        error_found.why_not_recovered = lost.why or None
        return error_found

    def _describe_end(self, action: Action) -> str:
        return ". All workers of the group end: a trial restarts as FailureConfig allows, a call of raytf.fit fails"

    def _start_replacement(self, rank: int) -> Member:
        return self._process(rank, self.members[rank].bundle)

    def send_environment(self, member: Member, addresses: list[str], token: bytes, pinned: bool) -> Any:
        if self._replacement_trial is not None:
            self._run, self._replacement_trial = ray.put(self._replacement_trial()), None
        self._settled.pop(member.rank, None)
        return member.actor.store_opening.remote(*self._opening(member.rank, addresses, token, pinned))

    def start_again(self, member: Member) -> None:
        member.actor.start_as_replacement.remote(self._run)

    def _request_stop(self, why: Callable[[], str | None] | None) -> None:
        """Stops all workers after the same step, once there is a reason."""
        if not self._pending or why is None or self.stop_reason is not None or (reason := why()) is None:
            return
        action = self._decisions.take(StopRequested() if reason == stop.STOP else Drained(stays=True))
        if action.kind is not ActionKind.END_AFTER_STEP:
            return
        self.stop_reason = action.why
        try:
            graceful_stop.agree(self.actors, action.why)
        except NoAnswerError as error:
            raise WorkerGroupLostError(str(error)) from None
        except ray.exceptions.RayActorError as error:
            raise _lost("a worker", error) from error

    def save(self) -> dict[str, bytes] | None:
        """Returns the files of a checkpoint of this report: the chief's, and the own files of others."""
        results = self._answers(
            [worker.save.remote() for worker in self.actors], timeouts.get().trial_save, "a checkpoint"
        )
        files = [part for part in reversed(results) if part is not None]
        return {name: content for part in files for name, content in part.items()} if files else None

    def stop(self) -> None:
        """Ends the trial on all workers, and clears its state."""
        self._call_all("stop", action="the end of a trial")

    def close(self, well: bool = True) -> None:
        """Ends the workers.

        Args:
            well: Whether they answer, and so can clean up.
        """
        if well:
            with contextlib.suppress(NoAnswerError):
                for _ in in_completion_order(
                    [w.stop.remote() for w in self.actors], timeouts.get().worker_cleanup, "the end of its process"
                ):
                    pass
        self.end(self.actors)

    def _call_all(self, method: str, *arguments, **how) -> list:
        return self._each_of(method, [arguments] * len(self.members), **how)

    def _each_of(self, method: str, arguments: list[tuple], *, action: str, seconds: float | None = None) -> list:
        calls = [getattr(actor, method).remote(*a) for actor, a in zip(self.actors, arguments, strict=True)]
        return self._answers(calls, timeouts.get().trial_answer if seconds is None else seconds, action)

    def _answers(self, calls: list, seconds: float, action: str) -> list:
        """Returns the results of calls; raises WorkerGroupLostError once a worker dies, is stopped, or is late."""
        self._process_killer.mark_alive(*self.locations)
        try:
            return collect_answers(calls, seconds, action, check=self._check_processes, failure=_lost)
        except NoAnswerError as error:
            raise WorkerGroupLostError(str(error)) from None

    def _check_processes(self) -> None:
        for how in self._process_killer.unreachable.values():
            raise WorkerGroupLostError(how)
        for rank, how in self._process_killer.ended.items():
            raise WorkerGroupLostError(self._frozen(rank, how))

    def _frozen(self, rank: int, how: str) -> str:
        host = f" on {self.locations[rank].host}"
        return f"worker {rank}{host} is frozen: {how.replace(host, '', 1)}"


def _lost(name: str, error: Exception) -> Exception:
    if isinstance(error, ray.exceptions.RayActorError):
        lost = WorkerGroupLostError(f"{name} of the trial was lost: {error}")
        lost.why_not_recovered = "it was lost outside of the trial's steps"
        return lost
    return error


def _take(spares: Sequence[tuple[str, Any]], node: str):
    """Returns a standby process on a node for the worker group of this actor, or None if there is none.

    Ray's key-value store has the used ones, as a worker of another group would answer only after its step.
    """
    leader = ray.get_runtime_context().current_actor
    lost_errors = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError, ray.exceptions.GetTimeoutError)
    for spare_node, actor in spares:
        if spare_node != node or ray_core.kv_put(ray_core.id_of(actor), b"taken", overwrite=False, namespace=_TAKEN):
            continue
        with contextlib.suppress(*lost_errors):
            ray.get(actor.end_with.remote(leader), timeout=timeouts.get().imports)
            return actor
    return None


class GroupWorker(MemberProcess):
    """A worker of a worker group, which executes the commands of `WorkerGroup`."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self._session = None
        self._failed: Exception | None = None
        self._opening: tuple = ()

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
        self._stack.enter_context(backend.keras_output(rank == 0, None))
        self._stack.enter_context(shared_warnings.shown_once(setup.warned))
        with autograph.in_memory():
            context.get_strategy()
        clearing.record_settings()

    def begin(self, job: TrialRun) -> None:
        output.set_output_name(f"{job.name} worker {self._rank}")
        self._folder = scratch.make_folder(size_of_files(job.files or {}))
        checkpoint = None
        if job.files is not None:
            checkpoint = os.path.join(self._folder, "checkpoint")
            with scratch.name_errors(checkpoint, size_of_files(job.files)):
                write_files(job.files, checkpoint)
        stop.stop_barrier.reset()
        self._failed = None
        self._session = TrialSession(self._rank, self._size, checkpoint, job.name, job.step_checkpoints)
        self._thread = threading.Thread(target=self._run, args=(job, self._session, self._folder), daemon=True)
        self._thread.start()

    def store_opening(self, *opening) -> None:
        """Stores the arguments of `open` for `start_as_replacement`."""
        self._opening = opening

    def start_as_replacement(self, job: TrialRun) -> None:
        """Opens this replacement worker, and trains; `poll_recovery_state` returns its error."""
        try:
            import_raytf()
            self.open(*self._opening)
            self.begin(job)
            self._session.commands.put("go")
        except Exception as error:
            self._failed = error

    def poll_recovery_state(self, seconds: float) -> tuple[BlockedWorker | str | None, Exception | None]:
        """Returns `RecoveryClient.waiting(seconds)` of this process, and the trial's error or None."""
        if self._failed is None and self._session is not None and self._session.waits:
            return "it has reported, and waits for the others to do so", None
        return recovery_client.client.waiting(0.0 if self._failed is not None else seconds), self._failed

    def _run(self, job: TrialRun, session, folder: str) -> None:
        trial_setup = TrialSetup(nodes=self._nodes, **job.trial_setup)
        set_train_fn_utils(TrialTrainFnUtils(session, trial_setup, _broadcast, folder))
        activity.tracker.reset()
        activity.tracker.register_thread()
        try:
            import_keras()  # for this thread
            session.park()
            with output.as_status(), autograph.in_memory():
                ended = job.train(session, job.config)
            activity.tracker.enter(activity.END)
            session.events.put(("end", ended))
            session.park()
        except TrialStopped:
            pass
        except BaseException as error:
            hint = legacy_names.hint(error)
            cause = f"{one_line(error)}; {hint}" if hint else one_line(error)
            self._failed = TrialError(cause, traceback.format_exc())
            session.events.put(("error", self._failed))
        finally:
            set_train_fn_utils(None)

    def continue_trial(self) -> Report | LoopEnded | RunEvent | WaitingForRing | None:
        """Continues the trial; returns the result of `next_event`."""
        activity.tracker.renew()
        self._session.commands.put("go")
        return self.next_event()

    def next_event(self) -> Report | LoopEnded | RunEvent | WaitingForRing | None:
        """Returns the next event of the trial's thread; after a timeout None, or `WaitingForRing`.

        The timeout lets this process answer other calls.
        """
        with contextlib.suppress(queue.Empty):
            kind, value = self._session.events.get(timeout=_BEAT_INTERVAL)
            if kind == "event":
                return value
            return Report(value) if kind == "report" else LoopEnded(value) if kind == "end" else LoopEnded(error=value)
        return WaitingForRing() if isinstance(recovery_client.client.waiting(), BlockedWorker) else None

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
        scratch.remove_folder(self._folder)
        clearing.clear_training()


def _end_with(actor) -> None:
    while True:
        try:
            ray.get(actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            os._exit(1)
        time.sleep(_POLL_INTERVAL)


def _broadcast(value: Any) -> Any:
    """Returns the value of rank 0 on every worker; uses the strategy, as all workers are in the train loop."""
    from raytf.collectives import communicator, signed
    from raytf.worker import context

    distribution = context.get_strategy()
    if not communicator.spans_workers(distribution):
        return value
    return signed.broadcast(distribution, value)
