"""Ray's list of a run's checkpoints, in the driver's process: keeps the best ones, and validates them. Driver side."""

from __future__ import annotations

import math
from typing import Any

from ray.train import Result

from raytf.compat import ray_train
from raytf.compat.patching import overrides
from raytf.compat.ray_train import CheckpointManager, ReportedCheckpoint, TrainingReport


class _Manager(CheckpointManager):
    """Ray Train's list of checkpoints, outside of its controller."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Ray stores NaN as null, and cannot order None
        for result in (*self.best_checkpoint_results, self.latest_checkpoint_result):
            if result is not None:
                result.metrics.update({name: math.nan for name, value in result.metrics.items() if value is None})

    @overrides(CheckpointManager)
    def _notify(self):
        """Does nothing: no process waits."""


class CheckpointList:
    """The list of a run's checkpoints.

    Args:
        run_config: RunConfig of the run.
        validation: ValidationConfig, or None.
    """

    def __init__(self, run_config, validation=None):
        self._storage = run_config.storage_context
        self._manager = _Manager(run_config.checkpoint_config, self._storage)
        self._list_again = ray_train.tolerate_full_storage(self._manager)
        ray_train.take_numpy(self._manager)
        self._validations = None if validation is None else ray_train.Validations(self._manager, validation)
        self._last_metrics: dict[str, Any] | None = None

    def take(self, reports: list, context) -> None:
        """Registers a `group.Report` of each worker, and calls the user's callbacks with Ray's TrainRunContext."""
        self._last_metrics = reports[0].metrics
        report = next((report for report in reports if report.checkpoint is not None), None)
        if report is not None:
            registered = TrainingReport(
                checkpoint=report.checkpoint, metrics=report.metrics, validation=report.validation
            )
            self._manager.register_checkpoint(registered)
            if self._validations is not None:
                self._validations.add(registered)
        for callback in context.run_config.callbacks or ():
            metrics = [report.metrics for report in reports]
            callback.after_report(run_context=context, metrics=metrics, checkpoint=report and report.checkpoint)

    def tick(self) -> None:
        """Continues the validations."""
        if self._validations is not None:
            self._validations.tick()

    def validates(self) -> bool:
        """Returns whether a checkpoint is still to be validated."""
        return bool(self._manager.get_pending_training_results())

    def answer(self, kind: str) -> Any:
        """Returns the answer to a `run_worker.Request`."""
        return self.last() if kind == "checkpoint" else self.reported()

    def last(self):
        """Returns the last checkpoint, or None."""
        last = self._manager.latest_checkpoint_result
        return None if last is None else last.checkpoint

    def reported(self) -> list[ReportedCheckpoint]:
        """Returns all reported checkpoints that are kept, oldest first."""
        metrics = {result.checkpoint: result.metrics for result in self._manager.best_checkpoint_results}
        return [
            ReportedCheckpoint(checkpoint, metrics[checkpoint], ray_train.status_of(self._manager, checkpoint))
            for checkpoint in ray_train.reported_in_order(self._manager)
            if checkpoint in metrics
        ]

    def result(self, value: Any) -> Result:
        """Returns the run's result with the return value of its loop; waits for the validations."""
        if self._validations is not None:
            self._validations.finish()
        self._list_again()
        result = ray_train.result_of(self._manager, self._storage)
        if result.metrics is None:
            result.metrics = self._last_metrics
        result.return_value = value
        return result

    def close(self) -> None:
        """Cancels validations that still run."""
        if self._validations is not None:
            self._validations.cancel()
