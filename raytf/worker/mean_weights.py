"""The mean of the weights of several models, such as those of a run's last checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raytf.errors import ConfigError


def average_models(models: Iterator):
    """Returns the first model with the mean of the weights of all models. Weights that are no floats stay unchanged.

    Sums are in float64. All weights are averaged, including the moving statistics of BatchNormalization.

    Args:
        models: Iterator of at least one Keras model, all of one kind. Only two of them are in memory at a time.

    Raises:
        ConfigError: The models are of different kinds.
    """
    first = next(models)
    sums = [np.asarray(weight).astype("float64") if _is_float(weight) else None for weight in first.weights]
    count = 1
    for model in models:
        if [tuple(w.shape) for w in model.weights] != [tuple(w.shape) for w in first.weights]:
            raise ConfigError(
                "A mean is that of checkpoints of one model",
                "checkpoints with weights of other shapes",
                "Average fewer checkpoints, all of one model",
            )
        for total, weight in zip(sums, model.weights, strict=True):
            if total is not None:
                total += np.asarray(weight)
        count += 1
    for total, weight in zip(sums, first.weights, strict=True):
        if total is not None:
            weight.assign((total / count).astype(np.asarray(weight).dtype))
    return first


def _is_float(weight) -> bool:
    dtype = np.asarray(weight).dtype
    return np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"  # which is no NumPy dtype
