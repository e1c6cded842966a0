"""Modules, classes and attributes of Ray Train that are not public. Imports Ray Train."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import ray
import ray.train

# A process that the first run of a cluster waits for, made early.
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train.v2._internal.callbacks import (
    DatasetsCallback,  # a manager of datasets: not needed without any
    placement_group_callback,  # where a helper is started
)
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback  # starts later here
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback  # runs as a thread, not an actor
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback  # what the dashboard shows of a run
from ray.train.v2._internal.constants import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,  # where Ray lists the checkpoints of a run
    DEFAULT_WORKER_GROUP_START_TIMEOUT_S,  # how long a start may take, as Ray Train reads it
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,  # whether the user wants Ray's own watcher
    ENABLE_PRINT_PATCH_ENV_VAR,  # with Ray Train's `print` each line comes twice
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,  # how often the controller polls
    RAY_TRAIN_CALLBACKS_ENV_VAR,  # callbacks of a cluster's keeper
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,  # see the default above
    get_env_vars_to_propagate,  # what Ray Train's workers get of the driver's environment
)

# What Ray Train raises within itself, and treats by its type.
from ray.train.v2._internal.exceptions import (
    CheckpointManagerInitializationError,
    CollectiveTimeoutError,
    WorkerGroupStartupFailedError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback  # hooks around a group of workers
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,  # keeps the list of checkpoints, for a training without a controller
    _CheckpointManagerState,  # that list as it is stored, read and mended
    _TrainingResultState,  # an entry of it
)
from ray.train.v2._internal.execution.context import (
    TrainContext,  # where its logger has its name from
    get_train_context,  # what `ray.train.report` keeps of a worker
    is_managed_checkpoint,  # whether a checkpoint lies in the run's own folder
)
from ray.train.v2._internal.execution.controller import TrainController  # starts before the run is known
from ray.train.v2._internal.execution.controller.state import ShuttingDownState  # whether the run ends, or its group
from ray.train.v2._internal.execution.preemption import PreemptionWatcher  # see PreemptionCallback
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,  # leaves room for what stands beside
    NoopDecision,  # what a policy answers
)
from ray.train.v2._internal.execution.storage import StorageContext, get_fs_and_path  # where a run's files lie
from ray.train.v2._internal.execution.train_fn_utils import (
    LocalTrainFnUtils,  # `ray.train.report` and the others, in a process of one's own
    TrainFnUtils,  # the same for a trial
    get_train_fn_utils,  # which of them are in place
    set_train_fn_utils,  # puts them in place
)
from ray.train.v2._internal.execution.training_report import _TrainingReport  # what is told to the CheckpointManager

# Workers that are processes which started before Ray Train reserved their resources.
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, Worker, WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,  # a group that outlives its workers
    PlacementGroupHandle,  # what a worker group asks of its group
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus  # what the controller hears of a worker
from ray.train.v2._internal.state import state_actor  # where another one is
from ray.train.v2._internal.util import (
    TrainingFramework,  # the name in the dashboard
    construct_train_func,  # a loop with its config and context
    construct_user_exception_with_traceback,  # what ends a run from another thread than that of its loop
    time_monotonic,  # the clock of polls
)
from ray.train.v2.api.context import LocalTrainContext  # `ray.train.get_context()` without a controller
from ray.train.v2.api.data_parallel_trainer import (
    DataParallelTrainer,  # that of Ray Train's second kind, whatever is set
)
from ray.train.v2.api.report_config import CheckpointConsistencyMode  # an argument's values
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus  # what a loop is told
from ray.train.v2.api.validation_config import ValidationConfig  # as Ray Train's second kind knows it

from raytf.compat.versions import at_least, uses
from raytf.errors import in_a_line

__all__ = [
    "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME",
    "DEFAULT_WORKER_GROUP_START_TIMEOUT_S",
    "ENABLE_PREEMPTION_WATCHER_ENV_VAR",
    "ENABLE_PRINT_PATCH_ENV_VAR",
    "HEALTH_CHECK_INTERVAL_S_ENV_VAR",
    "RAY_TRAIN_CALLBACKS_ENV_VAR",
    "WORKER_GROUP_START_TIMEOUT_S_ENV_VAR",
    "CheckpointConsistencyMode",
    "CheckpointManager",
    "CheckpointManagerInitializationError",
    "CheckpointManagerState",
    "CollectiveTimeoutError",
    "DataParallelTrainer",
    "DatasetsCallback",
    "DefaultPlacementGroupHandle",
    "ElasticScalingPolicy",
    "LocalTrainContext",
    "LocalTrainFnUtils",
    "NoopDecision",
    "PlacementGroupCleanerCallback",
    "PlacementGroupHandle",
    "PreemptionCallback",
    "PreemptionInfo",
    "PreemptionWatcher",
    "RayTrainWorker",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "ShuttingDownState",
    "StateManagerCallback",
    "StorageContext",
    "TrainContext",
    "TrainController",
    "TrainFnUtils",
    "TrainingFramework",
    "TrainingReport",
    "TrainingResultState",
    "ValidationConfig",
    "Worker",
    "WorkerGroup",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerStatus",
    "construct_train_func",
    "get_env_vars_to_propagate",
    "get_fs_and_path",
    "get_or_create_autoscaling_coordinator",
    "is_managed_checkpoint",
    "set_train_fn_utils",
    "time_monotonic",
]

CheckpointManagerState, TrainingResultState = _CheckpointManagerState, _TrainingResultState
TrainingReport = _TrainingReport

if at_least("ray", 2, 58):
    from ray.train import PreemptionInfo
else:
    from ray.train.v2._internal.execution.preemption import PreemptionInfo  # public since 2.58


# ------------------------------------------------------------------------------------------ reports


@uses(
    "ray.train.v2._internal.execution.context:TrainContext._wait_then_report",
    "ray.train.v2._internal.execution.context:TrainContext.checkpoint_upload_threadpool",
    "ray.train.v2._internal.execution.context:TrainContext.report_call_index",
)
def report_later(metrics: dict[str, Any], kept: Callable[[], tuple[Any, bool]]) -> concurrent.futures.Future[None]:
    """Reports as `ray.train.report` does, in the order of the calls, once a checkpoint is there; does not wait for it.

    The public way, `CheckpointUploadMode.ASYNC`, ends the training where there is none in the end, and has all workers
    wait for one another. Every worker of a run calls this one as often as the others.

    Args:
        metrics: by name.
        kept: called in another thread, and may wait there; (`ray.train.Checkpoint` in the folder of the run or None,
            whether it is to be validated).

    Returns:
        It is done when the controller takes the next one.
    """
    utils = get_train_fn_utils()
    if isinstance(utils, LocalTrainFnUtils):
        return utils.report_later(metrics, kept)
    context = get_train_context()
    context.report_call_index += 1
    number = context.report_call_index
    count_reports(reports_made() + 1)

    def tell() -> None:
        try:
            checkpoint, validation = kept()
            report = TrainingReport(checkpoint=checkpoint, metrics=metrics, validation=validation)
            context._wait_then_report(report, number)
        except Exception as error:  # in this thread nobody would see it
            failed = construct_user_exception_with_traceback(error)
            context.execution_context.training_thread_runner.get_exception_queue().put(failed)

    return context.checkpoint_upload_threadpool.submit(tell)


def reports_made() -> int:
    """How often `report_later` was called in the training of this process; Ray Train numbers those of a whole run."""
    return vars(get_train_context()).get("_raytf_reports", 0)


@uses("ray.train.v2._internal.execution.worker_group.thread_runner:ThreadRunner.get_error")
def training_error() -> BaseException | None:
    """What the training of this process has failed of; a poll of Ray Train's tells it, and takes a report with it."""
    return get_train_context().execution_context.training_thread_runner.get_error()


@uses("ray.train.v2._internal.execution.worker_group.thread_runner:ThreadRunner._thread")
def training_has_ended(seconds: float) -> bool:
    """Whether the thread that trains in this process has ended, or does so within some seconds."""
    thread = get_train_context().execution_context.training_thread_runner._thread
    if thread is not None:
        thread.join(seconds)
    return thread is None or not thread.is_alive()


@uses("ray.train.v2._internal.execution.context:TrainContext.controller_actor")
def tell_of_loss() -> None:
    """Has the controller look at its workers now, as one of them is lost; Ray Train's own looks from time to time."""
    get_train_context().controller_actor.look.remote()


def count_reports(number: int) -> None:
    """Says how many were made, for a process that takes the place of another's."""
    vars(get_train_context())["_raytf_reports"] = number


# ------------------------------------------------------------------------------------------ results


@uses("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._checkpoint_to_report_index")
def reported_in_order(manager) -> list:
    """The checkpoints of a CheckpointManager, oldest report first; its public lists are by metric."""
    found = sorted(manager._checkpoint_to_report_index.items(), key=lambda item: item[1])
    return [checkpoint for checkpoint, _ in found]


@uses("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._write_state_to_storage")
def outlive_full_storage(manager) -> Callable[[], None]:
    """Has a run go on where the list of its checkpoints cannot be written, as on a full disk: Ray Train would end it,
    though the checkpoint that it lists is there. It is written again with the next one.

    Returns:
        What writes it again, if it was not written.
    """
    write, unwritten = manager._write_state_to_storage, []

    def tried() -> None:
        unwritten[:] = [True]
        try:
            write()
            unwritten.clear()
        except OSError as error:
            warnings.warn(
                f"{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, Ray's list of the run's checkpoints, could not be written, "
                f"and is tried again: {in_a_line(error)}",
                stacklevel=2,
            )

    manager._write_state_to_storage = tried
    return lambda: tried() if unwritten else None


def take_numpy(manager) -> None:
    """Has NumPy's numbers and arrays among reported metrics listed as Python's: of others Ray Train's JSON knows
    nothing, and with a checkpoint beside them the run would end in an error of its serializer."""
    register = manager.register_checkpoint

    def registered(report) -> None:
        of_numpy = {name: v.tolist() for name, v in report.metrics.items() if isinstance(v, (np.generic, np.ndarray))}
        report.metrics = {**report.metrics, **of_numpy}
        register(report)

    manager.register_checkpoint = registered


@uses("ray.train.v2._internal.execution.controller:TrainController._checkpoint_manager")
def manager_of(controller):
    """What knows the checkpoints of a controller's run; its result has them only when the run has ended."""
    return controller._checkpoint_manager


@uses("ray.train.v2.api.result:Result._from_checkpoint_manager")
def result_of(manager, storage):
    """The Result of a run whose checkpoints a CheckpointManager has; the public way reads it from the storage again."""
    return ray.train.Result._from_checkpoint_manager(manager, storage)


# ------------------------------------------------------------------------------------------ the controller's parts


@uses(
    "ray.train.v2._internal.execution.controller:TrainController._latest_poll_time",
    "ray.train.v2._internal.execution.controller:TrainController._health_check_interval_s",
)
def until_poll(controller) -> float:
    """Seconds until a controller polls its workers again, at least 0."""
    return max(0.0, controller._latest_poll_time + controller._health_check_interval_s - time_monotonic())


@uses(
    "ray.train.v2._internal.execution.controller:TrainController._latest_poll_time",
    "ray.train.v2._internal.execution.controller:TrainController._health_check_interval_s",
)
def poll_now(controller) -> None:
    """Has it do so after a millisecond, in which it may see that it was ended."""
    controller._latest_poll_time = time_monotonic() - controller._health_check_interval_s + 1e-3


@uses(
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleaner",
    "ray.train.v2._internal.state.state_actor:TrainStateActor",
    "ray.train.v2._internal.execution.controller.placement_group_cleaner:is_actor_alive",
    "ray.train.v2._internal.state.state_actor:is_actor_alive",
    "ray._private.state:actors",
)
def have_helpers_ask_their_cluster() -> None:
    """Has the processes that Ray Train starts beside a controller, from this process on, ask their own cluster whether
    controllers live.

    They ask the dashboard at the address that their cluster notes. Without a dashboard that is the usual address all
    the same, and the dashboard of another cluster there knows no such controller: the run's resources are taken away
    under it. And where several clusters run on a machine that were started by `ray.init`, they find none.
    """
    for module, name in ((placement_group_callback, "PlacementGroupCleaner"), (state_actor, "TrainStateActor")):
        setattr(module, name, _asking(getattr(module, name)))


def _asking(helper: type) -> type:
    """The same class, in processes that ask Ray's list of actors; as a local class it needs no raytf on the head."""

    class OwnClusterClient(helper):
        def __init__(self, *args, **kwargs):
            def is_actor_alive(actor_id: str, timeout: int) -> bool:
                try:
                    return ray._private.state.actors(actor_id).get("State", "DEAD") != "DEAD"
                except Exception as error:  # what is said is "not known", and it is asked again
                    raise ray.util.state.exception.RayStateApiException(str(error)) from error

            sys.modules[helper.__module__].is_actor_alive = is_actor_alive
            super().__init__(*args, **kwargs)

    OwnClusterClient.__name__, OwnClusterClient.__qualname__ = helper.__name__, helper.__qualname__  # what Ray shows
    return OwnClusterClient


@uses("ray.train.v2._internal.execution.preemption:PreemptionWatcher._stop_event")
def stop(watcher) -> None:
    """Ends a PreemptionWatcher; it is made to end with the actor that Ray Train makes of it."""
    watcher._stop_event.set()


@uses("ray.train.v2._internal.execution.failure_handling.default:DefaultFailurePolicy._worker_group_failures")
def failures_left(policy) -> float:
    """How many failures of workers a run's failure policy still allows; nothing public counts them."""
    most = policy.failure_config.max_failures
    return math.inf if most == -1 else most - getattr(policy, "_worker_group_failures", 0)


@uses("ray.train.v2._internal.execution.failure_handling.default:DefaultFailurePolicy._worker_group_failures")
def count_failure(policy) -> None:
    """Counts one that was healed; `make_decision` counts those for which workers start anew."""
    policy._worker_group_failures += 1


@uses(
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state",
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._world_rank_to_ongoing_poll",
)
def exchange(group, new: Mapping[int, Worker]) -> None:
    """Puts workers into the places of others; Ray Train does so for groups that it manages itself alone."""
    state = group._worker_group_state
    workers = [new.get(rank, worker) for rank, worker in enumerate(state.workers)]
    group._worker_group_state = dataclasses.replace(state, workers=workers)
    for rank in new:
        group._world_rank_to_ongoing_poll.pop(rank, None)


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state")
def take_out(group, actors: Collection) -> None:
    """Takes workers out of a group, which ends all processes that it has when it is shut down."""
    state = group._worker_group_state
    left = [worker for worker in state.workers if worker.actor not in actors]
    group._worker_group_state = dataclasses.replace(state, workers=left)


@uses(
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._init_train_context",
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_context",
)
def give_context(group, workers: list[Worker]) -> None:
    """Gives processes that take the places of others Ray Train's context, as it does at a group's start."""
    group._init_train_context(workers, group.get_worker_group_state().sync_actor)


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_context")
def begin_training(group, worker: Worker) -> None:
    """Starts the loop of a run on one process; see `give_context`."""
    ray.get(worker.actor.run_train_fn.remote(group._worker_group_context.train_fn_ref), timeout=60)


@uses(
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._get_worker_runtime_env",
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._train_run_context",
)
def worker_environment(group) -> dict[str, Any]:
    """The runtime environment of the processes that a worker group starts."""
    return group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env)


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._train_run_context")
def scaling_of(group):
    """The ScalingConfig of a worker group's run."""
    return group._train_run_context.scaling_config


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state")
def group_of(group):
    """The placement group of a worker group that has started."""
    return group._worker_group_state.placement_group_handle.placement_group


@uses(
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy._autoscaling_coordinator",
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy._requester_id",
    since=("ray", 2, 60),
)
def see_nodes(policy) -> None:
    """Has what an ElasticScalingPolicy asks for next be told from the nodes that there are now.

    Ray looks at them every 20 s, and before 2.60 it cannot be told to look.
    """
    if at_least("ray", 2, 60):
        policy._autoscaling_coordinator.get_reserved_resources.remote(policy._requester_id, recompute=True)


def reserved(found: list | dict, without: Collection[str] = ()) -> list[dict[str, float]]:
    """Reserved resources of each node, as an ElasticScalingPolicy is given them: a list before 2.60, then by node.

    Args:
        found: them.
        without: ids of nodes that are left out, where Ray tells of which node each is.
    """
    if not isinstance(found, dict):
        return list(found)
    return [its for node, its in found.items() if node not in without]


def as_reserved(nodes: list[dict[str, float]]) -> list | dict:
    """The same for an ElasticScalingPolicy."""
    return dict(enumerate(nodes)) if at_least("ray", 2, 60) else nodes
