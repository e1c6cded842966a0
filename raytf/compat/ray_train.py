"""Private modules, classes and attributes of Ray Train. Imports Ray Train."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train.v2._internal.constants import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,  # Ray's list of a run's checkpoints
    DEFAULT_WORKER_GROUP_START_TIMEOUT_S,  # timeout of a start, as Ray Train reads it
    ENABLE_PRINT_PATCH_ENV_VAR,  # with Ray Train's `print` each line appears twice
    RAY_TRAIN_CALLBACKS_ENV_VAR,  # callbacks of a cluster's administrator
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,  # see the default above
    get_env_vars_to_propagate,  # variables of the driver's environment that Ray Train's workers get
)

# Exceptions that Ray Train raises internally, and handles by type.
from ray.train.v2._internal.exceptions import (
    CheckpointManagerInitializationError,
    CollectiveTimeoutError,
)
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    CheckpointManager,  # maintains the list of checkpoints, for a training without a controller
    _CheckpointManagerState,  # that list as it is stored, read and repaired
    _TrainingResultState,  # an entry of it
)
from ray.train.v2._internal.execution.checkpoint.validation_manager import ValidationManager  # validates as it does
from ray.train.v2._internal.execution.context import (
    TrainRunContext,  # argument of a RunConfig's callbacks
    is_managed_checkpoint,  # whether a checkpoint is in the run's own folder
)
from ray.train.v2._internal.execution.storage import StorageContext, get_fs_and_path  # location of a run's files
from ray.train.v2._internal.execution.train_fn_utils import (
    TrainFnUtils,  # the same for a trial
    get_train_fn_utils,  # which of them are active
    set_train_fn_utils,  # activates them
)
from ray.train.v2._internal.execution.training_report import _TrainingReport  # a report to the CheckpointManager
from ray.train.v2._internal.util import (
    TrainingFramework,  # the name in the dashboard
    construct_train_func,  # a loop with its config and context
    construct_user_exception_with_traceback,  # ends a run from another thread than its loop's
)
from ray.train.v2.api.context import LocalTrainContext  # `ray.train.get_context()` without a controller
from ray.train.v2.api.data_parallel_trainer import (
    DataParallelTrainer,  # the one of Ray Train's second kind, for any settings
)
from ray.train.v2.api.report_config import CheckpointConsistencyMode  # an argument's values
from ray.train.v2.api.reported_checkpoint import ReportedCheckpoint, ReportedCheckpointStatus  # values that a loop gets
from ray.train.v2.api.validation_config import ValidationConfig  # as in Ray Train's second kind

from raytf import logs
from raytf.compat.versions import at_least, uses_private
from raytf.errors import one_line

logger = logs.get_logger(__name__)

__all__ = [
    "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME",
    "DEFAULT_WORKER_GROUP_START_TIMEOUT_S",
    "ENABLE_PRINT_PATCH_ENV_VAR",
    "RAY_TRAIN_CALLBACKS_ENV_VAR",
    "WORKER_GROUP_START_TIMEOUT_S_ENV_VAR",
    "CheckpointConsistencyMode",
    "CheckpointManager",
    "CheckpointManagerInitializationError",
    "CheckpointManagerState",
    "CollectiveTimeoutError",
    "DataParallelTrainer",
    "LocalTrainContext",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "StorageContext",
    "TrainFnUtils",
    "TrainRunContext",
    "TrainingFramework",
    "TrainingReport",
    "TrainingResultState",
    "ValidationConfig",
    "construct_train_func",
    "construct_user_exception_with_traceback",
    "get_env_vars_to_propagate",
    "get_fs_and_path",
    "is_managed_checkpoint",
    "set_train_fn_utils",
]

CheckpointManagerState, TrainingResultState = _CheckpointManagerState, _TrainingResultState
TrainingReport = _TrainingReport

if at_least("ray", 2, 58):
    from ray.train import PreemptionInfo
else:
    from ray.train.v2._internal.execution.preemption import PreemptionInfo  # public since 2.58


# ------------------------------------------------------------------------------------------ reports


def report_later(
    metrics: dict[str, Any], checkpoint_of: Callable[[], tuple[Any, bool]]
) -> concurrent.futures.Future[None]:
    """Reports like `ray.train.report`, in the order of the calls, as soon as a checkpoint exists; does not wait for it.

    The public way, `CheckpointUploadMode.ASYNC`, ends the training if there is no checkpoint in the end. It also makes
    all workers wait for one another. Every worker of a run calls this equally often.

    Args:
        metrics: Metrics by name.
        checkpoint_of: Called in another thread, where it may wait. It returns (a `ray.train.Checkpoint` in the
            folder of the run or None, whether to validate it).

    Returns:
        A future that is done when the driver accepts the next report.
    """
    return get_train_fn_utils().report_later(metrics, checkpoint_of)


def reports_made() -> int:
    """Returns the number of `report_later` calls in this process' training; a replacement worker sets it."""
    return get_train_fn_utils().reports


def report_loss() -> None:
    """Makes the driver check its workers now, as one is lost."""
    get_train_fn_utils().report_loss()


def send_run_event(event: Any) -> None:
    """Sends a `RunEvent` to the driver."""
    get_train_fn_utils().send_run_event(event)


def count_reports(number: int) -> None:
    """Sets the number of reports, for a replacement worker."""
    get_train_fn_utils().reports = number


# ------------------------------------------------------------------------------------------ results


@uses_private(
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._checkpoint_to_report_index"
)
def reported_in_order(manager) -> list:
    """Returns the checkpoints of a CheckpointManager, oldest report first; its public lists are sorted by metric."""
    ranked = sorted(manager._checkpoint_to_report_index.items(), key=lambda item: item[1])
    return [checkpoint for checkpoint, _ in ranked]


@uses_private(
    "ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._write_state_to_storage"
)
def tolerate_full_storage(manager) -> Callable[[], None]:
    """Continues a run whose list of checkpoints cannot be written, as on a full disk: Ray Train would end it.

    The listed checkpoint exists all the same. The list is written again with the next one.

    Returns:
        A function that writes the list again, if it was not written.
    """
    write, unwritten = manager._write_state_to_storage, []

    def tried() -> None:
        was_unwritten, unwritten[:] = bool(unwritten), [True]
        try:
            write()
            unwritten.clear()
        except OSError as error:
            if not was_unwritten:
                logger.warning(
                    f"{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, Ray's list of the run's checkpoints, could not be "
                    f"written: {one_line(error)}. It is retried, and training continues. Free space on the storage, or "
                    "mend it"
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


@uses_private("ray.train.v2._internal.execution.checkpoint.checkpoint_manager:CheckpointManager._get_checkpoint_status")
def status_of(manager, checkpoint) -> ReportedCheckpointStatus:
    """Returns the status of a reported checkpoint; the public list of all is asynchronous."""
    return manager._get_checkpoint_status(checkpoint)


@uses_private(
    "ray.train.v2._internal.execution.checkpoint.validation_manager:ValidationManager._poll_validations",
    "ray.train.v2._internal.execution.checkpoint.validation_manager:ValidationManager._kick_off_validations",
)
class Validations:
    """Validates checkpoints in tasks as Ray Train's controller does; see `ValidationConfig`."""

    def __init__(self, manager, config):
        self._manager = ValidationManager(checkpoint_manager=manager, validation_config=config)

    def add(self, report) -> None:
        """Adds a report, which may request a validation."""
        self._manager.after_report(report, [])

    def tick(self) -> None:
        """Collects results, and starts tasks."""
        self._manager._poll_validations()
        self._manager._kick_off_validations()

    def finish(self) -> None:
        """Blocks until all validations have ended."""
        asyncio.run(self._manager.before_controller_shutdown())

    def cancel(self) -> None:
        """Cancels the tasks that run."""
        self._manager.before_controller_abort()


@uses_private("ray.train.v2.api.result:Result._from_checkpoint_manager")
def result_of(manager, storage):
    """Returns the Result of a run from its CheckpointManager; the public way reads it from the storage again."""
    return ray.train.Result._from_checkpoint_manager(manager, storage)
