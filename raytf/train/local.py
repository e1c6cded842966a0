"""Ray's local mode, `ScalingConfig(num_workers=0)`: trains in this process, without workers. Driver side.

Ray's own local mode keeps only the last report. Here the run's folder is as with Ray Train, so that a run can resume
with or without workers. Errors are those of the user's code, as there is no other process to restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.train import Result

from raytf import events
from raytf.compat import ray_configs
from raytf.compat.ray_train import set_train_fn_utils
from raytf.console.quiet import log_levels
from raytf.errors import TrainingError
from raytf.events import RunEvent
from raytf.runtime.processes import Process, WarmPool
from raytf.train.checkpoint_list import CheckpointList
from raytf.train.entry import import_raytf
from raytf.train.group import Report
from raytf.train.run_worker import Channel, RunJob, RunTrainFnUtils


class LocalStartup(WarmPool):
    """Replaces `engine.Startup` for a training in this process: starts one process, which tries the model."""

    def __init__(self, scaling_config, run_config):
        super().__init__(Process, scaling_config, run_config, 1, import_raytf)

    def end_unused(self) -> None:
        """Ends the process, as it cannot become a worker."""
        self._close()


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
    with log_levels({"ray.train": context.run_config.logging_config.log_level}):
        utils, callbacks = None, context.run_config.callbacks or ()
        try:
            channel = _LocalChannel(context, cancelled)
            utils = _Utils(channel, RunJob(function, context, datasets, nodes=("",)))
            set_train_fn_utils(utils)
            value = function()
            utils.finish_reports()
        except Exception as error:
            for callback in callbacks:
                callback.after_exception(run_context=context, worker_exceptions={0: error})
            raise
        finally:
            set_train_fn_utils(None)
            if utils is not None:
                utils.close()
    return channel.list.result(value)


class _LocalChannel(Channel):
    """Takes the training's events in this process.

    Args:
        context: Ray's TrainRunContext.
        cancelled: Returns whether the run is cancelled.
    """

    is_in_driver = True

    def __init__(self, context, cancelled: Callable[[], bool]):
        super().__init__(0, 1, context.run_config.name)
        self._run, self._cancelled = context, cancelled
        self.list = CheckpointList(context.run_config)

    def check(self) -> None:
        if self._cancelled():
            raise TrainingError(None, "it was cancelled")

    def send(self, event) -> None:
        if isinstance(event, Report):
            self.list.take([event], self._run)

    def send_run_event(self, event: RunEvent) -> None:
        events.emit(event)

    def request(self, kind: str, value: Any = None) -> Any:
        return value if kind == "meet" else self.list.answer(kind)


class _Utils(RunTrainFnUtils):
    """Ray Train's functions for the one process."""

    def get_dataset_shard(self, dataset_info):
        name = dataset_info.dataset_name
        if name not in self._trial_setup.datasets:
            raise KeyError(f"The trainer was given no dataset {name!r}. Pass it in datasets={{...}}")
        return ray_configs.with_options(self._trial_setup.datasets[name], self._trial_setup.dataset_config, name)

    def get_preemption_info(self) -> None:
        return None
