"""Starts a run's processes early, and passes them to Ray Train. Driver side.

Ray Train starts its controller, then helpers, then the workers, which then import TensorFlow. Here all these processes
start and import as soon as `fit` is called. Meanwhile the driver reads the data and tries the model. The processes
reserve no resources, and none is left from an earlier successful run. Ray Train then reserves the resources, and the
processes on the right nodes become its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.train import LoggingConfig, RunConfig
from ray.util.placement_group import placement_group_table

from raytf import events, timeouts
from raytf.collectives.healing import Waiting
from raytf.compat import ray_configs, ray_core, ray_train
from raytf.compat.patching import overrides
from raytf.compat.ray_train import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    DataParallelTrainer,
    DatasetsCallback,
    DefaultPlacementGroupHandle,
    ElasticScalingPolicy,
    NoopDecision,
    PlacementGroupCleanerCallback,
    PlacementGroupHandle,
    PreemptionCallback,
    PreemptionWatcher,
    RayTrainWorker,
    ShuttingDownState,
    StateManagerCallback,
    TrainController,
    Worker,
    WorkerGroup,
    WorkerGroupCallback,
    WorkerGroupStartupFailedError,
    WorkerStatus,
    construct_train_func,
    get_env_vars_to_propagate,
    get_or_create_autoscaling_coordinator,
    time_monotonic,
)
from raytf.console import output, persisting, quiet
from raytf.errors import RaytfError, in_a_line
from raytf.events import Kind, RunEvent
from raytf.liveness import LOOK_INTERVAL, STOPPED_INTERVAL
from raytf.runtime import answers, processes, reservation, resources
from raytf.runtime.failures import WorkerFrozenError, cause_of, is_consequence
from raytf.runtime.hang_watch import HangWatch
from raytf.runtime.process_monitor import ProcessLocation, Watchdog
from raytf.runtime.processes import WarmPool, worker_environment
from raytf.runtime.reservation import Reservation
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.runtime.spares import Spares
from raytf.timeouts import Timeouts
from raytf.train import backend, decisions, ends, entry, local, staying
from raytf.train.decisions import Decisions, Do, Drained, Lost, Phase, WorkerState
from raytf.train.entry import import_raytf
from raytf.train.healing import STARTS_ANEW, TAKES_ITS_PLACE, Asked, Healing, Recovery, standing
from raytf.worker.ending import DRAIN, MovedError

# Seconds. Ray Train's controller processes reports, ends and failures only when it polls. Its default of 2 s is longer
# than an epoch of a small model.
_POLL_INTERVAL = "0.2"
# If workers fail only by another's loss, a worker that is silent for so many seconds is the lost one.
_SILENT_INTERVAL = 3.0
# Delay in seconds of Ray Train's cleanup process: it imports Ray Train, when all cores import TensorFlow.
_GUARDS_START_AFTER_INTERVAL = 20.0
# Seconds between two checks of an elastic run's size: Ray Train's default, and raytf's unless the user sets another. A
# change costs a start of workers, and no step.
_RAYS_RESIZE_INTERVAL, _RESIZE_INTERVAL = 60.0, 2.0
# Seconds between two checks of the cluster's nodes.
_NODES_INTERVAL = 1.0
# Seconds for Ray to notice the end of a process that another process has reported.
_LOSS_INTERVAL = 2.0
# Seconds between two polls meanwhile, and after one with a report: each poll takes one, and the next may wait.
_SOON_INTERVAL = 0.02
# Seconds until the start of new workers' processes is retried, if they were not ready in time.
_AGAIN_INTERVAL = 30.0
# Seconds between two checks for drained nodes; each is a request to the head of a millisecond.
_DRAINS_INTERVAL = 1.0


class Startup(WarmPool):
    """Processes of a run that is about to start, of Ray Train's own class of workers.

    Args:
        scaling_config, run_config: Configs of the run.

    Attributes:
        controller: Actor that becomes Ray Train's controller.
        run_config: RunConfig of the run.
    """

    def __init__(self, scaling_config, run_config):
        self.run_config = run_config
        node = ray.get_runtime_context().get_node_id()
        self.controller = (
            ray.remote(_Controller).options(num_cpus=0, label_selector={ray_core.RAY_NODE_ID_KEY: node}).remote()
        )
        super().__init__(
            RayTrainWorker, scaling_config, run_config, resources.fewest_workers(scaling_config), import_raytf
        )

    def end_asked(self) -> None:
        self.controller.end_compared.remote()
        super().end_asked()

    def cancel(self) -> None:
        ray.kill(self.controller)
        super().cancel()


class EarlyStartTrainer(DataParallelTrainer):
    """A DataParallelTrainer with the processes of a `Startup`, by default its own.

    With num_workers=0 there is no other process, and `launch` is a `local.Here`.

    Args:
        launch: The processes that it uses, or None to start them.
        beside: A process in addition to the workers: an `evaluator.Beside`, or None.
        shown: (names of datasets, config) for Ray's dashboard, of a train loop with its own datasets; or None.
        heals: Whether a lost worker is replaced in place if possible.
        rehearsed: `job.TrainJob` for the warm-up step of standby workers, or None.
    """

    _cancelled = False
    _ending: ends.Ending | None = None

    def __init__(
        self,
        *args,
        run_config=None,
        launch: Startup | None = None,
        beside=None,
        shown=None,
        heals=False,
        rehearsed=None,
        **kwargs,
    ):
        self._launch, self._beside, self._shown, self._heals = launch, beside, shown, heals
        self._rehearsed = rehearsed
        run_config = copy.copy(run_config) if run_config else RunConfig()
        run_config.worker_runtime_env = worker_environment(run_config, kwargs.get("scaling_config"))
        if run_config.logging_config == LoggingConfig():  # Ray Train would print each report of each worker
            run_config.logging_config = LoggingConfig(log_level="WARNING")
        super().__init__(*args, run_config=run_config, **kwargs)
        if shown is not None:
            self.train_run_context = dataclasses.replace(self.train_run_context, train_loop_config=shown[1])

    def fit(self):
        if self.running_in_local_mode:
            return self._fit_here()
        given, config = self._launch, self.backend_config
        self._launch = given or Startup(self.scaling_config, self.run_config)
        self._launch.ending = self._launch.ending or self._ending
        level = self.run_config.logging_config.log_level
        self.backend_config = dataclasses.replace(config, warned=self._launch.warned, log_level=level)
        self._reservation = Reservation(self._tasks_beside(), reservation.patience(self.run_config.failure_config))
        try:
            self._reserve()
            return super().fit()
        finally:
            self.backend_config = config
            if given is None:
                self._launch.cancel()
            self._launch = given
            self._reservation.release()

    def _fit_here(self):
        self._cancelled = False
        cancelled = lambda: self._cancelled or (self._launch is not None and self._launch.cancelled)
        context = functools.partial(backend.context_here, self.backend_config)
        loop = construct_train_func(
            self.train_loop_per_worker, self.train_loop_config, context, "train_loop_per_worker"
        )
        with quiet.native():
            run = functools.partial(local.run, loop, self.train_run_context, self.datasets, cancelled)
            return run() if self._launch is None or self._launch.ending is None else self._launch.ending.here(run)

    def _tasks_beside(self) -> dict[str, dict[str, float]]:
        """Returns the resources of each task in addition to Ray Train's workers, by name."""
        plan = getattr(self.backend_config, "servers", None)
        tasks = {str(task): plan.bundle(task) for task in plan.tasks()} if plan else {}
        return tasks | ({self._beside.name: self._beside.resources} if self._beside else {})

    def _reserve(self) -> None:
        """Reserves all resources of the run, unless only Ray Train's controller has its number of workers."""
        scaling = self.scaling_config
        if not isinstance(scaling.num_workers, int) or scaling.num_workers < 1 or _is_slice(scaling):
            return
        per_worker, selectors = (
            ray_configs.resources_per_worker(scaling),
            ray_configs.label_selectors(scaling, scaling.num_workers),
        )
        self._reservation.take(scaling.num_workers, per_worker, scaling.placement_strategy, selectors)
        plan = getattr(self.backend_config, "servers", None)
        if plan:
            plan = dataclasses.replace(plan, group=self._reservation.group, places=self._reservation.places)
            self.backend_config = dataclasses.replace(self.backend_config, servers=plan)

    def _cancel(self) -> None:
        """Ends a `fit` that runs in another thread; that `fit` raises an error."""
        self._cancelled = True
        if self._launch is not None:
            self._launch.cancel()

    @overrides(DataParallelTrainer)
    def _create_default_callbacks(self):
        callbacks = []
        for callback in super()._create_default_callbacks():
            if isinstance(callback, PlacementGroupCleanerCallback):
                callback = _LateCleaner()
            if isinstance(callback, DatasetsCallback) and not self.datasets:
                callback = _NoDatasets()
            if isinstance(callback, StateManagerCallback) and self._shown is not None:
                callback = StateManagerCallback(datasets=dict.fromkeys(self._shown[0]))
            callbacks.append(callback)
        if ENABLE_PREEMPTION_WATCHER_ENV_VAR not in os.environ:
            callbacks.append(_Preemption())
        return callbacks

    @overrides(DataParallelTrainer)
    def _initialize_and_run_controller(self, **arguments):
        controller = self._launch.controller
        if isinstance(arguments["scaling_policy"], ElasticScalingPolicy):
            arguments["scaling_policy"] = _Elastic(
                self.scaling_config, self._tasks_beside(), after_step=self._shown is not None
            )
        beginning = controller.begin.remote(
            get_env_vars_to_propagate(),
            arguments,
            self._launch.there,
            self._reservation,
            self._beside,
            self.backend_config.config,
            self._heals,
            self._shown is not None,
            [] if self._rehearsed is None else [ray.put((self._rehearsed, self.backend_config))],
            [self._launch.asked] if self._launch.compares else [],
            timeouts.get(),
        )
        answers.collect(
            [beginning], timeouts.get().process_start, "the start of Ray Train's controller", names=["its process"]
        )
        running = controller.run.remote()
        if self._launch.ending is not None:
            self._launch.ending.result_of(running, controller.stop.remote)
        elif threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(running)
        return ray.get(controller.get_result.remote())


class _Controller(TrainController):
    """Ray Train's controller, in a process that starts before the run is known."""

    def __init__(self):
        self._comparing, self._unused = [], []
        get_or_create_autoscaling_coordinator()  # starts a process that the first run of a cluster waits for

    def begin(
        self,
        environment: dict[str, str],
        arguments: dict,
        processes: list,
        held: Reservation,
        beside,
        config: TensorflowConfig,
        heals: bool,
        ends_after_step: bool,
        rehearsed: list,
        comparing: list,
        its: Timeouts,
    ) -> None:
        timeouts.put_in_force(its)
        output.say_who("controller")
        persisting.autoscaler_is_asked()
        ray_train.have_helpers_ask_their_cluster()
        run, policy = arguments["train_run_context"], arguments["failure_policy"]
        storage = run.run_config.storage_context
        events.record(events.Recorder(storage.storage_filesystem, storage.experiment_fs_path))
        known = {"processes": processes, "held": held, "beside": beside, "config": config}
        self._comparing += comparing
        known |= {"policy": policy, "rehearsed": rehearsed, "comparing": self._comparing, "unused": self._unused}
        self._lost, self._looks_until = asyncio.Event(), 0.0
        scaling = arguments["scaling_policy"]
        elastic = known["elastic"] = scaling if isinstance(scaling, _Elastic) else None
        workers = resources.fewest_workers(run.scaling_config)
        self._decisions = known["decisions"] = Decisions(
            decisions.RunState(
                workers=workers,
                fewest=workers,
                most=resources.most_workers(run.scaling_config),
                failures_left=ray_train.failures_left(policy),
                recovers=heals,
                ends_after_step=ends_after_step,
            )
        )
        self.worker_group_cls = type("_Group", (_WorkerGroup,), known)
        # Ray Train reads these at its start; later they would change the environment of the workers.
        variables = {HEALTH_CHECK_INTERVAL_S_ENV_VAR: _POLL_INTERVAL, ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0"}
        variables = {name: value for name, value in variables.items() if name not in environment}
        os.environ.update({ray_core.WARN_BLOCKING_GET: "0"} | environment | variables)
        super().__init__(**arguments)
        self._list_again = ray_train.outlive_full_storage(ray_train.manager_of(self))
        ray_train.take_numpy(ray_train.manager_of(self))
        if elastic is not None:
            elastic.decisions, elastic.prepare = self._decisions, self._prepare
        for name in variables:
            del os.environ[name]

    def get_result(self):
        """Writes the list of checkpoints again, and returns the result."""
        self._list_again()
        return super().get_result()

    @overrides(TrainController)
    async def _poll_workers(self):
        """Polls at once if a worker reports a loss, often until Ray detects it, and soon after a training report."""
        left, group = ray_train.until_poll(self), self.get_worker_group()
        if group.heals:
            self._looks_until = 0.0
        if group.took_report or time.monotonic() < self._looks_until:
            left = min(left, _SOON_INTERVAL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), left)
        if self._lost.is_set():
            self._lost.clear()
            self._looks_until = time.monotonic() + _LOSS_INTERVAL
            if (group := self.get_worker_group()) is not None:  # it may have ended meanwhile
                group.look_for_cuts()
        ray_train.poll_now(self)
        return await super()._poll_workers()

    def look(self) -> None:
        """Ends the wait for the next poll as a worker is lost, see `ray_train.tell_of_loss`."""
        self._lost.set()

    @overrides(TrainController)
    def _shutdown_worker_group(self):
        group = self.get_worker_group()
        if isinstance(self.get_state(), ShuttingDownState):
            group.end_processes()
        else:
            group.keep_those_that_stay()
        super()._shutdown_worker_group()

    def _prepare(self, before: int, after: int) -> bool:
        """Calls `_WorkerGroup.prepare`; returns whether its processes are ready, and the same workers still train."""
        group = self.get_worker_group()
        ready = group is not None and group.prepare(before, after)
        return ready and self.get_worker_group() is group and self._decisions.state.is_whole

    def end_compared(self) -> None:
        """Ends the process whose comparison has ended, unless it may be a worker; see `verify.Following`."""
        self._comparing.clear()
        while self._unused:
            ray.kill(self._unused.pop())

    def stop(self) -> list:
        """Requests a stop of the run. Returns the actors that must stop after a step, none if no worker trains."""
        action, group = self._decisions.take(decisions.StopRequested()), self.get_worker_group()
        training = action.do is Do.END_AFTER_STEP and group is not None and group.has_started()
        return [worker.actor for worker in group.get_workers()] if training else []


class _Elastic(ElasticScalingPolicy):
    """Scaling policy of an elastic run: counts the run's other tasks, and excludes nodes that leave.

    Workers that support it stop after the same step before their number changes. Ray Train ends them in the middle of
    one.

    Args:
        beside: Resources of each task in addition to the workers, by name.
        after_step: Whether workers stop after a step on request.

    Attributes:
        after_step: As the argument.
        decisions: Decisions of the run. The number of workers stays until a lost one is replaced, or all have ended.
        prepare: prepare(number of workers, new number) starts processes for new workers, in a thread other than Ray
            Train's. Returns whether they are ready.
        suspects: Ids of nodes whose workers were lost; Ray needs up to 15 s to detect a lost node.
    """

    decisions: Decisions
    prepare: Callable[[int, int], bool] = staticmethod(lambda before, after: True)

    def __init__(self, scaling_config, beside: dict[str, dict[str, float]], after_step: bool):
        scaling_config = copy.copy(scaling_config)
        if scaling_config.elastic_resize_monitor_interval_s == _RAYS_RESIZE_INTERVAL:
            scaling_config.elastic_resize_monitor_interval_s = _RESIZE_INTERVAL
        super().__init__(scaling_config)
        self._bundles, self.after_step = list(beside.values()), after_step
        self.suspects: set[str] = set()
        self._nodes: set[str] = set()
        self._look_at = -math.inf
        self._not_before = -math.inf  # earliest time of the next increase
        self._late_at = math.inf  # time when a requested stop after a step is overdue

    def _look(self) -> None:
        """Refreshes Ray Train's nodes if some were added or lost; Ray itself checks every 20 s."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _NODES_INTERVAL
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if nodes != self._nodes:
            self._nodes = nodes
            ray_train.see_nodes(self)

    @overrides(ElasticScalingPolicy)
    def make_decision_for_non_running_worker_group(self):
        self._look()
        return super().make_decision_for_non_running_worker_group()

    @overrides(ElasticScalingPolicy)
    def _count_possible_workers(self, reserved_resources) -> int:
        # Ray's list of reserved resources is up to 20 s old
        gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]} | ray_core.draining().keys()
        gone |= resources.silent(self.suspects)
        left = resources.without(ray_train.reserved(reserved_resources, without=gone), self._bundles)
        return 0 if left is None else super()._count_possible_workers(ray_train.as_reserved(left))

    @overrides(ElasticScalingPolicy)
    def make_decision_for_running_worker_group(self, worker_group_state, worker_group_status):
        self._look()
        if self.decisions.state.phase is Phase.TRAINING:
            self._late_at = math.inf
        late = time.monotonic() >= self._late_at
        if self.decisions.state.phase is not Phase.TRAINING and not late:
            return NoopDecision()
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, NoopDecision):
            return decision
        if decision.num_workers > worker_group_state.num_workers and time.monotonic() < self._not_before:
            return NoopDecision()
        action = self.decisions.take(decisions.Room(decision.num_workers, late))
        if action.do is Do.END_AFTER_STEP:
            limits = timeouts.get()
            self._late_at = time.monotonic() + limits.joiner_ready + limits.workers_leave
            actors = [worker.actor for worker in worker_group_state.workers]
            threading.Thread(target=self._change, args=(actors, action.workers), daemon=True).start()
        return decision if action.do is Do.RESIZE else NoopDecision()

    def _change(self, actors: list, after: int) -> None:
        """Stops workers after a step, once the processes of new workers are ready."""
        current = len(actors)
        ready = after < current or self.prepare(current, after)
        if not ready:
            self._not_before = time.monotonic() + _AGAIN_INTERVAL
        else:
            self._late_at = time.monotonic() + timeouts.get().workers_leave
            events.emit(RunEvent(kind=Kind.RESIZED, workers=after, before=current))
        if not ready or not ends.end_of_resized(actors):
            self.decisions.take(decisions.NotTold())  # a worker is being replaced, or all restart
            self._late_at = math.inf


def _is_slice(scaling_config) -> bool:
    """Whether Ray Train reserves a slice of TPU hosts for the workers, in its own way."""
    return bool(scaling_config.use_tpu and scaling_config.topology and scaling_config.accelerator_type)


class _Held(DefaultPlacementGroupHandle):
    """The reserved placement group of a run for one worker group, which ends before the run's other tasks."""

    def __init__(self, held: Reservation):
        super().__init__(held.group)
        self._held = held

    def wait(self, timeout_seconds: float = 30) -> bool:
        return self._held.wait(timeout_seconds)

    def shutdown(self) -> None:
        """Does nothing: the driver releases the group, or the next one replaces it."""


class _SliceAndHeld(PlacementGroupHandle):
    """A slice of TPU hosts, which Ray reserves in its own way, and a placement group in addition.

    Both are released unless both are ready within the timeout of a start.
    """

    def __init__(self, slice_of_hosts: PlacementGroupHandle, held: Reservation):
        self._slice, self._held, self._ready = slice_of_hosts, held, False

    @property
    def placement_group(self):
        return self._slice.placement_group

    def ready(self):
        return self._slice.ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        deadline = time.monotonic() + timeout_seconds
        self._ready = self._slice.wait(timeout_seconds) and self._held.wait(max(1.0, deadline - time.monotonic()))
        return self._ready

    def shutdown(self) -> None:
        self._slice.shutdown()
        if not self._ready:
            self._held.drop()


class _WorkerGroup(WorkerGroup):
    """Worker group in a run's reservation; existing processes become its workers where possible.

    Frozen workers are ended, and are the cause of the run's failure. Processes of an elastic run's workers are outside
    of the reservation, so that they can outlive it.
    """

    processes: list
    held: Reservation
    beside: object
    config: TensorflowConfig
    policy: object
    rehearsed: list
    comparing: list  # the process that compares two workers with one device, if one does
    unused: list  # the same, once it has become no worker
    elastic: _Elastic | None
    decisions: Decisions
    _watchdog: Watchdog | None = None
    _hangs: HangWatch | None = None
    _hold_until: float | None = None
    _spares: Spares | None = None
    _cut_until: float | None = None
    _standing: tuple = ()  # refs of each worker's `standing`
    _made = 0  # steps that the groups before have made, for the first hang detection of this one
    _gone: dict[int, Exception]

    @functools.cached_property
    def _recovery(self) -> Recovery:
        return Recovery(self._decide, self._asked)

    @functools.cached_property
    def _stays(self) -> bool:
        """Whether processes stay when the number of workers changes: only if TensorFlow itself connects none."""
        can = self.elastic is not None and self.elastic.after_step and self.config.communication == "auto"
        return can and resources.only_cpus(ray_train.scaling_of(self))

    def keep_those_that_stay(self) -> None:
        """Keeps the processes of this group's workers for the next group, unless one has failed by itself."""
        if not self._stays:
            return
        status = self.get_latest_poll_status()
        errors, workers = {} if status is None else status.errors, self.get_workers()
        stay = decisions.staying([_seen(errors.get(rank)) for rank in range(len(workers))])
        stay -= self._gone.keys() | self._watchdog.ended.keys() | (self._hangs.ended.keys() if self._hangs else set())
        asked = {}
        for rank, worker in enumerate(workers):
            if rank in stay and worker.actor not in self._within:
                worker.actor.shutdown.remote()
                asked[worker.actor.execute.remote(staying.leave, timeouts.get().workers_stay)] = worker
        seconds = 2 * timeouts.get().workers_stay
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        kept = [asked[ref] for ref in asked if ref in done and _is_true(ref)]
        self.processes[:0] = [(worker.metadata.node_id, worker.actor) for worker in kept]
        ray_train.take_out(self, [worker.actor for worker in kept])

    def end_processes(self) -> None:
        """Ends the processes that were to become workers of another group."""
        for _, actor in self.processes:
            ray.kill(actor)
        self.processes.clear()

    def prepare(self, before: int, after: int) -> bool:
        """Starts processes on the nodes where Ray would place new workers; returns whether they are ready.

        It runs in its own thread, while the workers continue.
        """
        if not self._stays:
            return True
        cpus = processes.cpus_of(self.get_resources_per_worker())
        nodes = resources.likely_nodes(ray_train.scaling_of(self), after - before)
        started = [(node, self._start_process(node)) for node in nodes]
        asked = [actor.execute.remote(entry.rehearse, self.rehearsed, after, cpus) for _, actor in started]
        try:
            answers.collect(asked, timeouts.get().joiner_ready, "that a process which is to become a worker is ready")
        except (RaytfError, RayError) as error:  # its node was lost, or it is too slow
            for _, actor in started:
                ray.kill(actor)
            events.emit(RunEvent(kind=Kind.RESIZE_DELAYED, workers=after, before=before, why=in_a_line(error)))
            return False
        self.processes.extend(started)
        return True

    @overrides(WorkerGroup)
    def _start(self):
        self._reported: dict[int, int] = {}
        self.took_report = False  # whether the last poll had a report
        self._gone, self._made = {}, self.decisions.made
        self._within: list = []  # actors in the reservation, which end with it
        try:
            super()._start()
            workers = len(self.get_workers())
            self.decisions.take(decisions.Started(workers, ray_train.failures_left(self.policy)))
            events.emit(RunEvent(kind=Kind.WORKERS_STARTED, workers=workers))
        except (WorkerGroupStartupFailedError, RayActorError) as error:
            frozen = dict(self._watchdog.ended) if self._watchdog is not None else {}
            if not frozen:
                raise
            text = "; ".join(f"worker {rank} was frozen at its start: {how}" for rank, how in sorted(frozen.items()))
            raise WorkerGroupStartupFailedError(text) from error
        finally:
            if not self.has_started():
                self._stop_watching()

    @overrides(WorkerGroup)
    def _clear_state(self):
        self._stop_watching()
        super()._clear_state()

    def _stop_watching(self) -> None:
        self._recovery.healing = self._cut_until = None
        if self._spares is not None:
            self._spares.close()
            self._spares = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self._stop_watching_for_hangs()

    @overrides(WorkerGroup)
    def _create_placement_group(self, scaling_config, worker_group_context):
        context = worker_group_context
        if _is_slice(scaling_config):
            self.held.drop()  # nothing is reserved during the wait for a slice
            slice_of_hosts = super()._create_placement_group(scaling_config, context)
            if self.beside is None:
                return slice_of_hosts
            self.held.hold(0, {}, "PACK", None)
            return _SliceAndHeld(slice_of_hosts, self.held)
        selectors = context.label_selector
        if self.elastic is not None:
            selectors = reservation.apart(selectors, context.num_workers, resources.silent(self.elastic.suspects))
        self.held.hold(context.num_workers, context.resources_per_worker, context.placement_strategy, selectors)
        return _Held(self.held)

    @overrides(WorkerGroup)
    def _create_workers(
        self,
        num_workers,
        placement_group,
        resources_per_worker,
        placement_group_bundle_indices=None,
        starting_world_rank=0,
        world_size=None,
        replica_group_size=None,
    ):
        if self.beside is not None:
            self.beside.start(self.held)
        indices = placement_group_bundle_indices or list(range(num_workers))
        nodes = placement_group_table(placement_group)["bundles_to_node_id"]
        existing = {}
        for node, actor in self.processes:
            place = next((i for i in indices if nodes[i] == node and i not in existing), None)
            if place is not None:
                existing[place] = actor
            elif actor in self.comparing:
                self.unused.append(actor)
            else:
                ray.kill(actor)
        self.processes.clear()
        if self._stays:
            existing |= {i: self._start_process(nodes[i]) for i in indices if i not in existing}
        try:
            asked = [actor.get_metadata.remote() for actor in existing.values()]
            metadata = answers.collect(asked, timeouts.get().process_start, "the processes that become workers")
        except (RayActorError, ActorUnschedulableError, answers.NoAnswerError) as error:
            for actor in existing.values():
                ray.kill(actor)
            raise WorkerGroupStartupFailedError("A process that was to become a worker has died") from error
        workers = [
            Worker(actor, data, resources_per_worker, placement_group_bundle_index=i)
            for (i, actor), data in zip(existing.items(), metadata, strict=True)
        ]
        missing = [i for i in indices if i not in existing]
        if missing:
            workers += super()._create_workers(len(missing), placement_group, resources_per_worker, missing)
        workers = self._assign_worker_ranks(workers, starting_world_rank, world_size, replica_group_size)
        limit = self.config.hang_timeout_s
        seconds = STOPPED_INTERVAL if limit is None else max(1.0, limit - LOOK_INTERVAL)
        self._watchdog = self._watchdog or Watchdog(seconds, self._last_words)
        for worker in workers:
            self._watchdog.watch(worker.distributed_context.world_rank, _place(worker))
        return workers

    def _last_words(self, rank: int) -> tuple[str, str]:
        hangs = self._hangs
        return ("", "") if hangs is None else hangs.last_words(rank)

    def _watch_for_hangs(self) -> None:
        workers = {worker.distributed_context.world_rank: worker for worker in self.get_workers()}

        def execute(rank, function):
            return workers[rank].actor.execute.remote(function)

        places = {rank: _place(worker) for rank, worker in workers.items()}
        limits, made, self._made = (self.config.hang_timeout_s, self.config.first_step_timeout_s), self._made, 0
        self._hangs = HangWatch(execute, places, *limits, made=made)

    def _stop_watching_for_hangs(self) -> None:
        if self._hangs is not None:
            self.decisions.made = max(self.decisions.made, self._hangs.made)
            self._hangs.close()
            self._hangs = None

    @overrides(WorkerGroup)
    def _poll_workers_and_collect_errors(self, timeout):
        statuses = super()._poll_workers_and_collect_errors(timeout)
        reported = [rank for rank, status in enumerate(statuses) if status.training_report is not None]
        for rank in reported:
            self._reported[rank] = self._reported.get(rank, 0) + 1
        self.took_report = bool(reported)
        if self._hangs is None and not self.heals and self.config.hang_timeout_s is not None:
            self._watch_for_hangs()
        state = self.decisions.state
        if self.config.spares and state.recovers and state.is_whole:
            self._keep_spares()
        for rank, status in enumerate(statuses):
            if rank not in self._world_rank_to_ongoing_poll and status.error is None:
                self._watchdog.heard(rank)
            if isinstance(cause_of(status.error), MovedError):  # otherwise it counts as the loss of a node
                status.error = cause_of(status.error)
        gone = {} if self.heals else self._gone  # a lost worker may not answer another poll
        for rank, error in gone.items():
            statuses[rank] = WorkerStatus(running=False, error=error)
        for rank, how in self._watchdog.ended.items():
            error = WorkerFrozenError(how, self._watchdog.kept.get(rank, ""))
            statuses[rank] = WorkerStatus(running=False, error=error)
        for rank, error in self._hangs.ended.items() if self._hangs is not None else ():
            if rank not in self._watchdog.ended:
                statuses[rank] = WorkerStatus(running=False, error=error)
        return self._without_consequences(self._healed(statuses))

    def _healed(self, found: list[WorkerStatus]) -> list[WorkerStatus]:
        """Replaces lost workers; until it has, it reports them as running."""
        if self.heals and self._recovery.healing.done:
            self._end_healing(found)
        event = self._happened(found)
        if event is not None:
            self._follow(event, found)
        elif not self.heals:
            self._look_at_cuts(found)
        if not self.heals:
            return found
        lost = self._recovery.healing.lost | (event.ranks if isinstance(event, Lost) else frozenset())
        return [
            WorkerStatus(running=True, training_report=status.training_report)
            if rank in lost or (status.error is not None and is_consequence(status.error))
            else status
            for rank, status in enumerate(found)
        ]

    def _happened(self, found: list[WorkerStatus]) -> decisions.Event | None:
        return decisions.happened([_seen(status.error) for status in found])

    def _follow(self, event: decisions.Event, found: list[WorkerStatus]) -> None:
        """Executes the action for an event that a poll shows."""
        action = self._decide(event)
        if action.do is Do.IGNORE:
            return
        causes = {rank: cause_of(status.error) for rank, status in enumerate(found) if status.error is not None}
        if isinstance(event, decisions.Ended):
            moved = next(cause for cause in causes.values() if isinstance(cause, MovedError))
            events.emit(RunEvent(kind=Kind.ENDED_AFTER_STEP, step=moved.step, why=str(moved)))
            return
        kind = Kind.WORKER_LOST if isinstance(event, Lost) else Kind.WORKER_FAILED
        more = {Do.RECOVER: TAKES_ITS_PLACE, Do.RESTART: STARTS_ANEW}.get(action.do, "")
        for rank in sorted(action.ranks or event.ranks):
            why = in_a_line(causes[rank])
            events.emit(RunEvent(kind=kind, ranks=(rank,), why=why, more=more))
        if self.elastic is not None and isinstance(event, Lost):
            self.elastic.suspects |= {self.get_workers()[rank].metadata.node_id for rank in event.ranks}
        self._gone |= {rank: found[rank].error for rank in action.ranks}
        if action.do is Do.INTERRUPT:
            self._recovery.healing.another_is_lost(set(action.ranks))
        elif action.do is Do.RECOVER:
            if self._hangs is not None:
                for rank in self._hangs.ended:
                    ray.kill(self.get_workers()[rank].actor)
                self._stop_watching_for_hangs()
            self._recovery.begin(action.ranks)

    def _decide(self, event: decisions.Event) -> decisions.Action:
        """Returns the action for an event; counts its failures in Ray Train, too."""
        action = self.decisions.take(event)
        for _ in range(action.failures):
            ray_train.count_failure(self.policy)
        return action

    def look_for_cuts(self) -> None:
        """Starts to check whether workers have lost their connections while all processes live."""
        if self.decisions.state.recovers and self.decisions.state.is_whole:
            self._cut_until, self._standing = time.monotonic() + timeouts.get().cut_link, ()

    def _look_at_cuts(self, found: list[WorkerStatus]) -> None:
        """Connects all workers in a new ring if all wait for one, and none is lost."""
        if self._cut_until is None:
            return
        workers = self.get_workers()
        if any(status.error is not None for status in found) or time.monotonic() > self._cut_until:
            self._cut_until = None
            return
        if not self._standing:
            self._standing = tuple(worker.actor.execute.remote(standing) for worker in workers)
        if len(ray.wait(list(self._standing), num_returns=len(workers), timeout=0)[0]) < len(workers):
            return
        refs, self._standing = self._standing, ()
        try:
            states = ray.get(list(refs))
        except ray.exceptions.RayError:  # a worker is lost, which the next poll shows
            return
        if not all(isinstance(waiting, Waiting) and error is None for waiting, error in states):
            return
        self._cut_until = None
        self._recovery.connect(workers)

    @property
    def heals(self) -> bool:
        """Whether a recovery is running."""
        return self._recovery.healing is not None

    def _keep_spares(self) -> None:
        if self._spares is None:
            workers, cpus = len(self.get_workers()), processes.cpus_of(self.get_resources_per_worker())
            begin = functools.partial(entry.rehearse, self.rehearsed, workers, cpus)
            self._spares = Spares(self.config.spares, self._start_process, begin)
        self._spares.keep({worker.metadata.node_id for worker in self.get_workers()})

    def _start_process(self, node: str):
        environment = ray_train.worker_environment(self)
        variables = processes.threads(processes.cpus_of(self.get_resources_per_worker()))
        return processes.start(RayTrainWorker, node, environment | {"env_vars": variables | environment["env_vars"]})

    def _asked(self) -> Asked:
        resources = self.get_resources_per_worker()
        cpus = processes.cpus_of(resources)

        def settle(worker: Worker, addresses: list[str], rank: int, token: bytes, pinned: bool):
            return worker.actor.execute.remote(
                backend.set_environment, self.config, addresses, rank, cpus, token, pinned
            )

        return Asked(
            workers=dict(enumerate(self.get_workers())),
            place=self._take_place,
            started=lambda made: ray_train.give_context(self, list(made.values())),
            settle=settle,
            begin=functools.partial(ray_train.begin_training, self),
            standing=lambda worker, seconds: worker.actor.execute.remote(standing, seconds),
            listening=self.config.listening,
            cores=backend.to_claim(WorkerSetup(config=self.config), resources.get("CPU", 1)),
            reported=self._reported,
            has_room=None if self.elastic is None else self._has_room,
        )

    def _has_room(self, ranks: Iterable[int]) -> bool:
        """Whether processes can start for these ranks: their bundles are on a living node, or fit on one."""
        workers, drained = self.get_workers(), ray_core.draining()
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - drained.keys()
        living -= resources.silent({workers[rank].metadata.node_id for rank in ranks})
        nodes = placement_group_table(ray_train.group_of(self))["bundles_to_node_id"]
        bundle = self.get_resources_per_worker()
        homeless = sum(nodes.get(workers[rank].placement_group_bundle_index) not in living for rank in ranks)
        wanted = {name: amount for name, amount in bundle.items() if amount > 0}
        free = [capacity for node, capacity in ray_core.free_by_node().items() if node in living]
        return not homeless or not wanted or resources.count_fitting(free, wanted) >= homeless

    def _take_place(self, rank: int) -> Worker:
        """Replaces a lost worker on the node of its bundle by a standby worker or a new process. Returns it."""
        old, size = self.get_workers()[rank], len(self.get_workers())
        per_worker, group = self.get_resources_per_worker(), ray_train.group_of(self)
        bundle, spares, taken = old.placement_group_bundle_index, self._spares, None
        if spares is not None:
            node = placement_group_table(group)["bundles_to_node_id"][bundle]
            taken = spares.take(node, lambda actor: actor.get_metadata.remote())
        if taken is None:
            (made,) = super()._create_workers(1, group, per_worker, [bundle], rank, size, 1)
            self._within.append(made.actor)
        else:
            made = Worker(*taken, per_worker, placement_group_bundle_index=bundle)
        made.distributed_context = old.distributed_context
        return made

    def _end_healing(self, found: list[WorkerStatus]) -> None:
        event = self._happened(found)
        healing, action = self._recovery.end(event.ranks if isinstance(event, Lost) else frozenset())
        if not healing.healed:
            if not self.heals:
                self._give_up(healing, action)
            return
        ray_train.exchange(self, healing.new)
        for rank, worker in healing.new.items():
            self._gone.pop(rank, None)
            self._watchdog.ended.pop(rank, None)
            self._watchdog.kept.pop(rank, None)
            self._watchdog.watch(rank, _place(worker))
            found[rank] = WorkerStatus(running=True)
        for callback in self._callbacks:
            if isinstance(callback, _Preemption):
                callback.after_worker_group_start(self)

    def _give_up(self, healing: Healing, action: decisions.Action) -> None:
        """Ends a failed recovery that no other one follows."""
        for rank in self._gone:  # a call to it would block until Ray detects the loss of its node
            ray.kill(self.get_workers()[rank].actor)
        healing.give_up()
        more = f". All workers restart from {healing.place}" if action.do is Do.RESTART else ""
        why, ranks = action.why or healing.why, tuple(sorted(healing.lost))
        events.emit(RunEvent(kind=Kind.RECOVERY_FAILED, ranks=ranks, step=healing.kept, why=why, more=more))

    def _without_consequences(self, found: list[WorkerStatus]) -> list[WorkerStatus]:
        """Withholds errors that the loss of a silent worker has caused, until that loss is certain."""
        failed = [rank for rank, status in enumerate(found) if status.error is not None]
        time_now = time_monotonic()
        silent = {
            rank: time_now - poll.start_time
            for rank, poll in self._world_rank_to_ongoing_poll.items()
            if rank not in failed and time_now - poll.start_time >= _SILENT_INTERVAL
        }
        if not failed or not silent or not all(is_consequence(found[rank].error) for rank in failed):
            return found
        self._hold_until = self._hold_until or time_now + timeouts.get().silent_worker
        for rank in failed:
            if time_now < self._hold_until:
                found[rank] = WorkerStatus(running=True, training_report=found[rank].training_report)
        for rank, seconds in silent.items():
            if time_now >= self._hold_until:
                metadata = self.get_workers()[rank].metadata
                how = f"its process {metadata.pid} on {metadata.node_ip} gives no sign of life since {seconds:.0f} s"
                found[rank] = WorkerStatus(running=False, error=WorkerFrozenError(how))
        return found


def _seen(error: BaseException | None) -> WorkerState:
    """Returns the state of a worker from the error of its poll."""
    cause = cause_of(error)
    if isinstance(cause, MovedError):
        return WorkerState.ENDED
    if isinstance(cause, (RayActorError, WorkerFrozenError)):
        return WorkerState.LOST
    return WorkerState.WELL if error is None else WorkerState.AFFECTED if is_consequence(error) else WorkerState.FAILED


def _is_true(ref) -> bool:
    try:
        return ray.get(ref) is True
    except RayError:  # it has died since
        return False


def _place(worker: Worker) -> ProcessLocation:
    metadata = worker.metadata
    return ProcessLocation(metadata.node_id, metadata.node_ip, metadata.pid, None)


class _NoDatasets(WorkerGroupCallback):
    """Replaces Ray Train's manager of datasets, a process of its own, if there are none."""

    @overrides(WorkerGroupCallback)
    def before_init_train_context(self, workers):
        return {"dataset_shard_provider": [self] * len(workers)}

    def get_dataset_shard(self, dataset_info):
        raise KeyError(f"The trainer was given no dataset {dataset_info.dataset_name!r}. Pass it in datasets={{...}}")


class _LateCleaner(PlacementGroupCleanerCallback):
    """Starts the cleanup process of a worker group after the group has run for a while."""

    _due: float | None = None
    _group = None

    @overrides(PlacementGroupCleanerCallback)
    def after_controller_start(self, train_run_context):
        self._run = train_run_context

    @overrides(PlacementGroupCleanerCallback)
    def after_worker_group_start(self, worker_group):
        self._group, self._due = worker_group, time.monotonic() + _GUARDS_START_AFTER_INTERVAL

    @overrides(WorkerGroupCallback)
    def after_worker_group_poll_status(self, worker_group_status):
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            if self._cleaner is None:
                super().after_controller_start(self._run)
            super().after_worker_group_start(self._group)

    @overrides(PlacementGroupCleanerCallback)
    def before_worker_group_shutdown(self, worker_group):
        self._due = None
        super().before_worker_group_shutdown(worker_group)

    @overrides(PlacementGroupCleanerCallback)
    def after_worker_group_abort(self, worker_group_context):
        self._due = None
        super().after_worker_group_abort(worker_group_context)


class _Preemption(PreemptionCallback):
    """Watches for drained nodes in a thread of the controller, for which Ray Train would start an actor."""

    @overrides(PreemptionCallback)
    def after_worker_group_start(self, worker_group):
        self._stop_watcher()
        ranks: dict[str, list[int]] = {}
        actors = {}
        for worker in worker_group.get_workers():
            rank = worker.distributed_context.world_rank
            ranks.setdefault(worker.metadata.node_id, []).append(rank)
            actors[rank] = worker.actor
        self._watcher = _Drains(ranks, min(self._poll_interval_s, _DRAINS_INTERVAL), actors, worker_group.decisions)

    @overrides(PreemptionCallback)
    def _stop_watcher(self):
        if self._watcher is not None:
            ray_train.stop(self._watcher)
            self._watcher = None


class _Drains(PreemptionWatcher):
    """Stops the workers after a step as soon as one of their nodes is drained; Ray Train then starts them elsewhere.

    If the driver's node is drained, no other workers can be started, and the run ends.
    """

    def __init__(self, ranks, seconds, actors, run: Decisions):
        self._ranks, self._decisions = dict(ranks), run
        self._actors, self._home = list(actors.values()), ray.get_runtime_context().get_node_id()
        super().__init__(ranks, seconds, actors)

    @overrides(PreemptionWatcher)
    def _on_drain_change(self, drained):
        super()._on_drain_change(drained)
        if not drained:
            return
        for node in drained:
            events.emit(RunEvent(kind=Kind.NODE_DRAINED, ranks=tuple(self._ranks.get(node, ())), node=node))
        action = self._decisions.take(Drained(stays=self._home not in drained))
        if action.do is Do.END_AFTER_STEP and not ends.end_of_drained(self._actors, stay=action.why == DRAIN):
            self._decisions.take(decisions.NotTold())
