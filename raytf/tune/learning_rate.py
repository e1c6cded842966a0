"""How a learning rate follows the global batch, and the numbers that follow from both. Pure."""

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
    """How `learning_rate`, chosen for `base_batch_size`, becomes that of another global batch.

    "linear" keeps the sum of the steps over an epoch (Goyal et al. 2017, arXiv:1706.02677), "sqrt" the variance of a
    step (Krizhevsky 2014, arXiv:1404.5997); the first `warmup_steps` steps rise to the rate from 0 in equal parts.

    Args:
        rule: "linear", "sqrt", or None, which leaves the rate as it is.
        base_batch_size: rows, at least 1; needed with a rule.
        warmup_steps: at least 0.

    Raises:
        ConfigError: a value outside its range.
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
        """The learning rate for a global batch."""
        if self.rule is None:
            return rate
        ratio = batch_size / self.base_batch_size
        return rate * (ratio if self.rule == "linear" else math.sqrt(ratio))


def derived(config: Mapping[str, Any], scaling: Scaling, workers: int, rows: int | None) -> dict[str, Any]:
    """What follows from a trial's config: `per_replica_batch`, `steps_per_epoch` and `scaled_learning_rate`.

    Args:
        config: with `batch_size`, rows of the global batch, and maybe `learning_rate`.
        scaling: of the sweep.
        workers: number of workers, one replica each.
        rows: of the training data, or None where they are not known.

    Raises:
        ConfigError: the batch has fewer rows than there are workers.
    """
    found: dict[str, Any] = {}
    if "batch_size" in config:
        found["per_replica_batch"] = per_replica_batch(config["batch_size"], workers)[0]
        if rows is not None:
            found["steps_per_epoch"] = -(-rows // config["batch_size"])
    if isinstance(config.get("learning_rate"), (int, float)):
        found["scaled_learning_rate"] = scaling.rate(config["learning_rate"], config.get("batch_size", 1))
    return found
