"""What comes before a training, for `fit`, `plan` and `sweep` alike: place, processes and rows. Driver side."""

from __future__ import annotations

from typing import Any

from ray.train import ScalingConfig

from raytf.data import ingest, streamed
from raytf.runtime import resources
from raytf.runtime.connection import connect
from raytf.runtime.processes import WarmPool


def placed(scaling_config: ScalingConfig, bundles: list[dict[str, float]], *, keep_idle: bool = False) -> ScalingConfig:
    """Connects to the cluster, and gives the ScalingConfig of a run there: processes may have to share cores.

    Args:
        scaling_config: the user's.
        bundles: resources of each of the run's processes.
        keep_idle: see `connect`.
    """
    connect(bundles, keep_idle=keep_idle)
    return resources.sharing(scaling_config, bundles)


def place(trainer) -> ScalingConfig:
    """Gives a KerasTrainer its place in the cluster, and with it the ScalingConfig that it has there.

    Returns:
        The ScalingConfig of what Ray Train runs, which with parameter servers is the coordinator.

    Raises:
        ResourceError: the cluster can never hold the run's processes.
    """

    def processes():
        beside = resources.per_worker(trainer.scaling_config) if trainer.evaluator else None
        return *trainer.servers(), beside

    trainer.scaling_config = placed(trainer.scaling_config, resources.bundles(*processes()))
    resources.check_cluster(trainer.scaling_config)
    inner, servers, beside = processes()
    resources.check_servers(inner, servers, extra=beside)
    return inner


class Prepared:
    """Processes that have been started for a training, and the rows that are read for it: a context that ends both.

    Args:
        processes: that try the model, and may become workers.

    Attributes:
        rows: of each dataset that was read, by name.
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
        """Reads the datasets of a KerasTrainer that has its place.

        Raises:
            ConfigError: see `ingest.read_all`.
        """
        self.rows = ingest.read_all(trainer.datasets, trainer.materialize, trainer.scaling_config, trainer.batch.roles)
        return self.rows
