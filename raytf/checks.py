"""What can be seen to be wrong with a trainer's arguments before anything runs. Driver side."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import cloudpickle
from ray.train import ScalingConfig

from raytf.errors import ConfigError
from raytf.resources import fewest_workers
from raytf.servers import Plan
from raytf.topology import pick_strategy


def check_pickles(function, name: str, of: str = "config") -> None:
    """Raises ConfigError unless `function` can be called and sent to a worker."""
    if not callable(function):
        raise ConfigError(f"{name} must be a function of {of}", repr(function), "Pass a function")
    try:
        cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(
            f"{name} must be a function that pickles, as it is sent to the workers",
            f"{getattr(function, '__name__', function)!r}: {error}",
            "Create what does not pickle (models, locks, files, connections) inside the function",
        ) from error


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for values of `config` that the trainer itself reads."""
    for name in ("batch_size", "epochs"):
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ConfigError(f"config[{name!r}] must be an integer of at least 1", repr(value), "Change it")
    rate = config.get("learning_rate")
    if isinstance(rate, numbers.Real) and not (math.isfinite(rate) and rate > 0):
        raise ConfigError("config['learning_rate'] must be a finite number above 0", repr(rate), "Change it")


def check_strategy(name: str, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if the strategy does not fit the workers."""
    workers = check_workers(scaling_config)
    devices = int(scaling_config._resources_per_worker_not_none.get("GPU", 0))
    pick_strategy(name, workers=workers, devices=devices, tpu=bool(scaling_config.use_tpu))


def check_workers(scaling_config: ScalingConfig) -> int:
    """`fewest_workers`; raises ConfigError if that is none."""
    workers = fewest_workers(scaling_config)
    if workers < 1:
        raise ConfigError("num_workers must be at least 1", workers, "Use ScalingConfig(num_workers=1) or more")
    return workers


def check_servers(strategy: str, num_ps: int, scaling_config: ScalingConfig) -> None:
    """Raises ConfigError if parameter servers are asked for without their strategy, or the other way round."""
    if isinstance(num_ps, bool) or not isinstance(num_ps, int) or num_ps < 0:
        raise ConfigError("num_ps must be an integer of at least 0", repr(num_ps), "Change it")
    if num_ps and strategy != "parameter_server":
        raise ConfigError(
            "Parameter servers belong to strategy 'parameter_server'",
            f"num_ps={num_ps} with strategy={strategy!r}",
            "Use strategy='parameter_server', or leave num_ps out",
        )
    if strategy == "parameter_server" and not num_ps:
        raise ConfigError("strategy 'parameter_server' needs a parameter server", "num_ps=0", "Use num_ps=1 or more")
    if strategy == "parameter_server" and not isinstance(scaling_config.num_workers, int):
        raise ConfigError(
            "A cluster with parameter servers has a fixed number of workers", scaling_config.num_workers, "Choose one"
        )


def servers(num_ps: int, scaling_config: ScalingConfig, environment: dict) -> tuple[ScalingConfig, Plan | None]:
    """What Ray Train runs, and the servers beside it: with parameter servers, Ray Train has the coordinator alone."""
    if not num_ps:
        return scaling_config, None
    each = dict(scaling_config._resources_per_worker_not_none)
    plan = Plan(num_workers=scaling_config.num_workers, num_ps=num_ps, worker_resources=each, environment=environment)
    return ScalingConfig(num_workers=1, resources_per_worker={"CPU": each.get("CPU", 1)}), plan
