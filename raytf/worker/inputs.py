"""Checks that features have the types of the inputs that a model declares, before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytf.errors import ConfigError

FIX = "Pass as features=... the columns with which the model was trained"


def pairs(model, features) -> list[tuple[Any, Any]]:
    """Returns (feature, input) for the inputs that a model declares, by name or by position.

    A model without declared inputs has none, and neither has one whose inputs are nested.

    Args:
        model: A Keras model.
        features: Tensors, or their specs: one, a list or a tuple, or a dict by names of inputs.
    """
    inputs = getattr(model, "inputs", None) or []
    if isinstance(features, Mapping):
        return [(features[declared.name], declared) for declared in inputs if declared.name in features]
    given = list(features) if isinstance(features, (list, tuple)) else [features]
    return list(zip(given, inputs, strict=True)) if len(given) == len(inputs) else []


def check_types(model, features, fix: str = FIX) -> None:
    """Raises ConfigError for strings where an input takes numbers, and for numbers where it takes strings.

    Keras casts the symbols of a model without a doubt, and a step then fails.
    """
    for given, declared in pairs(model, features):
        dtype = getattr(given, "dtype", None)
        if dtype is not None and (dtype.name == "string") != (declared.dtype == "string"):
            raise ConfigError(
                "Features must have the type of the model's input",
                f"{dtype.name} for {declared.name!r}, which takes {declared.dtype}",
                fix,
            )
