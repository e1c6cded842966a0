"""Checks with some rows that labels fit the model's loss, before any worker starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.compat import keras_objects
from raytf.compat.keras import LossFunctionWrapper, compute_output_spec
from raytf.data.batch_spec import BatchSpec
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError, first_line
from raytf.parallel import model_optimizers

_SPARSE = keras.losses.sparse_categorical_crossentropy
_BINARY = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)
# Rows, and bytes, of labels that are compared at a time.
_MOST_ROWS, _BYTES = 1 << 20, 64 << 20


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


def check_values(model, spec, batches: Iterable, weighted: bool = False) -> None:
    """Raises ConfigError for label values that a loss of Keras cannot use.

    Args:
        model: A compiled and built model.
        spec: Element spec of a batch, see `check_kind`.
        batches: Arrays with the labels of some rows each; not read if no loss has a rule for them.
        weighted: Whether rows have weights, some of which may be 0.
    """
    if not _steps_as_keras(model):
        return
    checks = None
    for labels in batches:
        if checks is None:
            pairs = _of_outputs(model, spec, labels)
            checks = [(path, _check_of(loss, output, weighted)) for loss, path, output in pairs]
        if not any(check for _, check in checks):
            return
        for path, check in checks:
            values = np.asarray(_part(labels, path))
            if check and values.size and np.issubdtype(values.dtype, np.number):
                check(values)


def check_shapes(model, spec) -> None:
    """Raises ConfigError for labels with an axis less than the outputs, which a loss of Keras cannot compare.

    Keras broadcasts both: labels of shape (rows,) pass with outputs of shape (rows, 2) where a step has two rows.

    Args:
        model: A compiled and built model.
        spec: Element spec of a batch, see `check_kind`.
    """
    if not isinstance(spec, tuple) or len(spec) < 2 or not _steps_as_keras(model):
        return
    try:
        labels = tf.nest.map_structure(_example, spec[1])
    except (AttributeError, TypeError):  # lists of different lengths
        return
    for loss, path, output in _of_outputs(model, spec, labels):
        label = _part(labels, path)
        if len(label.shape) == len(output.shape):
            continue
        rows = next(number for number in (2, 4, 8, 16, 32) if number not in (*label.shape[1:], *output.shape[1:]))
        try:
            compute_output_spec(loss, *(keras.KerasTensor((rows, *t.shape[1:]), t.dtype) for t in (label, output)))
        except Exception as error:
            raise ConfigError(
                f"{_name(loss)} compares labels with outputs of their shape",
                f"labels of {_shape(label)} and outputs of {_shape(output)}",
                hint(model, spec) or f"Give labels {_shape(output)}, or the last layer one output",
            ) from error


def hint(model, spec) -> str | None:
    """Returns the loss for one-hot labels or numbers of classes that the other kind of loss has got; else None.

    Args:
        model: A compiled model, built or not.
        spec: Element spec of a batch, see `check_kind`.
    """
    if not isinstance(spec, tuple) or len(spec) < 2 or not _steps_as_keras(model):
        return None
    losses = [loss for loss in tree.flatten(model.loss) if loss is not None]
    specs = [leaf for leaf in tf.nest.flatten(spec[1]) if isinstance(leaf, tf.TensorSpec)]
    for loss, leaf in zip(losses * (len(specs) if len(losses) == 1 else 1), specs, strict=False):
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        name = name.lower().replace("_", "") if _is_kerass(loss) else ""
        numbered = leaf.shape.rank == 1 or (leaf.shape.rank == 2 and leaf.shape[-1] == 1)
        if name.startswith("sparsecategorical") and not numbered:
            return "Use categorical_crossentropy for one-hot labels, or numbers of classes: numpy.argmax(labels, -1)"
        if name.startswith("categorical") and numbered:
            return (
                "Use sparse_categorical_crossentropy for labels that number the classes, or make them one-hot: "
                "keras.utils.to_categorical(labels)"
            )
    return None


def of_rows(dataset: StoredDataset, spec: Any) -> Iterator[Any]:
    """Yields the labels of all rows of a dataset, as arrays of many rows each.

    Args:
        dataset: Rows in this process, or in the object store.
        spec: Parsed columns of the labels.
    """
    batch = BatchSpec(features=spec)
    row_bytes = Feed(dataset, batch, Sampling(global_batch=1, shuffle="none"), shapes_only=True).row_bytes
    rows = int(min(_MOST_ROWS, sum(dataset.rows), max(1, _BYTES / max(1.0, row_bytes))))
    feed = Feed(dataset, batch, Sampling(global_batch=rows, shuffle="none"))
    for step in range(feed.steps):
        values = next(iter(feed.shape.batches(tf.data.Dataset.from_tensors(tuple(feed.span(0, step, 1))), rows)))
        yield dense(values[0] if isinstance(values, tuple) else values)


def dense(nest):
    """Returns the arrays of a structure of tensors; those of lists are their values."""
    array = lambda t: np.asarray(t.values if isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) else t)
    return tf.nest.map_structure(array, nest)


def _check_of(loss, output, weighted: bool) -> Callable[[np.ndarray], None] | None:
    """Returns the check of label values for a loss and its output, or None."""
    if loss.fn is _SPARSE:
        arguments = keras_objects.loss_arguments(loss)
        if arguments.get("axis", -1) != -1:  # classes are not on the last axis
            return None
        return functools.partial(
            _check_classes, _name(loss), count=int(output.shape[-1]), ignored=arguments.get("ignore_class")
        )
    return functools.partial(_check_shares, _name(loss)) if loss.fn in _BINARY and not weighted else None


def _check_classes(name: str, values: np.ndarray, count: int, ignored: int | None) -> None:
    values = values if ignored is None else values[values != ignored]
    if values.dtype.kind == "f" and (wrong := values[values != np.floor(values)]).size:
        raise ConfigError(
            f"{name} takes labels that are whole numbers, the numbers of classes",
            f"a label of {wrong.flat[0]:g}",
            "Use a loss of numbers such as 'mse', or give each class a number",
        )
    if (wrong := values[(values < 0) | (values >= count)]).size:
        worst = wrong.flat[np.argmax(np.abs(wrong))]
        fix = "Number the classes from 0"
        if count == 1:
            fix = "Use binary_crossentropy for 0 and 1, or give the last layer an output for each class"
        elif worst >= count:
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


def _of_outputs(model, spec, labels) -> list[tuple[LossFunctionWrapper, tuple, keras.KerasTensor]]:
    """Returns (loss, path, output) of each output with a loss of Keras, if the labels have the outputs' structure."""
    compiled = keras_objects.compiled_parts(model)[0]
    if compiled is None or not compiled.built:
        return []
    try:
        outputs = compute_output_spec(model, tf.nest.map_structure(_example, spec[0]), training=False)
        tree.assert_same_structure(*map(tree.lists_to_tuples, (outputs, labels)))  # tf.data has tuples for lists
    except Exception:  # the step itself then raises or not
        return []
    pairs = []
    for entry in keras_objects.flat_losses(compiled):
        output, loss = _part(outputs, entry.path), getattr(entry.loss, "loss", entry.loss)  # unwraps raytf's wrapper
        is_kerass = isinstance(loss, LossFunctionWrapper) and _is_kerass(loss.fn)
        if is_kerass and len(getattr(output, "shape", ())) and output.shape[-1] is not None:
            pairs.append((loss, entry.path, output))
    return pairs


def _part(structure, path):
    for key in path:
        structure = structure[key]
    return structure


def _name(loss) -> str:
    return getattr(loss, "name", None) or type(loss).__name__


def _shape(tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape[1:]))
    return f"shape (rows, {sizes})" if sizes else "shape (rows,)"


def _example(leaf):
    return keras.KerasTensor((2, *(size or 1 for size in leaf.shape[1:])), keras.backend.standardize_dtype(leaf.dtype))


def refuse_unknown(error: Exception) -> None:
    """Raises ConfigError if Keras did not find the name of a loss or metric. It looks names up with the first rows.

    Args:
        error: Error of building the model.
    """
    if isinstance(error, ValueError) and (text := first_line(error)).startswith("Could not interpret"):
        raise ConfigError("compile must name losses and metrics that Keras has", text, "Correct the name") from error
