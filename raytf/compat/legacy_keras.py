"""Keras 2 instead of Keras 3: whether it is requested, and installed. Imports neither of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from raytf.errors import ConfigError

VARIABLE = "TF_USE_LEGACY_KERAS"
# Environment of a process whose `tf.keras` is Keras 2; TensorFlow reads it at the first use of `tf.keras`.
VARIABLES = {VARIABLE: "1"}


def is_enabled(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether `tf.keras` is Keras 2 with this environment, or in this process: as TensorFlow reads it."""
    return (os.environ if environment is None else environment).get(VARIABLE) in ("1", "true", "True")


def requesting_option(option: bool, *environments: Mapping[str, str]) -> str | None:
    """Returns the setting that requests Keras 2 in the workers, in a word or two, or None.

    Args:
        option: `TensorflowConfig.legacy_keras`.
        environments: Variables by name; the first one with the variable counts, then the driver's own.
    """
    if option:
        return "legacy_keras=True"
    for environment in (*environments, os.environ):
        if VARIABLE in environment:
            return f"{VARIABLE}={environment[VARIABLE]}" if is_enabled(environment) else None
    return None


def refuse_keras_2(received: str | None) -> None:
    """Raises ConfigError if Keras 2 is requested for a feature of Keras 3 only; see `requesting_option`."""
    if received is not None:
        raise ConfigError(
            "A KerasTrainer trains models of Keras 3 only",
            received,
            "Leave that out, or train with raytf.TensorflowTrainer, whose loop may use Keras 2",
        )


def check_installed(received: str, location: str = "") -> None:
    """Raises ConfigError if Keras 2 is not installed.

    Args:
        received: Setting that requests it.
        location: Host, as " on host X"; "" for the driver's.
    """
    if importlib.util.find_spec("tf_keras") is None:
        raise ConfigError(
            "Keras 2 is the package tf_keras",
            f"{received}, and no tf_keras{location}",
            "Install it (pip install tf_keras, of TensorFlow's version), or use Keras 3",
        )
