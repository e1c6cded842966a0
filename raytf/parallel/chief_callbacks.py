"""Callbacks that only the chief runs: trackers (W&B, MLflow), and callbacks of `raytf.on_chief`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import keras

from raytf.errors import ConfigError

# Packages whose callbacks log to the one run of a training; by name, so that nothing is imported.
_TRACKERS = ("mlflow", "wandb")
# Attributes for the logging of batches: two of W&B, one of MLflow, and a common name for W&B's.
_FREQUENCIES = ("logging_batch_wise", "log_batch_frequency", "log_every_n_steps", "log_freq")
BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class NoOpCallback(keras.callbacks.Callback):
    """Replaces a callback of the chief on the other workers; does nothing."""


def on_chief(given: keras.callbacks.Callback | Callable) -> keras.callbacks.Callback:
    """Returns a callback that runs on the chief (rank 0) only; on other workers it does nothing.

    Use it for callbacks that write files, send messages, or start a run of an experiment tracker. What the callback
    decides, to stop or a learning rate, holds for all workers. It must not call `fit`, `evaluate` or `predict` of a
    model that several workers train. These wait for all workers. Callbacks of `wandb` and `mlflow`, and those of Keras
    that write or send, always run on the chief only.

    Args:
        given: A Keras callback, or a function without arguments that returns one. The function is called on the chief
            only; put there what must happen once, such as `wandb.init()`.

    Returns:
        A `keras.callbacks.Callback`.

    Raises:
        ConfigError: `given` is neither, or the function returned no callback.

    Example:
        >>> import keras, raytf
        >>> callback = raytf.on_chief(lambda: keras.callbacks.CSVLogger("log.csv"))
    """
    made = given
    if not isinstance(given, keras.callbacks.Callback) and callable(given):
        if not _is_chief():
            return NoOpCallback()
        made = given()
    if not isinstance(made, keras.callbacks.Callback):
        raise ConfigError(
            "raytf.on_chief takes a Keras callback, or a function without arguments that makes one",
            repr(given) if made is given else f"a function that gave {made!r}",
            "Pass raytf.on_chief(callback), or raytf.on_chief(lambda: MyCallback(...))",
        )
    made.raytf_on_chief = True
    return made


def _is_chief() -> bool:
    """Returns whether this process is the chief of its cluster, or the only process."""
    known = json.loads(os.environ.get("TF_CONFIG") or "{}")
    task = known.get("task", {"type": "chief"})
    if task["type"] != "worker":
        return task["type"] == "chief"
    return task["index"] == 0 and "chief" not in known.get("cluster", {})


def is_chiefs(callback) -> bool:
    """Returns whether only the chief runs a callback: it is marked so, or belongs to a tracker."""
    return getattr(callback, "raytf_on_chief", False) or any(map(_of_tracker, type(callback).__mro__))


def tracks_batches(callback) -> bool | None:
    """Returns whether a tracker's callback logs batches; None for other callbacks, and if it has no such setting.

    Trackers' callbacks have batch hooks even if they log epochs; global values for them would cost a collective a step.
    """
    classes = [kind for kind in type(callback).__mro__ if any(hook in vars(kind) for hook in BATCH_HOOKS)]
    if not classes or not _of_tracker(classes[0]):  # a user's subclass has its own hooks
        return None
    settings = [getattr(callback, name) for name in _FREQUENCIES if hasattr(callback, name)]
    return any(value not in (None, False, 0, "epoch") for value in settings) if settings else None


def _of_tracker(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _TRACKERS
