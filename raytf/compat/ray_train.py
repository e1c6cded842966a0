"""Private modules, classes and attributes of Ray Train. Imports Ray Train."""

from __future__ import annotations

import asyncio
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

# A process that the first run of a cluster waits for, started early.
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
from ray.train.v2._internal.callbacks import (
    DatasetsCallback,  # a manager of datasets: not needed without any
    placement_group_callback,  # where a helper is started
)

# starts later in raytf
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback  # runs as a thread, not an actor
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback  # a run in the dashboard
from ray.train.v2._internal.constants import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,  # Ray's list of a run's checkpoints
    DEFAULT_WORKER_GROUP_START_TIMEOUT_S,  # timeout of a start, as Ray Train reads it
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,  # whether the user wants Ray's own watcher
    ENABLE_PRINT_PATCH_ENV_VAR,  # with Ray Train's `print` each line appears twice
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,  # interval of the controller's polls
    RAY_TRAIN_CALLBACKS_ENV_VAR,  # callbacks of a cluster's administrator
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,  # see the default above
    get_env_vars_to_propagate,  # variables of the driver's environment that Ray Train's workers get
)

# Exceptions that Ray Train raises internally, and handles by type.
from ray.train.v2._internal.exceptions import (
    CheckpointManagerInitializationError,
    CollectiveTimeoutError,
    WorkerGroupStartupFailedError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback  # hooks around a group of workers
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,  # maintains the list of checkpoints, for a training without a controller
    _CheckpointManagerState,  # that list as it is stored, read and repaired
    _TrainingResultState,  # an entry of it
)
from ray.train.v2._internal.execution.checkpoint.validation_manager import ValidationManager  # validates as it does
from ray.train.v2._internal.execution.context import (
    TrainContext,  # source of its logger's name
    TrainRunContext,  # argument of a RunConfig's callbacks
    is_managed_checkpoint,  # whether a checkpoint is in the run's own folder
)
from ray.train.v2._internal.execution.controller import TrainController  # starts before the run is known
from ray.train.v2._internal.execution.controller.state import ShuttingDownState  # whether the run ends, or its group
from ray.train.v2._internal.execution.preemption import PreemptionWatcher  # see PreemptionCallback
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,  # leaves room for additional tasks
    NoopDecision,  # a policy's answer
)
from ray.train.v2._internal.execution.storage import StorageContext, get_fs_and_path  # location of a run's files
from ray.train.v2._internal.execution.train_fn_utils import (
    LocalTrainFnUtils,  # `ray.train.report` and the others, in a local process
    TrainFnUtils,  # the same for a trial
    get_train_fn_utils,  # which of them are active
    set_train_fn_utils,  # activates them
)
from ray.train.v2._internal.execution.training_report import _TrainingReport  # a report to the CheckpointManager

# Workers that are processes started before Ray Train reserved their resources.
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, Worker, WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,  # a group that outlives its workers
    PlacementGroupHandle,  # a worker group's interface to its group
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus  # a worker's status for the controller
from ray.train.v2._internal.state import state_actor  # where another helper is
from ray.train.v2._internal.util import (
    TrainingFramework,  # the name in the dashboard
    construct_train_func,  # a loop with its config and context
    construct_user_exception_with_traceback,  # ends a run from another thread than its loop's
    time_monotonic,  # the clock of polls
)
from ray.train.v2.api.context import LocalTrainContext  # `ray.train.get_context()` without a controller
from ray.train.v2.api.data_parallel_trainer import (
    DataParallelTrainer,  # the one of Ray Train's second kind, for any settings
)
from ray.train.v2.api.report_config import CheckpointConsistencyMode  # an argument's values
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus  # values that a loop gets
from ray.train.v2.api.validation_config import ValidationConfig  # as in Ray Train's second kind

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
    "TrainRunContext",
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
    "construct_user_exception_with_traceback",
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


def report_later(metrics: dict[str, Any], kept: Callable[[], tuple[Any, bool]]) -> concurrent.futures.Future[None]:
    """Reports like `ray.train.report`, in the order of the calls, as soon as a checkpoint exists; does not wait for it.

    The public way, `CheckpointUploadMode.ASYNC`, ends the training if there is no checkpoint in the end. It also makes
    all workers wait for one another. Every worker of a run calls this equally often.

    Args:
        metrics: Metrics by name.
        kept: Function that is called in another thread, and may wait there. It returns (a `ray.train.Checkpoint` in the
            folder of the run or None, whether to validate it).

    Returns:
        A future that is done when the driver accepts the next report.
    """
    return get_train_fn_utils().report_later(metrics, kept)


def reports_made() -> int:
    """Returns the number of `report_later` calls in this process' training; a replacement worker sets it."""
    return get_train_fn_utils().reports


def tell_of_loss() -> None:
    """Makes the driver check its workers now, as one is lost."""
    get_train_fn_utils().tell_of_loss()


def count_reports(number: int) -> None:
    """Sets the number of reports, for a replacement worker."""
    get_train_fn_utils().reports = number


# ------------------------------------------------------------------------------------------ results


@uses("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._checkpoint_to_report_index")
def reported_in_order(manager) -> list:
    """Returns the checkpoints of a CheckpointManager, oldest report first; its public lists are sorted by metric."""
    ranked = sorted(manager._checkpoint_to_report_index.items(), key=lambda item: item[1])
    return [checkpoint for checkpoint, _ in ranked]


@uses("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._write_state_to_storage")
def outlive_full_storage(manager) -> Callable[[], None]:
    """Continues a run whose list of checkpoints cannot be written, as on a full disk: Ray Train would end it.

    The listed checkpoint exists all the same. The list is written again with the next one.

    Returns:
        A function that writes the list again, if it was not written.
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
    """Converts NumPy numbers and arrays in reported metrics to Python's, for Ray Train's JSON.

    With a checkpoint and other types, its serializer would end the run.
    """
    register = manager.register_checkpoint

    def registered(report) -> None:
        of_numpy = {name: v.tolist() for name, v in report.metrics.items() if isinstance(v, (np.generic, np.ndarray))}
        report.metrics = {**report.metrics, **of_numpy}
        register(report)

    manager.register_checkpoint = registered


@uses("ray.train.v2._internal.execution.controller:TrainController._checkpoint_manager")
def manager_of(controller):
    """Returns the CheckpointManager of a controller's run; the public result has checkpoints only after the end."""
    return controller._checkpoint_manager


@uses("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._get_checkpoint_status")
def status_of(manager, checkpoint) -> ReportedCheckpointStatus:
    """Returns the status of a reported checkpoint; the public list of all is asynchronous."""
    return manager._get_checkpoint_status(checkpoint)


@uses(
    "ray.train.v2._internal.execution.checkpoint.validation_manager:ValidationManager._poll_validations",
    "ray.train.v2._internal.execution.checkpoint.validation_manager:ValidationManager._kick_off_validations",
)
class Validations:
    """Validates checkpoints in tasks as Ray Train's controller does; see `ValidationConfig`."""

    def __init__(self, manager, config):
        self._manager = ValidationManager(checkpoint_manager=manager, validation_config=config)

    def add(self, report) -> None:
        """Adds a report, which may ask for a validation."""
        self._manager.after_report(report, [])

    def tick(self) -> None:
        """Takes results, and starts tasks."""
        self._manager._poll_validations()
        self._manager._kick_off_validations()

    def finish(self) -> None:
        """Blocks until all validations have ended."""
        asyncio.run(self._manager.before_controller_shutdown())

    def cancel(self) -> None:
        """Cancels the tasks that run."""
        self._manager.before_controller_abort()


@uses("ray.train.v2.api.result:Result._from_checkpoint_manager")
def result_of(manager, storage):
    """Returns the Result of a run from its CheckpointManager; the public way reads it from the storage again."""
    return ray.train.Result._from_checkpoint_manager(manager, storage)


# ------------------------------------------------------------------------------------------ the controller's parts


@uses(
    "ray.train.v2._internal.execution.controller:TrainController._latest_poll_time",
    "ray.train.v2._internal.execution.controller:TrainController._health_check_interval_s",
)
def until_poll(controller) -> float:
    """Returns the seconds until a controller's next poll of its workers, at least 0."""
    return max(0.0, controller._latest_poll_time + controller._health_check_interval_s - time_monotonic())


@uses(
    "ray.train.v2._internal.execution.controller:TrainController._latest_poll_time",
    "ray.train.v2._internal.execution.controller:TrainController._health_check_interval_s",
)
def poll_now(controller) -> None:
    """Makes a controller poll after 1 ms, in which it can process an end."""
    controller._latest_poll_time = time_monotonic() - controller._health_check_interval_s + 1e-3


@uses(
    "ray.train.v2._internal.callbacks.placement_group_callback:PlacementGroupCleaner",
    "ray.train.v2._internal.state.state_actor:TrainStateActor",
    "ray.train.v2._internal.execution.controller.placement_group_cleaner:is_actor_alive",
    "ray.train.v2._internal.state.state_actor:is_actor_alive",
    "ray._private.state:actors",
)
def have_helpers_ask_their_cluster() -> None:
    """Makes Ray Train's helper processes check in their own cluster, from now on, whether controllers live.

    They use the dashboard at the address that their cluster stores. Without a dashboard that is still the usual
    address. The dashboard of another cluster there does not have such a controller, so a helper releases the run's
    resources. With several clusters of `ray.init` on a machine, they find none.
    """
    for module, name in ((placement_group_callback, "PlacementGroupCleaner"), (state_actor, "TrainStateActor")):
        setattr(module, name, _asking(getattr(module, name)))


def _asking(helper: type) -> type:
    """Returns a subclass that reads Ray's list of actors; as a local class it needs no raytf on the head."""

    class OwnClusterClient(helper):
        def __init__(self, *args, **kwargs):
            def is_actor_alive(actor_id: str, timeout: int) -> bool:
                try:
                    return ray._private.state.actors(actor_id).get("State", "DEAD") != "DEAD"
                except Exception as error:  # means "unknown", so that the helper tries again
                    raise ray.util.state.exception.RayStateApiException(str(error)) from error

            sys.modules[helper.__module__].is_actor_alive = is_actor_alive
            super().__init__(*args, **kwargs)

    # the name that Ray shows
    OwnClusterClient.__name__, OwnClusterClient.__qualname__ = helper.__name__, helper.__qualname__
    return OwnClusterClient


@uses("ray.train.v2._internal.execution.preemption:PreemptionWatcher._stop_event")
def stop(watcher) -> None:
    """Ends a PreemptionWatcher, which is meant to end with its actor in Ray Train; no public API."""
    watcher._stop_event.set()


@uses("ray.train.v2._internal.execution.failure_handling.default:DefaultFailurePolicy._worker_group_failures")
def failures_left(policy) -> float:
    """Returns how many more failures of workers a run's failure policy allows; no public API counts them."""
    most = policy.failure_config.max_failures
    return math.inf if most == -1 else most - getattr(policy, "_worker_group_failures", 0)


@uses("ray.train.v2._internal.execution.failure_handling.default:DefaultFailurePolicy._worker_group_failures")
def count_failure(policy) -> None:
    """Counts a failure that was recovered; `make_decision` counts those for which workers restart."""
    policy._worker_group_failures += 1


@uses(
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state",
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._world_rank_to_ongoing_poll",
)
def exchange(group, new: Mapping[int, Worker]) -> None:
    """Replaces workers of a group; Ray Train does so only for groups that it manages itself."""
    state = group._worker_group_state
    workers = [new.get(rank, worker) for rank, worker in enumerate(state.workers)]
    group._worker_group_state = dataclasses.replace(state, workers=workers)
    for rank in new:
        group._world_rank_to_ongoing_poll.pop(rank, None)


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state")
def take_out(group, actors: Collection) -> None:
    """Removes workers from a group, which ends all its processes at its shutdown."""
    state = group._worker_group_state
    remaining = [worker for worker in state.workers if worker.actor not in actors]
    group._worker_group_state = dataclasses.replace(state, workers=remaining)


@uses(
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._init_train_context",
    "ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_context",
)
def give_context(group, workers: list[Worker]) -> None:
    """Initializes Ray Train's context in replacement workers, as at a group's start."""
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
    """Returns the runtime environment of a worker group's processes."""
    return group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env)


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._train_run_context")
def scaling_of(group):
    """Returns the ScalingConfig of a worker group's run."""
    return group._train_run_context.scaling_config


@uses("ray.train.v2._internal.execution.worker_group.worker_group:WorkerGroup._worker_group_state")
def group_of(group):
    """Returns the placement group of a started worker group."""
    return group._worker_group_state.placement_group_handle.placement_group


@uses(
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy._autoscaling_coordinator",
    "ray.train.v2._internal.execution.scaling_policy.elastic:ElasticScalingPolicy._requester_id",
    since=("ray", 2, 60),
)
def see_nodes(policy) -> None:
    """Updates the reserved resources of an ElasticScalingPolicy to the current nodes.

    Ray updates them every 20 s, and has no request for it before 2.60.
    """
    if at_least("ray", 2, 60):
        policy._autoscaling_coordinator.get_reserved_resources.remote(policy._requester_id, recompute=True)


def reserved(found: list | dict, without: Collection[str] = ()) -> list[dict[str, float]]:
    """Returns reserved resources of each node, as an ElasticScalingPolicy gets them: a list before 2.60, later by node.

    Args:
        found: Reserved resources from Ray.
        without: Ids of nodes to omit, if Ray gives node ids.
    """
    if not isinstance(found, dict):
        return list(found)
    return [resources for node, resources in found.items() if node not in without]


def as_reserved(nodes: list[dict[str, float]]) -> list | dict:
    """Converts nodes' resources to the reserved resources of an ElasticScalingPolicy."""
    return dict(enumerate(nodes)) if at_least("ray", 2, 60) else nodes
