"""The space of a sweep: its checks, the names of schedulers and searches, and its text notation."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from ray import tune
from ray.tune.search import SearchAlgorithm, Searcher
from ray.tune.search.sample import Categorical, Domain, Function, Integer
from ray.tune.search.variant_generator import generate_variants

from raytf.errors import ConfigError
from raytf.tune import schedulers as schedulers_module
from raytf.validation import SCHEDULERS, SEARCHES

# Functions that a text notation of a space may call.
FUNCTIONS = (
    "choice",
    "grid_search",
    "uniform",
    "quniform",
    "loguniform",
    "qloguniform",
    "randn",
    "qrandn",
    "randint",
    "qrandint",
    "lograndint",
    "qlograndint",
)

_CALL = re.compile(rf"\s*(tune\.)?({'|'.join(FUNCTIONS)})\s*\(")


def check_space(space: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the space is a dict with at least one name, each of which can have a value."""
    if not isinstance(space, Mapping) or not space or not all(isinstance(name, str) for name in space):
        raise ConfigError(
            "param_space must be a dict of config keys",
            repr(space),
            'For example {"learning_rate": tune.loguniform(1e-4, 1e-1)}',
        )
    for name, value in space.items():
        if (_is_grid(value) and not value["grid_search"]) or (isinstance(value, Categorical) and not value.categories):
            raise ConfigError(
                "Each key of param_space must have a value", f"{name!r} with none", "Add values to its list"
            )


def numbers(value: Any, name: str) -> list[int]:
    """Returns the smallest and largest, or all, numbers of a key that needs integers of at least 1.

    Raises:
        ConfigError: They are others, or unknown before the trials.
    """
    bounds = key_bounds(value, name)
    if not all(isinstance(n, (int, np.integer)) and n >= 1 for n in bounds):
        rule = f"{name} of a trial must be an integer of at least 1"
        raise ConfigError(rule, bounds, f"Put numbers of {name.removeprefix('num_')} into the space")
    return [int(n) for n in bounds]


def key_bounds(value: Any, name: str) -> list:
    """Returns the smallest and largest, or all, numbers that a key of the space can have.

    Raises:
        ConfigError: They are unknown before the trials.
    """
    if _is_grid(value):
        return list(value["grid_search"])
    if isinstance(value, Categorical):
        return list(value.categories)
    if isinstance(value, Integer):
        return [value.lower, value.upper - 1]
    if isinstance(value, Domain) or callable(value):
        raise ConfigError(
            f"{name} must have known bounds, as resources are planned with them",
            repr(value),
            "Use tune.choice, tune.grid_search or tune.randint",
        )
    return [value]


def list_warning(space: Mapping[str, Any]) -> str | None:
    """Returns the warning about keys whose value is a list, which Ray Tune gives to each trial whole; or None."""
    lists = {name: value for name, value in space.items() if isinstance(value, (list, tuple)) and len(value) > 1}
    if not lists:
        return None
    given = ", ".join(f"{name}={value!r}" for name, value in lists.items())
    name, value = next(iter(lists.items()))
    return (
        f"A list in param_space is one value, the same for each trial: {given}. For a trial with each of its values, "
        f"pass {name}=tune.grid_search({list(value)!r}); a list that is meant belongs to the trainer's config"
    )


def is_listed(value: Any) -> bool:
    """Returns whether all values of a key are written out."""
    return _is_grid(value) or isinstance(value, Categorical)


def _is_grid(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"grid_search"}


def count_trials(space: Mapping[str, Any], num_samples: int) -> int | None:
    """Returns the number of trials: every point of the grid `num_samples` times; None if unlimited."""
    grids = [value["grid_search"] for value in space.values() if _is_grid(value)]
    return None if num_samples < 0 or not space else num_samples * math.prod(len(grid) for grid in grids)


def sample_config(space: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config of the space: the first point of a grid, a draw from each domain."""
    _, drawn = next(generate_variants({"config": dict(space)}))
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in drawn["config"].items()}


def describe_space(space: Mapping[str, Any]) -> dict[str, str]:
    """Returns a text description of each key's values that is equal in every process."""
    return {name: _describe_domain(value) for name, value in space.items()}


def _describe_domain(value: Any) -> str:
    if isinstance(value, Domain) and not isinstance(value, Function):
        return f"{type(value).__name__} {value.domain_str} {type(value.get_sampler()).__name__}"
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return type(value).__name__


def make_scheduler(given: Any, space: Mapping[str, Any], reports: int):
    """Returns Ray's scheduler for a name; returns an object of Ray's unchanged.

    Args:
        given: One of `SCHEDULERS`, a `ray.tune.schedulers.TrialScheduler`, or None.
        space: The space, whose domains Population Based Training mutates.
        reports: Largest number of reports of a trial.

    Raises:
        ConfigError: The name is unknown, "pbt" cannot mutate the space, or an object has a metric of its own.
    """
    from ray.tune import schedulers

    if given is None or given == "fifo":
        return None
    if isinstance(given, schedulers.TrialScheduler) and given.metric is not None:
        raise ConfigError(
            "A sweep passes its scheduler the metric and the mode",
            f"{type(given).__name__}(metric={given.metric!r}, ...)",
            "Leave metric and mode out of the scheduler; sweep(metric=..., mode=...) has them",
        )
    if isinstance(given, schedulers.HyperBandScheduler):
        return schedulers_module.with_fixed_hyperband(given)
    if isinstance(given, schedulers.TrialScheduler):
        return given
    if given == "asha":
        return schedulers.ASHAScheduler(max_t=max(1, reports))
    if given == "hyperband":
        return schedulers_module.HyperBand(max_t=max(1, reports))
    if given == "median":
        return schedulers.MedianStoppingRule()
    if given == "pbt":
        mutated = {name: value for name, value in space.items() if isinstance(value, Domain) and name != "num_workers"}
        if not mutated:
            raise ConfigError(
                'scheduler="pbt" mutates what has a domain in param_space',
                repr(dict(space)),
                "Add tune.loguniform(...)",
            )
        return schedulers.PopulationBasedTraining(
            time_attr="training_iteration", perturbation_interval=max(1, reports // 5), hyperparam_mutations=mutated
        )
    raise ConfigError(
        f"scheduler must be one of {', '.join(SCHEDULERS)}, or a scheduler of ray.tune",
        repr(given),
        "Choose one of these",
    )


def make_search(given: Any):
    """Returns Ray's search algorithm for a name; returns an object of Ray's unchanged.

    Raises:
        ConfigError: The name is unknown, or Optuna is not installed.
    """
    if given is None or given == "random":
        return None
    if given == "optuna":
        try:
            import optuna  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                'search_alg="optuna" needs the package optuna', "an environment without it", "pip install raytf[optuna]"
            ) from error
        from ray.tune.search.optuna import OptunaSearch

        return OptunaSearch()
    if not isinstance(given, (Searcher, SearchAlgorithm)):
        raise ConfigError(
            f"search_alg must be one of {', '.join(SEARCHES)}, or a search algorithm of ray.tune",
            repr(given),
            "Choose one of these",
        )
    return given


def parse_space(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a space from YAML or a command line, such as {"learning_rate": "loguniform(1e-4, 1e-1)"}.

    A text that calls one of `FUNCTIONS` with literal arguments becomes that domain. A list becomes a choice, and
    anything else is a constant. No code runs.

    Raises:
        ConfigError: A text calls another function.
    """
    return {name: _parse(name, value) for name, value in texts.items()}


def _parse(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tune.choice(list(value))
    if not isinstance(value, str):
        return value
    try:
        expression = ast.parse(value.strip(), mode="eval").body
    except SyntaxError as error:
        if _CALL.match(value):
            raise ConfigError(
                "A domain must be a call that is whole",
                f"{name}={value}",
                "For example learning_rate=loguniform(1e-4,1e-1)",
            ) from error
        return value
    if not isinstance(expression, ast.Call):
        try:
            constant = ast.literal_eval(expression)
        except ValueError:
            return value
        return tune.choice(list(constant)) if isinstance(constant, (list, tuple)) else constant
    called = ast.unparse(expression.func).removeprefix("tune.")
    if called not in FUNCTIONS:
        raise ConfigError(
            f"A domain must be a call of one of {', '.join(FUNCTIONS)}", f"{name}={value}", "Use one of these"
        )
    try:
        arguments = [ast.literal_eval(a) for a in expression.args]
        named = {k.arg: ast.literal_eval(k.value) for k in expression.keywords}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"The arguments of {called} must be literal numbers, texts or lists",
            f"{name}={value} ({error})",
            "For example learning_rate=loguniform(1e-4,1e-1)",
        ) from error
    try:
        return getattr(tune, called)(*arguments, **named)
    except (ValueError, TypeError) as error:
        rule, received = f"The arguments of a domain must be those of ray.tune.{called}", f"{name}={value} ({error})"
        raise ConfigError(rule, received, "For example learning_rate=loguniform(1e-4,1e-1)") from error
