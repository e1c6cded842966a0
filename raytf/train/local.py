"""Ray's local mode, `ScalingConfig(num_workers=0)`: trains in this process, without workers. Driver side.

Ray's own local mode keeps only the last report. Here the run's folder is as with Ray Train, so that a run can resume
with or without workers. Errors are those of the user's code, as there is no other process to restart.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

from ray.train import CheckpointUploadMode, Result

from raytf import timeouts
from raytf.compat import ray_configs, ray_train
from raytf.compat.patching import overrides
from raytf.compat.ray_train import (
    CheckpointManager,
    LocalTrainContext,
    LocalTrainFnUtils,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    TrainingReport,
    is_managed_checkpoint,
    set_train_fn_utils,
)
from raytf.console.quiet import at_levels
from raytf.errors import ConfigError, TrainingError
from raytf.runtime.processes import Process, WarmPool
from raytf.train.entry import import_raytf


class Here(WarmPool):
    """Replaces `startup.Startup` for a training in this process: starts one process, which tries the model.

    Attributes:
        cancelled: Whether the training ends at its next report.
    """

    cancelled = False

    def __init__(self, scaling_config, run_config):
        self.run_config = run_config
        super().__init__(Process, scaling_config, run_config, 1, import_raytf)

    def settle(self) -> None:
        """Ends the process, as it cannot become a worker."""
        super().cancel()

    def cancel(self) -> None:
        self.cancelled = True
        super().cancel()


def run(function: Callable[[], Any], context, datasets: Mapping[str, Any], cancelled: Callable[[], bool]) -> Result:
    """Runs a train loop in this process.

    Args:
        function: The loop, without arguments.
        context: Ray's TrainRunContext, whose run_config names the run.
        datasets: `ray.data.Dataset` by name, or functions that return one.
        cancelled: Returns whether the run is cancelled.

    Raises:
        TrainingError: The run was cancelled.
    """
    with at_levels({"ray.train": context.run_config.logging_config.log_level}):
        utils = None
        try:
            utils = _Utils(context, datasets, cancelled)
            set_train_fn_utils(utils)
            value = function()
            utils.settle()
        except Exception as error:
            for callback in context.run_config.callbacks:
                callback.after_exception(run_context=context, worker_exceptions={0: error})
            raise
        finally:
            set_train_fn_utils(None)
            if utils is not None:
                utils.close()
    return utils.result(value)


class _Manager(CheckpointManager):
    """Ray Train's list of checkpoints, outside of its controller."""

    @overrides(CheckpointManager)
    def _notify(self):
        """Does nothing: no process waits."""


class _Context(LocalTrainContext):
    def __init__(self, name: str, storage):
        super().__init__(experiment_name=name)
        self._storage = storage

    def get_storage(self):
        return self._storage


class _Utils(LocalTrainFnUtils):
    """Ray Train's functions for the one process; stores checkpoints in the run's folder."""

    def __init__(self, context, datasets: Mapping[str, Any], cancelled: Callable[[], bool]):
        super().__init__(experiment_name=context.run_config.name)
        self._run, self._cancelled = context, cancelled
        self._storage = context.run_config.storage_context
        self._context = _Context(context.run_config.name, self._storage)
        self._manager = _Manager(context.run_config.checkpoint_config, self._storage)
        self._list_again = ray_train.outlive_full_storage(self._manager)
        ray_train.take_numpy(self._manager)
        self._datasets = {name: d() if callable(d) else d for name, d in datasets.items()}
        self._later: list[concurrent.futures.Future] = []
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "raytf_reports")

    def report(
        self,
        metrics,
        checkpoint=None,
        checkpoint_dir_name=None,
        checkpoint_upload_mode=CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload=None,
        checkpoint_upload_fn=None,
        validation=False,
    ):
        self._check()
        self.settle()  # reports are in order
        if validation:
            raise ConfigError(
                "With num_workers=0 no process validates checkpoints during the training",
                "report(validation=...)",
                "Validate in the train loop, or use ScalingConfig(num_workers=1)",
            )
        self._last_metrics, kept = metrics, None
        if checkpoint is not None:
            kept = self._persisted(checkpoint, checkpoint_dir_name, checkpoint_upload_mode, checkpoint_upload_fn)
            if delete_local_checkpoint_after_upload and checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                checkpoint.filesystem.delete_dir(checkpoint.path)
        self._tell(metrics, kept)

    def report_later(
        self, metrics: dict[str, Any], kept: Callable[[], tuple[Any, bool]]
    ) -> concurrent.futures.Future[None]:
        """Reports later, as `ray_train.report_later`."""
        self._check()
        self._last_metrics = metrics
        self._later.append(self._thread.submit(lambda: self._tell(metrics, kept()[0])))
        return self._later[-1]

    def settle(self) -> None:
        """Blocks until all later reports are made, and raises the error of one that failed."""
        waiting, self._later = self._later, []
        for report in waiting:
            report.result(timeouts.get().report_taken)

    def close(self) -> None:
        """Ends the thread of later reports."""
        self._thread.shutdown(cancel_futures=True)

    def _check(self) -> None:
        if self._cancelled():
            raise TrainingError(None, "it was cancelled")

    def _tell(self, metrics: dict[str, Any], kept) -> None:
        if kept is not None:
            self._manager.register_checkpoint(TrainingReport(checkpoint=kept, metrics=metrics, validation=False))
        for callback in self._run.run_config.callbacks:
            callback.after_report(run_context=self._run, metrics=[metrics], checkpoint=kept)

    def _persisted(self, checkpoint, name, mode, upload):
        name = name or self._storage.make_default_checkpoint_dir_name()
        if mode is CheckpointUploadMode.NO_UPLOAD:
            kept = checkpoint
        elif upload is not None:
            kept = upload(checkpoint, name)
        else:
            kept = self._storage.persist_current_checkpoint(checkpoint, name)
        if not is_managed_checkpoint(self._storage, kept):
            raise ConfigError(
                "A checkpoint that is reported must lie in the run's folder",
                f"{kept} for the run {self._run.run_config.name!r}",
                "Write it below ray.train.get_context().get_storage().experiment_fs_path",
            )
        return kept

    def get_checkpoint(self):
        last = self._manager.latest_checkpoint_result
        return None if last is None else last.checkpoint

    def get_all_reported_checkpoints(self, *args, **kwargs):
        metrics = {result.checkpoint: result.metrics for result in self._manager.best_checkpoint_results}
        status = ReportedCheckpointStatus.COMMITTED
        return [
            ReportedCheckpoint(checkpoint, metrics[checkpoint], status)
            for checkpoint in ray_train.reported_in_order(self._manager)
            if checkpoint in metrics
        ]

    def get_dataset_shard(self, dataset_info):
        name = dataset_info.dataset_name
        if name not in self._datasets:
            raise KeyError(f"The trainer was given no dataset {name!r}. Pass it in datasets={{...}}")
        dataset, config = self._datasets[name], self._run.dataset_config
        options = ray_configs.execution_options(config, name)
        if options is not None:
            dataset = dataset.copy(dataset)
            dataset.context.execution_options = options
        return dataset

    def result(self, value) -> Result:
        """Returns the run's result with the return value of its loop."""
        self._list_again()
        result = ray_train.result_of(self._manager, self._storage)
        if result.metrics is None:
            result.metrics = self._last_metrics
        result.return_value = value
        return result
