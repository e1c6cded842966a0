"""A `tf.data.Dataset` to rows: read once, where every reading gives the same rows, or the same in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.compat.tensorflow import functions_of, inputs_of
from raytf.errors import ConfigError, in_a_line

_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset")
_CHANCE = ("RandomDataset", "SampleFromDatasets", "DirectedInterleaveDataset")
_UNKNOWN = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


def rows_of(dataset: tf.data.Dataset, name: str, others: Mapping[str, Any]) -> tuple[tuple, int, bool]:
    """((x, y, sample weights), rows of a batch, whether the dataset shuffles).

    Args:
        dataset: of batches of one size, but for the last.
        name: of it, for sentences.
        others: arguments beside it that a dataset says itself, by name.

    Raises:
        ConfigError: it has no end, gives other rows each time, or holds what arrays cannot.
    """
    if given := [other for other, value in others.items() if value is not None]:
        raise ConfigError(f"{name} is a tf.data.Dataset, which says that itself", ", ".join(given), "Leave it out")
    shuffles = _check_same(dataset, name)
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            f"{name} must be a tf.data.Dataset that ends, as every row comes once an epoch",
            "one that repeats for ever",
            "Leave .repeat() out",
        )
    parts: list[list[np.ndarray]] = []
    sizes = []
    try:
        for batch in dataset:
            flat = tf.nest.flatten(batch)
            parts.append([leaf.numpy() for leaf in flat])
            sizes.append({leaf.shape[0] for leaf in parts[-1]} if all(leaf.shape.rank for leaf in flat) else set())
    except AttributeError:
        raise _refused(name, "ragged or sparse tensors", "Pass arrays") from None
    except tf.errors.OpError as error:
        raise _refused(name, in_a_line(error), "Correct the dataset") from error
    batch = _one_size(sizes, name)
    try:
        whole = [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]
    except ValueError as error:
        raise _refused(name, f"batches of different shapes ({error})", "Pad all rows to one length") from error
    structure = tf.nest.pack_sequence_as(dataset.element_spec, whole)
    return keras.utils.unpack_x_y_sample_weight(structure), batch, shuffles


def _refused(name: str, received: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{name}, a tf.data.Dataset, must give batches that can be sent to workers as rows", received, fix
    )


def _one_size(sizes: list[set], name: str) -> int:
    if not sizes:
        raise ConfigError(f"{name} must hold rows", "an empty tf.data.Dataset", "Check what it is made from")
    if any(len(size) != 1 for size in sizes):
        raise _refused(name, "elements that are no batches", "Use .batch(...)")
    found = [next(iter(size)) for size in sizes]
    if len(set(found[:-1]) | {found[0]}) > 1 or found[-1] > found[0]:
        raise _refused(
            name, f"batches of {', '.join(map(str, sorted(set(found))))} rows", "Use .batch(...) once, at the end"
        )
    return int(found[0])


def _check_same(dataset: tf.data.Dataset, name: str) -> bool:
    """Whether it shuffles; raises ConfigError where two readings may give different rows."""
    kinds = {type(one).__name__.lstrip("_") for one in _all(dataset)}
    operations = {operation for one in _all(dataset) for operation in _operations(one)}
    chance = sorted(k for k in kinds if k in _CHANCE)
    chance += sorted(o for o in operations if o.startswith(("Random", "Stateful")) and not o.startswith("StatefulPart"))
    if chance:
        raise ConfigError(
            f"{name}, a tf.data.Dataset, is read once, so it must give the same rows each time",
            f"chance in it ({', '.join(chance)})",
            "Put random layers (keras.layers.RandomFlip, ...) into the model, or use KerasTrainer(map=...)",
        )
    unknown = sorted(o for o in operations if o in _UNKNOWN)
    if unknown:
        raise ConfigError(
            f"{name}, a tf.data.Dataset, is read once, so it must give the same rows each time",
            "Python code in it (from_generator, py_function), of which that is not known",
            "Pass arrays, or a ray.data.Dataset that maps the code over rows",
        )
    return bool(kinds & set(_SHUFFLES))


def _all(dataset) -> Iterator:
    yield dataset
    for one in inputs_of(dataset):
        yield from _all(one)


def _operations(dataset) -> Iterator[str]:
    """Kinds of the operations in a dataset's functions, and in what these call."""
    for function in functions_of(dataset):
        definition = function.function.graph.as_graph_def(add_shapes=False)
        for node in (*definition.node, *(n for f in definition.library.function for n in f.node_def)):
            yield node.op
