"""A run's line in the Train tab of Ray's dashboard: the one door to it, which fails softly. Imports Ray Train."""

from __future__ import annotations

import contextlib
import importlib.metadata
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._common.utils import env_bool  # reads it as Ray does
from ray.train.constants import RAY_TRAIN_ENABLE_STATE_TRACKING  # whether the user wants the line
from ray.train.v2._internal.state.state_manager import TrainStateManager  # writes that line
from ray.train.v2._internal.util import TrainingFramework  # its name there

from raytf import logs
from raytf.compat import ray_core
from raytf.compat.versions import uses_private
from raytf.errors import one_line

logger = logs.get_logger(__name__)


@contextlib.contextmanager
def _softly() -> Iterator[None]:
    """Logs an error: a run continues without its line."""
    try:
        yield
    except Exception as error:
        logger.warning(
            f"the run cannot be shown in the Train tab of Ray's dashboard: {one_line(error)}. It continues, and there "
            "is nothing to do"
        )


@uses_private("ray.train.v2._internal.state.state_manager:TrainStateManager._runs")
class TrainTab:
    """The line of a run, with an attempt for each group of workers; nothing without `RAY_TRAIN_ENABLE_STATE_TRACKING`.

    Args:
        context: Ray's TrainRunContext.
        datasets: Names of the datasets.
    """

    def __init__(self, context, datasets: Sequence[str]):
        self._context, self._datasets = context, dict.fromkeys(datasets)
        self._manager: Any = None
        self._attempt = ""
        self._wanted = env_bool(RAY_TRAIN_ENABLE_STATE_TRACKING, False)

    def started(self, workers: Sequence[Mapping[str, Any]], resources: Mapping[str, float]) -> None:
        """Writes that a group trains.

        Args:
            workers: `actor`, `location` and ranks (`world_rank`, `local_rank`, `node_rank`) of each worker.
            resources: Resources of a worker.
        """
        if not self._wanted:
            return
        with _softly():
            run, chief = self._context.run_id, ray_core.id_of(workers[0]["actor"]).hex()
            if self._manager is None:
                self._manager = TrainStateManager()
                self._create(chief)
            self._manager._runs[run].controller_actor_id = chief  # Ray calls a run aborted that has lost it
            self._attempt = uuid.uuid4().hex
            self._manager.create_train_run_attempt(run, self._attempt, len(workers), dict(resources))
            shown = [_shown(worker, dict(resources)) for worker in workers]
            self._manager.update_train_run_attempt_running(run, self._attempt, shown)
            self._manager.update_train_run_running(run)
            self._manager.update_train_run_framework_versions(run, _versions())

    def _create(self, chief: str) -> None:
        context = self._context
        self._manager.create_train_run(
            id=context.run_id,
            name=context.run_config.name,
            job_id=ray.get_runtime_context().get_job_id(),
            controller_actor_id=chief,
            controller_log_file_path="",
            run_config=context.run_config,
            train_loop_config=context.train_loop_config,
            scaling_config=context.scaling_config,
            backend_config=context.backend_config,
            datasets=self._datasets,
            dataset_config=context.dataset_config,
        )

    def ended(self, why: str | None, restarts: bool = False) -> None:
        """Writes that a group has ended: well, or with an error; and the run unless another group starts."""
        if self._manager is None:
            return
        with _softly():
            run = self._context.run_id
            if self._attempt:
                attempt, self._attempt = self._attempt, ""
                if why is None:
                    self._manager.update_train_run_attempt_finished(run, attempt)
                else:
                    self._manager.update_train_run_attempt_errored(run, attempt, why)
            if restarts:
                self._manager.update_train_run_restarting(run)
            elif why is None:
                self._manager.update_train_run_finished(run)
            else:
                self._manager.update_train_run_errored(run, why)


def _shown(worker: Mapping[str, Any], resources: dict[str, float]):
    """Returns a worker in Ray Train's form."""
    process, rank = worker["location"], types.SimpleNamespace(**worker["ranks"])
    metadata = types.SimpleNamespace(node_id=process.node, node_ip=process.host, pid=process.pid, gpu_ids=[])
    return types.SimpleNamespace(
        actor=worker["actor"], distributed_context=rank, metadata=metadata, resources=resources, log_file_path=None
    )


def _versions() -> dict[str, str]:
    versions = {"ray": ray.__version__}
    for module in TrainingFramework.TENSORFLOW.module_names():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[module] = importlib.metadata.version(module)
    return versions
