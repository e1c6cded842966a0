"""Keras 2 in the place of Keras 3: where that is asked for, and whether it is there. Imports neither of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from raytf.errors import ConfigError

VARIABLE = "TF_USE_LEGACY_KERAS"
# Of a process whose `tf.keras` is to be Keras 2; TensorFlow reads it when `tf.keras` is used first.
VARIABLES = {VARIABLE: "1"}


def is_on(environment: Mapping[str, str] | None = None) -> bool:
    """Whether `tf.keras` is Keras 2 in a process with this environment, or in this one: as TensorFlow reads it."""
    return (os.environ if environment is None else environment).get(VARIABLE) in ("1", "true", "True")


def asked(option: bool, *environments: Mapping[str, str]) -> str | None:
    """What asks for Keras 2 in the workers, in a word or two; None where nothing does.

    Args:
        option: `TensorflowConfig.legacy_keras`.
        environments: variables by name; the first that has the variable counts, and then the driver's own.
    """
    if option:
        return "legacy_keras=True"
    for environment in (*environments, os.environ):
        if VARIABLE in environment:
            return f"{VARIABLE}={environment[VARIABLE]}" if is_on(environment) else None
    return None


def refuse(received: str | None) -> None:
    """Raises ConfigError where Keras 2 is asked for and only Keras 3 will do; see `asked`."""
    if received is not None:
        raise ConfigError(
            "A KerasTrainer trains models of Keras 3 only",
            received,
            "Leave that out, or train with raytf.TensorflowTrainer, whose loop may use Keras 2",
        )


def check_installed(received: str, where: str = "") -> None:
    """Raises ConfigError where Keras 2 is not installed.

    Args:
        received: what asked for it.
        where: on which host, as " on host X"; "" for the driver's.
    """
    if importlib.util.find_spec("tf_keras") is None:
        raise ConfigError(
            "Keras 2 is the package tf_keras",
            f"{received}, and no tf_keras{where}",
            "Install it (pip install tf_keras, of TensorFlow's version), or use Keras 3",
        )
