"""Checks of single values: numbers out of range, unknown words. Pure; needs neither Ray nor TensorFlow."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raytf.errors import ConfigError

# Names that a sweep accepts.
SCHEDULERS = ("fifo", "asha", "hyperband", "median", "pbt")
SEARCHES = ("random", "optuna")
MODES = ("min", "max")
# What to do if the loss is NaN or infinite.
NAN_WORDS = ("warn", "stop", "ignore")
# Formats of `--data`, and what to do with images that cannot be decoded.
FORMATS = ("parquet", "csv", "tfrecord", "images")
UNREADABLE = ("refuse", "skip")
# Words in names of metrics whose smaller, or larger, values are better.
_SMALL = "(loss|mae|mse|rmse|msle|mape|error|crossentropy|hinge|divergence|perplexity|wer|cer)"
_LARGE = "(acc|accuracy|auc|precision|recall|f1|f1_score|fbeta_score|iou|io_u|r2|r2_score|dice|ndcg|bleu)"


def is_callback(value: Any) -> bool:
    """Returns whether `value` is a Keras callback, and neither its class nor a function that makes one."""
    return hasattr(value, "on_epoch_end") and not isinstance(value, type)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raises ConfigError unless `value` is an integer of at least `least` and no bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ConfigError(
            f"{name} must be an integer of at least {least}", repr(value), f"Pass an integer, {least} or more"
        )


def is_number(value: Any) -> bool:
    """Returns whether `value` is a real number, of Python or NumPy, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def describe(value: Any) -> str:
    """Returns a value as errors show it: short plain values as they are, others by their type."""
    plain = isinstance(value, (str, bytes, int, float, dict, list, tuple, set, type(None)))
    return repr(value) if plain and len(repr(value)) <= 80 else f"an object of type {_type_name(value)}"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_kind(
    name: str, value: Any, kinds: type | tuple[type, ...], expected: str, fix: str, *, optional: bool = True
) -> None:
    """Raises ConfigError unless `value` is an object of one of `kinds`.

    Args:
        name: Name of the argument.
        value: The user's value.
        kinds: Accepted types.
        expected: These types in words, with an article.
        fix: What to do, as a clause.
        optional: Whether None is accepted, too.
    """
    if not isinstance(value, kinds) and not (optional and value is None):
        raise ConfigError(f"{name} must be {expected}", describe(value), fix)


def check_mapping(name: str, value: Any, example: str) -> None:
    """Raises ConfigError unless `value` is None or a dict."""
    check_kind(name, value, Mapping, "a dict", f"Pass one, such as {example}")


def check_function(name: str, value: Any, example: str, *, optional: bool = True) -> None:
    """Raises ConfigError unless `value` can be called, or is None if that is accepted."""
    check_kind(name, value, Callable, "a function", f"Pass one, such as {example}", optional=optional)


def check_path(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is None, a path or a URI."""
    check_kind(name, value, (str, os.PathLike), "a path or a URI", "Pass one as a text")


def check_flag(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is True or False, of Python or NumPy."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ConfigError(f"{name} must be True or False", describe(value), "Choose one of them")


def check_word(name: str, value: Any, known: Sequence[str | bool]) -> None:
    """Raises ConfigError unless `value` is one of the known words; 1 is not True."""
    if not any(value is word or (isinstance(value, str) and value == word) for word in known):
        raise ConfigError(f"{name} must be one of {', '.join(map(str, known))}", repr(value), "Choose one of these")


def mode_warning(metric: str, mode: str, argument: str = "mode") -> str | None:
    """Returns a warning if the metric's name contradicts `mode`, the value of `argument`, or None."""
    small, large = (re.search(rf"(^|[_/]){words}(_?\d+)?($|[_/])", metric.lower()) for words in (_SMALL, _LARGE))
    if mode == "min" and large and not small:
        doubt = f"larger, and {argument}='min' looks for the smallest: is {argument}='max' meant?"
    elif mode == "max" and small:
        doubt = f"smaller, and {argument}='max' looks for the largest: is {argument}='min' meant?"
    else:
        return None
    return f"{metric!r} is better when it is {doubt}"


def score_warning(checkpoint_config: Any) -> str | None:
    """Returns a warning if a CheckpointConfig of Ray keeps the worst checkpoints by its metric's name, or None."""
    attribute = getattr(checkpoint_config, "checkpoint_score_attribute", None)
    order = getattr(checkpoint_config, "checkpoint_score_order", None)
    return mode_warning(attribute, order, "checkpoint_score_order") if isinstance(attribute, str) else None


def unknown_metric(metric: str, logs: Collection[str], validates: bool) -> tuple[str, str] | None:
    """Returns (the metrics of a model, what to do) if a metric is none of them, else None.

    Args:
        metric: Name of the metric.
        logs: Names that the model reports, with those of a validation.
        validates: Whether there are rows for validation.
    """
    known = [name for name in logs if validates or not name.startswith("val_")]
    if metric in known or metric in ("epoch", "step"):
        return None
    close = difflib.get_close_matches(metric, known, 1)
    fix = f"Did you mean {close[0]!r}?" if close else f"The model reports {', '.join(known)}"
    return ", ".join(known), "Pass datasets['validation'], or --validation" if metric in logs else fix


def check_monitors(callbacks: Sequence, names: Collection[str] | None, validates: bool) -> None:
    """Raises ConfigError if a callback of Keras monitors what the model never reports.

    Of a validation that does not take place Keras itself warns at each epoch.

    Args:
        callbacks: The user's callbacks. Others than Keras' own may add any name to logs; then nothing is checked.
        names: Names that the model reports, with those of a validation; None if unknown.
        validates: Whether there is a validation.
    """
    if names is None or not all(map(adds_no_names, callbacks)):
        return
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        is_used = getattr(callback, "save_best_only", True)
        if not is_used or not isinstance(monitor, str) or monitor in (*names, "learning_rate"):
            continue
        if (unknown := unknown_metric(monitor, names, validates)) is not None:
            known, fix = unknown
            rule = "A callback must monitor a metric that the model reports"
            raise ConfigError(rule, f"{type(callback).__name__}(monitor={monitor!r}); the metrics are {known}", fix)


def adds_no_names(callback: Any) -> bool:
    """Returns whether a callback is Keras' or raytf's own, and calls no function that may add names to logs."""
    kind = type(callback)
    return kind.__module__.partition(".")[0] in ("keras", "raytf") and kind.__name__ != "LambdaCallback"


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for values of `config` that the trainer itself reads."""
    for name in ("batch_size", "epochs"):
        check_whole(f"config[{name!r}]", config[name], 1)
    rate = config.get("learning_rate")
    if isinstance(rate, numbers.Real) and not (math.isfinite(rate) and rate > 0):
        raise ConfigError(
            "config['learning_rate'] must be a finite number above 0",
            repr(rate),
            "Pass a number above 0, such as 0.001",
        )


def check_seed(seed: Any) -> None:
    """Raises ConfigError unless `seed` is an integer from 0 to 2**63 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError("seed must be an integer from 0 to 2**63 - 1", repr(seed), "Pass such an integer, as 0")


def check_num_ps(strategy: str, num_ps: Any) -> None:
    """Raises ConfigError for parameter servers without their strategy, or the strategy without servers."""
    check_whole("num_ps", num_ps, 0)
    if num_ps and strategy != "parameter_server":
        raise ConfigError(
            "Parameter servers belong to strategy 'parameter_server'",
            f"num_ps={num_ps} with strategy={strategy!r}",
            "Use strategy='parameter_server', or leave num_ps out",
        )
    if strategy == "parameter_server" and not num_ps:
        raise ConfigError("strategy 'parameter_server' needs a parameter server", "num_ps=0", "Use num_ps=1 or more")


def check_run_name(name: str | None) -> None:
    """Raises ConfigError for a name whose folder would not be below the storage path."""
    if name is None or (isinstance(name, str) and _is_name(name)):
        return
    raise ConfigError(
        "The name of a run must name a folder below its storage path",
        repr(name),
        "Use a name without '..', '\\' and slashes at its ends",
    )


def _is_name(name: str) -> bool:
    return bool(name.strip()) and not {"", ".", ".."} & set(name.split("/")) and not {"\0", "\\"} & set(name)


_TUNES = "ray.tune.integration"


def check_callbacks(callbacks: Any) -> None:
    """Raises ConfigError for a callback of Ray Tune, which cannot report from a worker: a worker has no trial.

    Args:
        callbacks: Callbacks of `fit`: one, a list that may hold lists, or None.
    """
    candidates = callbacks if isinstance(callbacks, (list, tuple)) else getattr(callbacks, "callbacks", [callbacks])
    for callback in candidates:
        if isinstance(callback, (list, tuple)):
            check_callbacks(callback)
        tune_class = next((kind for kind in type(callback).__mro__ if kind.__module__.startswith(_TUNES)), None)
        if tune_class is not None:
            raise ConfigError(
                "A callback of Ray Tune reports to a trial, and workers run outside of the trial's process",
                f"{tune_class.__module__}.{tune_class.__name__} on a worker",
                "Use raytf.ReportCallback() in a train loop, and after raytf.fit(...) in a trainable call "
                "ray.tune.report({'loss': history.history['loss'][-1]}); KerasTrainer and sweep report by themselves",
            )
