"""Runs a train loop on workers: one group after another, until the loop has ended or failed too often.

It uses Ray's public API: actors and placement groups. The driver's process follows the workers in a thread.
`run_group.RunGroup` has the part of one group, and `run_worker` that of a worker.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.train import Result
from ray.util.tpu import SlicePlacementGroup, get_tpu_num_slices_for_workers, get_tpu_version_from_type

from raytf import events, logs, timeouts
from raytf.compat import ray_configs, ray_core
from raytf.compat.ray_state import TrainTab
from raytf.compat.ray_train import get_env_vars_to_propagate
from raytf.errors import ConfigError, RaytfError, one_line
from raytf.events import Kind, RunEvent
from raytf.runtime import answers, failures, reservation, resources
from raytf.runtime.answers import NoAnswerError
from raytf.runtime.failures import WorkerFrozenError, user_error
from raytf.runtime.processes import WarmPool, worker_environment
from raytf.runtime.reservation import Reservation
from raytf.train import backend, decisions, entry, graceful_stop
from raytf.train.checkpoint_list import CheckpointList
from raytf.train.decisions import ActionKind, Decisions, Phase, Started, WorkerState
from raytf.train.group import LostGroupError, worker_state
from raytf.train.run_group import GroupSpec, RunGroup
from raytf.train.run_worker import RunJob, RunWorker
from raytf.train.session_functions import ranks_of_worker
from raytf.worker.stop import RESIZE, StoppedForRestartError

logger = logs.get_logger(__name__)

# Seconds between two checks of an elastic run's size: Ray Train's default, and raytf's unless the user sets another. A
# change costs a start of workers, and no step.
_RAYS_RESIZE_INTERVAL, _RESIZE_INTERVAL = 60.0, 2.0
# Seconds until the start of new workers' processes is retried, if they were not ready in time.
_AGAIN_INTERVAL = 30.0
# Seconds of a wait for slices of TPU hosts, after which it is repeated.
_SLICE_WAIT_INTERVAL = 30.0
# Seconds of a wait for an elastic run's resources, after which they are counted again.
_ELASTIC_WAIT_INTERVAL = 10.0
# Seconds between two requests for an elastic run's nodes, and until a request expires: Ray Train's values.
_REQUEST_INTERVAL, _REQUEST_EXPIRY = 20.0, 180.0


def is_slice(scaling_config) -> bool:
    """Returns whether Ray reserves slices of TPU hosts for the workers, in its own way."""
    return bool(scaling_config.use_tpu and scaling_config.topology and scaling_config.accelerator_type)


class Startup(WarmPool):
    """Processes of a run that is about to start. They import while the driver reads the data and tries the model.

    They reserve no resources; those on the right nodes become the run's workers.

    Args:
        scaling_config, run_config: Configs of the run.
    """

    def __init__(self, scaling_config, run_config):
        workers = resources.fewest_workers(scaling_config)
        super().__init__(RunWorker, scaling_config, run_config, workers, entry.import_raytf)


class Engine:
    """One run on workers.

    Args:
        trainer: The `engine_trainer.EngineTrainer`.
        setup: The workers' `settings.WorkerSetup`.
        launch: Processes that may become workers.
        reservation: Resources of the run.
    """

    def __init__(self, trainer, setup, launch: Startup, reservation: Reservation):
        self._trainer, self._context = trainer, trainer.train_run_context
        self._launch, self._reservation, self._sidecar = launch, reservation, trainer.sidecar
        self._scaling, self._run_config = trainer.scaling_config, trainer.run_config
        self._loop = trainer.loop(functools.partial(backend.worker_context, setup))
        self._idle, self._group = list(launch.members), None
        self._is_complete = False  # the loop has ended; evaluations may still run
        self._slices: SlicePlacementGroup | None = None
        elastic = not isinstance(self._scaling.num_workers, int)
        environment = worker_environment(self._run_config, self._scaling)
        environment["env_vars"] = get_env_vars_to_propagate() | environment["env_vars"]
        after_step, recovers, warm_up_job = trainer.shown is not None, trainer.recovers, trainer.warm_up_job
        stays = elastic and after_step and setup.config.communication == "auto" and resources.only_cpus(self._scaling)
        limits = self._run_config.failure_config
        preemption = ray_configs.of_preemption(limits)
        self._spec = GroupSpec(
            setup=setup,
            scaling=self._scaling,
            worker_resources=ray_configs.resources_per_worker(self._scaling),
            environment=environment,
            warm_up_job=[] if warm_up_job is None else [ray.put((warm_up_job, setup))],
            stays=stays,
            elastic=elastic,
            drop=launch.drop,
            check=launch.check,
            preemption=preemption,
        )
        self._starts_left = limits.controller_failure_limit
        fewest = resources.fewest_workers(self._scaling)
        self._decisions = Decisions(
            decisions.RunState(
                workers=fewest,
                fewest=fewest,
                most=resources.most_workers(self._scaling),
                failures_left=float("inf") if limits.max_failures == -1 else limits.max_failures,
                preemptions_left=float("inf") if preemption.limit == -1 else preemption.limit,
                recovers=recovers,
                ends_after_step=after_step,
            )
        )
        self._elastic = (
            _Elastic(self._spec, self._decisions, list(trainer.sidecar_resources().values()), self._idle)
            if elastic
            else None
        )
        self._list = CheckpointList(self._run_config, trainer.validation_config)
        self._tab = TrainTab(self._context, trainer.shown[0] if after_step else trainer.datasets)

    def run(self) -> Result:
        """Returns the run's result.

        Raises:
            WorkerFailedError: Workers failed more often than FailureConfig allows, or could not be started.
        """
        try:
            value = self._run()
        finally:
            if self._slices is not None:
                self._slices.shutdown()
            if self._elastic is not None:
                self._elastic.close()
        return self._list.result(value)

    def _run(self) -> Any:
        """Returns the loop's value on rank 0."""
        size, by_code = self._size(), False
        while True:
            try:
                group = self._started(size)
            except (RayError, NoAnswerError, WorkerFrozenError) as error:
                self._launch.check()
                # a module that a host lacks is missing at each start; ports that are all taken are so for a while
                repeated, cause = by_code, user_error(error)
                by_code = isinstance(error, (RayTaskError, RuntimeEnvSetupError)) and not isinstance(cause, ConfigError)
                why = one_line(cause)
                if self._starts_left == 0 or (repeated and by_code):
                    raise failures.WorkerFailedError(None, why) from error
                logger.warning(
                    f"the workers could not be started, and are started again: {why}. If it repeats, correct the "
                    "cause, or set FailureConfig(controller_failure_limit=...)"
                )
                self._starts_left -= 1
                size = self._size()
                continue
            by_code = False
            try:
                value = group.follow(self._list, self._context, self._tick, self._launch.check)
            except LostGroupError as lost:
                size = self._next_size(group, lost.errors)
            except _Resize:
                size = self._next_size(group, {})
            except BaseException as error:
                self._end(group)
                self._tab.ended(one_line(error))
                raise
            else:
                self._is_complete = True
                self._end(group)
                self._tab.ended(None)
                return value

    def _started(self, size: int) -> RunGroup:
        self._launch.check()
        if self._sidecar is not None:
            self._sidecar.start(self._reservation)
        existing, self._idle[:] = list(self._idle), []
        reserved = self._reservation.group if self._slices is None else self._slices.placement_group
        group = self._group = RunGroup(self._spec, reserved, size, existing, self._decisions)
        try:
            group.begin(self._job(group))
        except BaseException:
            self._end(group)
            raise
        self._decisions.take(Started(size))
        self._tab.started(
            [
                {"actor": member.actor, "location": group.locations[rank], "ranks": ranks_of_worker(rank, group.nodes)}
                for rank, member in enumerate(group.members)
            ],
            self._spec.worker_resources,
        )
        events.emit(RunEvent(kind=Kind.WORKERS_STARTED, workers=size))
        return group

    def _job(self, group: RunGroup) -> RunJob:
        validates = self._trainer.validation_config is not None
        return RunJob(self._loop, self._context, self._trainer.datasets, group.nodes, validates)

    def _size(self) -> int:
        """Reserves the resources of the next group; returns its number of workers."""
        scaling, strategy = self._scaling, self._scaling.placement_strategy
        if is_slice(scaling):
            return self._reserve_slices()
        hold = functools.partial(
            self._reservation.ensure, worker_resources=self._spec.worker_resources, strategy=strategy
        )
        if self._elastic is None:
            hold(scaling.num_workers, selectors=ray_configs.label_selectors(scaling, scaling.num_workers))
            self._reservation.wait(cancelled=lambda: self._launch.cancelled)
            return scaling.num_workers
        return self._elastic.reserve(hold, self._reservation, self._launch.check)

    def _reserve_slices(self) -> int:
        """Reserves slices of TPU hosts, in Ray's own way; returns the number of workers."""
        scaling, worker_resources = self._scaling, self._spec.worker_resources
        while self._slices is None and not self._launch.cancelled:
            with contextlib.suppress(TimeoutError):  # other work has them
                self._slices = SlicePlacementGroup(
                    topology=scaling.topology,
                    accelerator_version=get_tpu_version_from_type(scaling.accelerator_type),
                    num_slices=get_tpu_num_slices_for_workers(
                        scaling.topology, scaling.accelerator_type, scaling.num_workers, worker_resources
                    ),
                    resources_per_bundle=worker_resources,
                    strategy=scaling.placement_strategy,
                    head_reservation_timeout_s=_SLICE_WAIT_INTERVAL,
                )
        while not self._launch.cancelled and not self._slices.placement_group.wait(_SLICE_WAIT_INTERVAL):
            pass
        if self._sidecar is not None:
            self._reservation.ensure(0, {}, "PACK", None)
            self._reservation.wait(cancelled=lambda: self._launch.cancelled)
        return scaling.num_workers

    def _tick(self, group: RunGroup) -> None:
        self._launch.check()
        self._list.tick()
        if self._elastic is not None:
            self._elastic.check(group)

    def _next_size(self, group: RunGroup, errors: dict[int, Exception]) -> int:
        """Ends a group; returns the size of the next one, unless the run fails."""
        state = self._decisions.state
        has_ended = state.phase is Phase.ENDED
        # an end after a step may be a failure, see `Decisions.allow_preemption`
        counts = has_ended and not state.stopping
        failed = {
            rank: e for rank, e in errors.items() if counts or not isinstance(user_error(e), StoppedForRestartError)
        }
        try:
            if self._elastic is not None:
                lost = [rank for rank, error in failed.items() if isinstance(user_error(error), RayActorError)]
                self._elastic.suspects |= {group.nodes[rank] for rank in lost}
            self._launch.check()
            for callback in self._run_config.callbacks or () if failed else ():
                callback.after_exception(run_context=self._context, worker_exceptions=failed)
            if failed and has_ended:
                self._tab.ended(one_line(user_error(next(iter(failed.values())))))
                raise failures.first_cause(failed) from None
            if any(worker_state(error) is WorkerState.FAILED for error in failed.values()):
                logger.warning(
                    "all workers restart from the last checkpoint, as one has failed; correct the error if it repeats: "
                    f"{failures.first_cause(failed)}"
                )
            self._tab.ended(None, restarts=True)
            self._idle[:0] = group.reusable_workers(errors)  # the chief stays where it is
        finally:
            self._end(group)
        return self._size()

    def _end(self, group: RunGroup) -> None:
        self._group = None
        group.close()

    def stop(self) -> list | None:
        """Requests a stop of the run.

        Returns:
            The actors that must stop after a step, none if no worker trains; None if the loop has ended.
        """
        if self._is_complete:
            return None
        action, group = self._decisions.take(decisions.StopRequested()), self._group
        return group.actors if action.kind is ActionKind.END_AFTER_STEP and group is not None else []

    def close(self) -> None:
        """Ends all processes."""
        self._launch.cancelled = True
        if (group := self._group) is not None:
            for actor in group.actors:
                ray.kill(actor)
        for _, actor in self._idle:
            ray.kill(actor)
        self._list.close()


class _Resize(Exception):
    """All workers restart at once, as another number of them."""


class _Elastic:
    """Decides on the number of workers of an elastic run. Workers that support it stop after a step before it changes.

    Args:
        spec: What all groups of the run have in common.
        run: Decisions of the run.
        sidecar_resources: Resources of each task in addition to the workers.
        idle: Processes for the next group; new ones are added.

    Attributes:
        suspects: Ids of nodes whose workers were lost; Ray needs up to 15 s to detect a lost node.
    """

    def __init__(self, spec: GroupSpec, run: Decisions, sidecar_resources: list[dict[str, float]], idle: list):
        self._spec, self._decisions, self._sidecar_resources, self._idle = spec, run, sidecar_resources, idle
        self._wanted = spec.worker_resources
        self.suspects: set[str] = set()
        given = spec.scaling.elastic_resize_monitor_interval_s
        self._resize_interval = _RESIZE_INTERVAL if given == _RAYS_RESIZE_INTERVAL else given
        self._next_check = self._not_before = self._request_at = 0.0
        self._requester = f"raytf-{uuid.uuid4().hex}"
        self._overdue_at = float("inf")  # when a requested stop after a step is overdue
        self._closed = False

    def _free(self) -> dict[str, dict[str, float]]:
        living = resources.living(self.suspects)
        return {node: free for node, free in ray_core.free_by_node().items() if node in living}

    def reserve(self, hold: Callable, group_reservation: Reservation, check: Callable[[], None]) -> int:
        """Reserves as many workers as there is room for; waits until there is room for the fewest.

        Raises:
            ResourceError: The cluster lacks nodes for the fewest, and `Timeouts.nodes` passed.
        """
        free, state = self._free(), self._decisions.state
        for node, bundle in group_reservation.by_node():  # Ray's view of what is free is late
            for name, amount in bundle.items() if node in free else ():
                free[node][name] = free[node].get(name, 0) + amount
        group_reservation.drop()
        while True:
            check()
            available = resources.free_without(list(free.values()), self._sidecar_resources)
            fitting = 0 if available is None else min(state.most, resources.count_fitting(available, self._wanted))
            size = max(fitting, state.fewest)
            self._request_nodes()
            silent = resources.is_silent_about(self.suspects)
            selectors = ray_configs.label_selectors(self._spec.scaling, size)
            hold(size, selectors=reservation.avoid_nodes(selectors, size, silent))
            if group_reservation.wait(_ELASTIC_WAIT_INTERVAL, patience=timeouts.get().nodes):
                self._next_check = time.monotonic() + self._resize_interval
                return size
            group_reservation.drop()
            free = self._free()

    def _request_nodes(self) -> None:
        """Requests nodes for the most workers from an autoscaler, which otherwise adds none to a run that has begun."""
        now = time.monotonic()
        if now < self._request_at or not resources.may_grow():
            return
        self._request_at = now + _REQUEST_INTERVAL
        workers = self._decisions.state.most
        selectors = ray_configs.label_selectors(self._spec.scaling, workers) or [{}] * workers
        ray_core.request_nodes(
            self._requester,
            [*[self._wanted] * workers, *self._sidecar_resources],
            [*selectors, *[{} for _ in self._sidecar_resources]],
            _REQUEST_EXPIRY,
        )

    def close(self) -> None:
        """Withdraws the request for nodes, and drops a change that is being prepared."""
        self._closed = True
        if self._request_at and ray.is_initialized():
            ray_core.request_nodes(self._requester, [], [], 0.0)

    def check(self, group: RunGroup) -> None:
        """Starts a change of the number of workers if there is room for another one."""
        now, state = time.monotonic(), self._decisions.state
        if now < self._next_check:
            return
        self._next_check = now + self._resize_interval
        self._request_nodes()
        if state.phase is Phase.TRAINING:
            self._overdue_at = float("inf")
        overdue = now >= self._overdue_at
        if (state.phase is not Phase.TRAINING and not overdue) or now < self._not_before:
            return
        current = len(group.members)
        size = min(state.most, current + resources.count_fitting(list(self._free().values()), self._wanted))
        if size == current:
            return
        action = self._decisions.take(decisions.CapacityChanged(size, overdue))
        if action.kind is ActionKind.RESIZE:
            raise _Resize
        if action.kind is ActionKind.END_AFTER_STEP:
            limits = timeouts.get()
            self._overdue_at = now + limits.joiner_ready + limits.workers_leave
            threading.Thread(target=self._change, args=(group.actors, size), daemon=True).start()

    def _change(self, actors: list, new_size: int) -> None:
        """Stops workers after a step, once the processes of new workers are ready."""
        current = len(actors)
        ready = new_size < current or self._prepare(current, new_size)
        if self._closed:
            return
        if not ready:
            self._not_before = time.monotonic() + _AGAIN_INTERVAL
        else:
            self._overdue_at = time.monotonic() + timeouts.get().workers_leave
            events.emit(RunEvent(kind=Kind.RESIZED, workers=new_size, before=current))
        if not ready or not graceful_stop.try_stop(actors, RESIZE, "the number of workers is to change"):
            self._decisions.take(decisions.StopNotDelivered())  # a worker is being replaced, or all restart
            self._overdue_at = float("inf")

    def _prepare(self, old_size: int, new_size: int) -> bool:
        """Starts processes on the nodes where Ray would place new workers; returns whether they are ready."""
        if not self._spec.stays:
            return True
        nodes = resources.likely_nodes(self._spec.scaling, new_size - old_size)
        started = [(node, self._spec.start_process(node)) for node in nodes]
        warm_up_job = self._spec.warm_up_job
        requests = [
            actor.execute.remote(entry.warm_up_standby, warm_up_job, new_size, self._spec.cpus) for _, actor in started
        ]
        try:
            answers.collect_answers(requests, timeouts.get().joiner_ready, "the start of a new worker")
        except (RaytfError, RayError) as error:  # its node was lost, or it is too slow
            for _, actor in started:
                ray.kill(actor)
            if not self._closed:
                why = one_line(error)
                events.emit(RunEvent(kind=Kind.RESIZE_DELAYED, workers=new_size, before=old_size, why=why))
            return False
        self._idle.extend(started)
        if self._closed:  # the engine may have ended the idle processes before
            for _, actor in started:
                ray.kill(actor)
        return True
