"""Checks with some rows that labels fit the model's loss, before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.compat import keras_objects
from raytf.compat.keras import LossFunctionWrapper, compute_output_spec
from raytf.errors import ConfigError, first_line
from raytf.parallel import model_optimizers

_SPARSE = keras.losses.sparse_categorical_crossentropy
_BINARY = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)


def check_kind(model, spec) -> None:
    """Raises ConfigError for string labels of a Keras loss, and for string weights.

    Args:
        model: A compiled model, built or not.
        spec: Element spec of a batch: features, or a tuple of features, labels and weights.
    """
    if not isinstance(spec, tuple) or len(spec) < 2 or not _steps_as_keras(model) or not _is_kerass(model.loss):
        return
    strings = [any(getattr(t, "dtype", None) == tf.string for t in tf.nest.flatten(part)) for part in spec]
    if any(strings[2:]):
        raise ConfigError(
            "Sample weights must be numbers", "weights that are strings", "Make numbers of them: weights.astype(float)"
        )
    if strings[1]:
        raise ConfigError(
            "Labels must be numbers, as a loss computes with them",
            "labels that are strings",
            "Number the classes from 0, as ds.map_batches or keras.layers.StringLookup in map=... can",
        )


def check_values(model, spec, labels: Any, weighted: bool = False) -> None:
    """Raises ConfigError for label values that a loss of Keras cannot use.

    Args:
        model: A compiled and built model.
        spec: Element spec of a batch, see `check_kind`.
        labels: Arrays with the labels of some rows.
        weighted: Whether rows have weights, some of which may be 0.
    """
    if not _steps_as_keras(model):
        return
    for loss, values, outputs in _of_outputs(model, spec, labels):
        if not isinstance(loss, LossFunctionWrapper) or not np.issubdtype(values.dtype, np.number) or not values.size:
            continue
        name = getattr(loss, "name", None) or type(loss).__name__
        if loss.fn is _SPARSE:
            arguments = keras_objects.loss_arguments(loss)
            ignored = arguments.get("ignore_class")
            if arguments.get("axis", -1) != -1:  # classes are not on the last axis
                continue
            _check_classes(name, values if ignored is None else values[values != ignored], outputs)
        elif loss.fn in _BINARY and not weighted:
            _check_shares(name, values)


def _check_classes(name: str, values: np.ndarray, count: int) -> None:
    if (wrong := values[values != np.floor(values)]).size:
        raise ConfigError(
            f"{name} takes labels that are whole numbers, the numbers of classes",
            f"a label of {wrong.flat[0]:g}",
            "Use a loss of numbers such as 'mse', or give each class a number",
        )
    if (wrong := values[(values < 0) | (values >= count)]).size:
        worst = wrong.flat[np.argmax(np.abs(wrong))]
        fix = "Number the classes from 0"
        if worst >= count:
            fix += f", or give the last layer {int(worst) + 1} outputs"
        raise ConfigError(
            f"{name} takes labels from 0 to {count - 1}, as the model has {count} outputs", f"a label of {worst:g}", fix
        )


def _check_shares(name: str, values: np.ndarray) -> None:
    if (wrong := values[(values < 0) | (values > 1)]).size:
        raise ConfigError(
            f"{name} takes labels from 0 to 1",
            f"a label of {wrong.flat[0]:g}",
            "Use 0 and 1, or sparse_categorical_crossentropy with an output for each class",
        )


def _steps_as_keras(model) -> bool:
    """Returns whether the model uses the train step and loss computation of Keras."""
    overridden = any(
        getattr(type(model), name) is not getattr(keras.Model, name) for name in ("train_step", "compute_loss")
    )
    return not overridden and "train_step" not in vars(model) and model_optimizers.has_call(model)


def _is_kerass(losses) -> bool:
    """Returns whether all losses are names or objects of Keras, none of which accepts strings."""
    flat = [loss for loss in tree.flatten(losses) if loss is not None]
    return bool(flat) and all(
        isinstance(loss, str) or (getattr(loss, "__module__", "") or "").partition(".")[0] == "keras" for loss in flat
    )


def _of_outputs(model, spec, labels) -> Iterator[tuple[Any, np.ndarray, int]]:
    """Returns (loss, labels, number of outputs) for each output, if the labels have the structure of the outputs."""
    compiled = keras_objects.compiled_parts(model)[0]
    if compiled is None or not compiled.built:
        return
    try:
        outputs = compute_output_spec(model, tf.nest.map_structure(_example, spec[0]), training=False)
        tree.assert_same_structure(outputs, labels)
    except Exception:  # the step itself then raises or not
        return
    for entry in keras_objects.flat_losses(compiled):
        y_true, y_pred = labels, outputs
        for key in entry.path:
            y_true, y_pred = y_true[key], y_pred[key]
        if len(getattr(y_pred, "shape", ())) and y_pred.shape[-1] is not None:
            loss = getattr(entry.loss, "loss", entry.loss)  # unwraps raytf's wrapper
            yield loss, np.asarray(y_true), int(y_pred.shape[-1])


def _example(leaf):
    return keras.KerasTensor((2, *(size or 1 for size in leaf.shape[1:])), keras.backend.standardize_dtype(leaf.dtype))


def refuse_unknown(error: Exception) -> None:
    """Raises ConfigError if Keras did not find the name of a loss or metric; it looks names up with the first rows.

    Args:
        error: Error of building the model.
    """
    if isinstance(error, ValueError) and (text := first_line(error)).startswith("Could not interpret"):
        raise ConfigError("compile must name losses and metrics that Keras has", text, "Correct the name") from error
