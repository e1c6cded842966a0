"""Learning rate scaling by the global batch, and numbers derived from both. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytf import validation
from raytf.errors import ConfigError
from raytf.runtime.topology import per_replica_batch

RULES = (None, "linear", "sqrt")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of `learning_rate`, chosen for `base_batch_size`, to another global batch.

    "linear" keeps the sum of the steps over an epoch (Goyal et al. 2017, arXiv:1706.02677), "sqrt" the variance of a
    step (Krizhevsky 2014, arXiv:1404.5997). In the first `warmup_steps` steps the rate rises linearly from 0.

    Args:
        rule: "linear", "sqrt", or None for no scaling.
        base_batch_size: Rows, at least 1; required with a rule.
        warmup_steps: Number of steps, at least 0.

    Raises:
        ConfigError: A value is outside its range.
    """

    rule: str | None = None
    base_batch_size: int | None = None
    warmup_steps: int = 0

    def __post_init__(self):
        if self.rule not in RULES:
            raise ConfigError("scale_learning_rate must be linear, sqrt or None", repr(self.rule), "Choose one of them")
        if (self.rule is None) != (self.base_batch_size is None):
            raise ConfigError(
                "scale_learning_rate and base_batch_size belong together",
                f"scale_learning_rate={self.rule!r}, base_batch_size={self.base_batch_size!r}",
                "Give both, the second being the batch for which the learning rates of the space are meant, or neither",
            )
        for name, least in (("base_batch_size", 1), ("warmup_steps", 0)):
            if (value := getattr(self, name)) is not None:
                validation.check_whole(name, value, least)

    def rate(self, rate: float, batch_size: int) -> float:
        """Returns the learning rate for a global batch."""
        if self.rule is None:
            return rate
        ratio = batch_size / self.base_batch_size
        return rate * (ratio if self.rule == "linear" else math.sqrt(ratio))


def derived_config(config: Mapping[str, Any], scaling: Scaling, replicas: int, rows: int | None) -> dict[str, Any]:
    """Returns the values derived from a trial's config: `per_replica_batch`, `steps_per_epoch`, `scaled_learning_rate`.

    Args:
        config: Config with `batch_size`, the rows of the global batch, and optionally `learning_rate`.
        scaling: The sweep's scaling.
        replicas: Number of replicas, at least 1.
        rows: Number of training rows, or None if unknown.

    Raises:
        ConfigError: The batch has fewer rows than there are replicas.
    """
    values: dict[str, Any] = {}
    if "batch_size" in config:
        values["per_replica_batch"] = per_replica_batch(config["batch_size"], replicas)[0]
        if rows is not None:
            values["steps_per_epoch"] = -(-rows // config["batch_size"])
    if isinstance(config.get("learning_rate"), (int, float)):
        values["scaled_learning_rate"] = scaling.rate(config["learning_rate"], config.get("batch_size", 1))
    return values
