"""Options by which a sweep creates and compares trials: their checks, and their record in a sweep's folder."""

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
    """Options of a sweep; `raytf.sweep` describes its arguments.

    Args:
        num_samples, metric, mode, max_concurrent_trials, report_every_steps: Arguments of `raytf.sweep`.
        scaling: Scaling of the learning rate.
        sample: A config of the space, for a trial step of the model before the trials.
        space: Text description of each key's values.
        identity: Identity of the trainer, see `same_run.py`: of its model with `sample`, and of its data.

    Raises:
        ConfigError: A value is outside its range.
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
        if not isinstance(self.metric, str):
            rule = "metric must be the name of a metric that the trials report"
            raise ConfigError(rule, repr(self.metric), 'For example "loss" or "val_accuracy"')
        validation.check_word("mode", self.mode, validation.MODES)
        for name in ("max_concurrent_trials", "report_every_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, or None", value, "Pass 1 or more, or None")

    def content(self) -> dict[str, Any]:
        """Returns the record for the sweep's folder, without values of `sample` that JSON lacks."""
        record = {"metric": self.metric, "mode": self.mode, **dataclasses.asdict(self.scaling)}
        sample = {name: value for name, value in self.sample.items() if _is_json(value)}
        record |= {"report_every_steps": self.report_every_steps, "num_samples": self.num_samples}
        return record | {"space": dict(self.space), "identity": dict(self.identity), "sample": sample}

    def check_same(self, content: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError unless a sweep with the recorded `content` can resume with these options.

        Args:
            content: Record from the sweep's folder; keys may be missing.
            name: Name of the sweep.
        """
        current = {key: value for key, value in self.content().items() if key not in ("sample", "identity")}
        differ = [key for key in current if key in content and content[key] != current[key]]
        if differ:
            changes = ", ".join(f"{key} {current[key]!r}, which was {content[key]!r}" for key in differ)
            raise ConfigError(
                "A sweep of a name that exists resumes as it was", f"{name!r} with {changes}", "Choose another name"
            )

    def resumed(self, content: Mapping[str, Any]) -> SweepOptions:
        """Returns these options with the values of a record of `content`.

        Raises:
            ConfigError: The record is not one of a sweep.
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
