"""Ray Train's backend for TensorFlow: addresses, ports and TF_CONFIG for each worker, at every (re)start."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from raytf import ports, settings
from raytf.settings import Settings
from raytf.topology import tf_config


@dataclass(frozen=True, kw_only=True)
class TensorflowConfig(Settings, BackendConfig):
    __doc__ = Settings.__doc__

    @property
    def backend_cls(self):
        return TensorflowBackend

    @property
    def train_func_context(self):
        return functools.partial(_worker_context, self)

    def to_dict(self) -> dict[str, Any]:
        hidden = ("feed", "servers", "tpu")
        return {k: v for k, v in vars(self).items() if k not in hidden}


class TensorflowBackend(Backend):
    """Gives every worker an address of its own and tells it those of all."""

    def on_start(self, worker_group, backend_config: TensorflowConfig):
        addresses = worker_group.execute(ports.reserve_address)
        resources = worker_group.get_resources_per_worker()
        cpus = max(1, int(resources.get("CPU", 1)))
        ray.get(
            [
                worker_group.execute_single_async(i, set_environment, backend_config, addresses, i, cpus)
                for i in range(len(addresses))
            ]
        )


@contextlib.contextmanager
def _worker_context(config: TensorflowConfig):
    from raytf.keras_import import import_keras

    import_keras()
    from raytf import strategy  # imports TensorFlow, so on a worker only

    with strategy.prepared(config):
        yield


# ------------------------------------------------------------------------------------------ on the worker


def set_environment(config: TensorflowConfig, addresses: list[str], rank: int, cpus: int) -> None:
    """Writes what TensorFlow reads from the environment; runs before TensorFlow is imported."""
    os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    intra_op, inter_op = config.intra_op_threads or cpus, config.inter_op_threads or max(2, cpus)
    os.environ.update(settings.variables(intra_op, inter_op, config.memory_growth))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
