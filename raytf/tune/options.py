"""How the trials of a sweep are made and compared: checked as it is made, and what a sweep's folder remembers of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from raytf import validation
from raytf.errors import ConfigError
from raytf.tune.learning_rate import Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Options of a sweep; see `raytf.sweep` for those that it takes.

    Args:
        num_samples, metric, mode, max_concurrent_trials, report_every_steps: of `raytf.sweep`.
        scaling: of the learning rate.
        sample: a config of the space, with which the model is tried before the trials.
        space: what each key of it may be, as a text.
        identity: what tells the trainer from another, see `same_run.py`: of its model with `sample`, and its data.

    Raises:
        ConfigError: a value outside its range.
    """

    num_samples: int = 1
    metric: str = "loss"
    mode: str = "min"
    max_concurrent_trials: int | None = None
    report_every_steps: int | None = None
    scaling: Scaling = dataclasses.field(default_factory=Scaling)
    sample: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    space: Mapping[str, str] = dataclasses.field(default_factory=dict)
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        number = self.num_samples
        if isinstance(number, bool) or not isinstance(number, int) or (number < 1 and number != -1):
            raise ConfigError("num_samples must be at least 1, or -1", repr(number), "Choose how many trials to run")
        validation.check_word("mode", self.mode, validation.MODES)
        for name in ("max_concurrent_trials", "report_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or None", value, "Raise it")

    def content(self) -> dict[str, Any]:
        """What the sweep's folder remembers, without what JSON does not have of `sample`."""
        told = {"metric": self.metric, "mode": self.mode, **dataclasses.asdict(self.scaling)}
        sample = {name: value for name, value in self.sample.items() if _is_json(value)}
        told |= {"report_every_steps": self.report_every_steps, "num_samples": self.num_samples}
        return told | {"space": dict(self.space), "identity": dict(self.identity), "sample": sample}

    def check_same(self, content: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError unless these are the options of a sweep that remembers `content`, and is to go on.

        Args:
            content: of the sweep's folder, as far as it is remembered there.
            name: of the sweep.
        """
        mine = {key: value for key, value in self.content().items() if key not in ("sample", "identity")}
        differ = [key for key in mine if key in content and content[key] != mine[key]]
        if differ:
            told = ", ".join(f"{key} {mine[key]!r}, which was {content[key]!r}" for key in differ)
            raise ConfigError(
                "A sweep of a name that exists goes on as it was", f"{name!r} with {told}", "Choose another name"
            )

    def resumed(self, content: Mapping[str, Any]) -> SweepOptions:
        """These options with what is remembered, as `content` made it, in the place of their own.

        Raises:
            ConfigError: it is not what a sweep remembers.
        """
        known = {name: value for name, value in content.items() if name != "num_samples"}
        try:
            scaling = Scaling(**{field.name: known.pop(field.name) for field in dataclasses.fields(Scaling)})
            return dataclasses.replace(self, scaling=scaling, **known)
        except (KeyError, TypeError) as error:
            why = f"settings without {error}" if isinstance(error, KeyError) else f"settings that do not fit: {error}"
            raise ConfigError(
                "A sweep is resumed from what it wrote itself", why, "Bring the sweep's folder back from a copy"
            ) from error


def _is_json(value) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
