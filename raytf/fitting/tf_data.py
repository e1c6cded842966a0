"""Reads the rows of a `tf.data.Dataset` once, if every reading gives the same rows in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.compat.tensorflow import dropping_batch, inputs_of, reshuffles
from raytf.data.dataset_graph import draws, is_unknown, kind, operations
from raytf.errors import ConfigError, one_line

_CHANCE = ("RandomDataset", "SampleFromDatasets", "DirectedInterleaveDataset")
# Operations that give the same rows for any order of their input.
_PASSING = {
    *("MapDataset", "ParallelMapDataset", "FilterDataset", "FlatMapDataset", "PrefetchDataset", "OptionsDataset"),
    *("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset", "UnbatchDataset"),
    *("ConcatenateDataset", "RepeatDataset", "ShuffleDataset", "CacheDataset", "RestructuredDataset"),
    *("InterleaveDataset", "ParallelInterleaveDataset", "VariantDataset", "AssertCardinalityDataset"),
    *("IgnoreErrorsDataset", "DenseToRaggedDataset", "DenseToSparseBatchDataset", "UniqueDataset"),
}
# Operations allowed after `cache`, which keeps an order only if it is read to its end.
_READING_ALL = _PASSING | {"SkipDataset"}


@dataclass(frozen=True)
class DatasetContent:
    """The content of a dataset.

    Args:
        parts: (x, y, sample weights).
        batch: Rows of a batch.
        shuffles: Whether each epoch has another order.
        drops: Whether each epoch drops a smaller last batch, of other rows each time.
    """

    parts: tuple
    batch: int
    shuffles: bool = False
    drops: bool = False


def rows_of(dataset: tf.data.Dataset, name: str, others: Mapping[str, Any], reads_once: bool = False) -> DatasetContent:
    """Reads the rows of a dataset.

    Args:
        dataset: A dataset of batches of one size, except the last.
        name: Its name, for messages.
        others: Further arguments by name that the dataset itself defines.
        reads_once: Whether Keras would read it once, too: then this reading counts, in its order.

    Raises:
        ConfigError: It is infinite, gives other rows each time, or holds types without array form.
    """
    if given := [argument for argument, value in others.items() if value is not None]:
        raise ConfigError(f"{name} is a tf.data.Dataset, which defines these", ", ".join(given), "Leave them out")
    shuffles = not reads_once and _check_same(dataset, name)
    dataset, drops = _with_last_batch(dataset) if shuffles else (dataset, None)
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            f"{name} must be a tf.data.Dataset that ends, as every row comes once an epoch",
            "one that repeats for ever",
            "Leave .repeat() out, or pass raytf.TFData(make_dataset, steps_per_epoch=...)",
        )
    parts: list[list[np.ndarray]] = []
    sizes = []
    try:
        for batch in dataset:
            flat = tf.nest.flatten(batch)
            parts.append([leaf.numpy() for leaf in flat])
            sizes.append({leaf.shape[0] for leaf in parts[-1]} if all(leaf.shape.rank for leaf in flat) else set())
    except AttributeError:
        raise _refused_error(name, "ragged or sparse tensors", "Pass arrays") from None
    except tf.errors.OpError as error:
        raise _refused_error(name, one_line(error), "Correct the dataset") from error
    size = _one_size(sizes, name)
    if drops is not None and size < drops:
        raise _refused_error(name, f"{size} rows, of which drop_remainder=True leaves none", "Use a smaller batch")
    try:
        whole = [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]
    except ValueError as error:
        raise _refused_error(name, f"batches of different shapes ({error})", "Pad all rows to one length") from error
    structure = tf.nest.pack_sequence_as(dataset.element_spec, whole)
    return DatasetContent(keras.utils.unpack_x_y_sample_weight(structure), size, shuffles, drops is not None)


def _refused_error(name: str, received: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{name}, a tf.data.Dataset, must give batches that can be sent to workers as rows", received, fix
    )


def _one_size(sizes: list[set], name: str) -> int:
    if not sizes:
        raise ConfigError(f"{name} must hold rows", "an empty tf.data.Dataset", "Check what it is made from")
    if any(len(size) != 1 for size in sizes):
        raise _refused_error(name, "elements that are no batches", "Use .batch(...)")
    counts = [next(iter(size)) for size in sizes]
    if len(set(counts[:-1]) | {counts[0]}) > 1 or counts[-1] > counts[0]:
        raise _refused_error(
            name, f"batches of {', '.join(map(str, sorted(set(counts))))} rows", "Use .batch(...) once, at the end"
        )
    return int(counts[0])


def _check_same(dataset, name: str) -> bool:
    """Returns whether readings differ in their order.

    Raises:
        ConfigError: Two readings may give different rows.
    """
    layers = list(_repeated_layers(dataset, ()))
    operation_kinds = {operation for layer, _ in layers for operation in operations(layer)}
    kinds = {kind(layer) for layer, _ in layers}
    chance = sorted(k for k in kinds if k in _CHANCE)
    chance += sorted(o for o in operation_kinds if draws(o))
    rule = f"{name}, a tf.data.Dataset, is read once, so it must give the same rows each time"
    if chance:
        raise ConfigError(
            rule,
            f"chance in it ({', '.join(chance)})",
            "Put random layers (keras.layers.RandomFlip, ...) into the model, or pass raytf.TFData(make_dataset)",
        )
    if any(map(is_unknown, operation_kinds | kinds)):
        raise ConfigError(
            rule,
            "Python code in it (from_generator, py_function), of which that is not known",
            "Pass raytf.TFData(make_dataset); or .cache() it, which keeps what one reading gives",
        )
    shuffles = [later_layers for layer, later_layers in layers if reshuffles(layer)]
    refused = {kind(layer) for later_layers in shuffles for layer in later_layers if kind(layer) not in _PASSING}
    refused |= {
        "a batch that drops the remainder, not at the end" for later_layers in shuffles if _drops_within(later_layers)
    }
    if refused:
        raise ConfigError(
            rule,
            f"a shuffle that gives other rows to {', '.join(sorted(refused))} each time",
            "Put .shuffle(...) after it, before .batch(...); or shuffle(..., reshuffle_each_iteration=False), which "
            "takes the same rows in each epoch",
        )
    return bool(shuffles)


def _repeated_layers(dataset, later_layers: tuple) -> Iterator[tuple]:
    """Yields each dataset that is read again in each epoch, with those after it."""
    yield dataset, later_layers
    if kind(dataset) == "CacheDataset" and all(kind(source) in _READING_ALL for source in later_layers):
        return
    for source in inputs_of(dataset):
        yield from _repeated_layers(source, (*later_layers, dataset))


def _drops_within(later_layers: tuple) -> bool:
    """Returns whether a batch drops rows where `_with_last_batch` does not check it; the last dataset is first."""
    dropping = [i for i, layer in enumerate(later_layers) if dropping_batch(layer) is not None]
    if not dropping:
        return False
    first = dropping[0]
    padded = kind(later_layers[first]) == "PaddedBatchDataset"
    return len(dropping) > 1 or padded or any(kind(layer) not in _LAST for layer in later_layers[:first])


_LAST = ("PrefetchDataset", "OptionsDataset")


def _with_last_batch(dataset) -> tuple[tf.data.Dataset, int | None]:
    """Returns a dataset with the last batch that it drops, and the size of a batch if it drops any."""
    batch = dataset
    while kind(batch) in _LAST:
        (batch,) = inputs_of(batch)
    size = dropping_batch(batch)
    if size is None:
        return dataset, None
    (rows,) = inputs_of(batch)
    return rows.batch(size), size
