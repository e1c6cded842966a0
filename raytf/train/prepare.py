"""Prepares a training for `fit`, `plan` and `sweep`: connection, processes and rows. Driver side."""

from __future__ import annotations

from typing import Any

from ray.train import ScalingConfig

from raytf.data import ingest, streamed
from raytf.runtime import resources
from raytf.runtime.connection import connect
from raytf.runtime.processes import WarmPool


def placed(
    scaling_config: ScalingConfig,
    bundles: list[dict[str, float]],
    network: str | None = None,
    *,
    keep_idle: bool = False,
) -> ScalingConfig:
    """Connects to the cluster. Returns the ScalingConfig of a run there, as processes may have to share cores.

    Args:
        scaling_config: The user's ScalingConfig.
        bundles: Resources of each of the run's processes.
        network: `TensorflowConfig.network`.
        keep_idle: As in `connect`.

    Raises:
        ConfigError: A node that fits a worker is not in the network.
    """
    connect(bundles, keep_idle=keep_idle)
    scaling_config = resources.describe_sharing(scaling_config, bundles)
    if network is not None:
        resources.interfaces(scaling_config, network)
    return scaling_config


def place_workers(trainer) -> ScalingConfig:
    """Connects a KerasTrainer to the cluster, and sets its ScalingConfig there.

    Returns:
        The ScalingConfig of the workers; with parameter servers, the coordinator's.

    Raises:
        ResourceError: The cluster can never run the processes of the run.
    """

    def processes():
        evaluator = resources.resources_per_worker(trainer.scaling_config) if trainer.evaluator else None
        return *trainer._servers(), evaluator

    network = trainer.tensorflow_config.network
    trainer.scaling_config = placed(trainer.scaling_config, resources.run_bundles(*processes()), network)
    resources.check_cluster(trainer.scaling_config)
    inner, servers, evaluator = processes()
    resources.check_servers(inner, servers, extra=evaluator)
    return inner


class Prepared:
    """Context with the processes and rows of a training; releases both at its end.

    Args:
        processes: Processes that try the model, and may become workers.

    Attributes:
        rows: Rows of each dataset that was read, by name.
    """

    def __init__(self, processes: WarmPool):
        self.processes = processes
        self.rows: dict[str, Any] = {}

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.processes.cancel()  # first: they may be reading
        finally:
            streamed.close(self.rows)

    def read(self, trainer) -> dict[str, Any]:
        """Reads the datasets of a KerasTrainer after `place_workers`. Returns their rows by name.

        Raises:
            ConfigError: As in `ingest.read_all`.
        """
        self.rows = ingest.read_all(trainer.datasets, trainer.materialize, trainer.scaling_config, trainer.batch.roles)
        return self.rows
