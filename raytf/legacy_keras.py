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
            "Install it (pip install tf_keras, of TensorFlow's version), or go on with Keras 3",
        )
