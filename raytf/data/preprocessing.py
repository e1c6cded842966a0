"""`raytf.adapt`: fits Keras' preprocessing layers to a Ray Dataset that need not fit in memory.

Tasks reduce each block to statistics. For a mean and a variance Keras gets two rows that have those of all rows. For
quantiles it gets the summary of all values. Vocabularies are counted by Keras, block after block.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ray.data import Dataset

from raytf import validation
from raytf.data import block_statistics as statistics
from raytf.data import partitions, stored
from raytf.data.columns import Columns, ColumnSpec
from raytf.errors import ConfigError


def adapt(layer: keras.layers.Layer, dataset: Dataset, column: ColumnSpec | None = None) -> keras.layers.Layer:
    """Adapts a preprocessing layer to a column of a Ray Dataset, as `layer.adapt` does to all rows at once.

    The dataset is streamed and its size is not limited. Results do not depend on its blocks. Vocabularies and bin
    boundaries equal those of Keras. Means and variances equal them up to rounding. Adapt in the driver and use the
    layer in the model function, or read the result from it (`get_vocabulary()`).

    Args:
        layer: `keras.layers.StringLookup`, `IntegerLookup`, `TextVectorization`, `Normalization` or `Discretization`.
            Or a `keras.utils.FeatureSpace`, for which Keras itself reads the rows, once for each feature.
        dataset: A `ray.data.Dataset`, such as of `raytf.read_tfrecords`.
        column: Column, `raytf.Column`, or a list of columns as one vector; None for a `FeatureSpace`, which names its
            columns.

    Returns:
        The layer.

    Raises:
        ConfigError: The layer cannot be adapted, or the column cannot be used.

    Example:
        >>> import keras, raytf, ray
        >>> rows = ray.data.from_items([{"x": float(i)} for i in range(5)])
        >>> layer = raytf.adapt(keras.layers.Normalization(axis=None), rows, "x")
        >>> round(float(layer.variance[0, 0]), 4)
        2.0
    """
    space = isinstance(layer, keras.utils.FeatureSpace)
    known = (keras.layers.Normalization, keras.layers.Discretization)
    if not (space or isinstance(layer, known) or (hasattr(layer, "adapt") and hasattr(layer, "update_state"))):
        raise ConfigError(
            "raytf.adapt takes one of Keras' preprocessing layers with adapt(), or a FeatureSpace",
            type(layer).__name__,
            "Pass a layer such as keras.layers.Normalization",
        )
    fix = "Make one, as ray.data.from_items(rows) does"
    validation.check_kind("dataset", dataset, Dataset, "a ray.data.Dataset", fix, optional=False)
    if space != (column is None):
        raise ConfigError(
            "A layer is adapted to a column, and a FeatureSpace to the columns of its own features",
            f"{type(layer).__name__} with column={column!r}",
            "Leave column out" if space else "Name the column",
        )
    if getattr(layer, "input_mean", None) is not None:
        raise ConfigError("A layer is adapted that has no mean yet", f"mean={layer.input_mean}", "Leave mean= out")
    if space:
        _adapt_space(layer, dataset)
        return layer
    columns = Columns.from_spec(column, "column")
    if any(part.is_list for part in columns.parts):
        raise ConfigError("A layer is adapted to values, not to lists", repr(column), "Leave ragged and pad out")
    with stored.quiet():
        if isinstance(layer, keras.layers.Normalization):
            layer.adapt(_of_equal_moments(dataset, columns, layer.axis))
        elif isinstance(layer, keras.layers.Discretization):
            layer.reset_state()
            layer.summary = _summary(dataset, columns, layer.epsilon)
            layer.update_state(np.empty(0, np.float32))  # compresses the summary
            layer.finalize_state()
        else:
            layer.reset_state()
            for values in _streamed(dataset, {"column": columns}):
                layer.update_state(tf.convert_to_tensor(values["column"]))
            layer.finalize_state()
    return layer


def _streamed(dataset, specs: dict[str, Columns]) -> Iterator[dict[str, np.ndarray]]:
    """Yields the values of the columns, block by block."""
    dataset = partitions.unbound(stored.projected(dataset, specs))
    empty = True
    with stored.unwrapped(dataset.context):
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            if table.num_rows:
                empty = False
                yield {name: statistics.values_of(table, columns) for name, columns in specs.items()}
    if empty:
        raise _without_rows()


def _without_rows() -> ConfigError:
    return ConfigError("A layer is adapted to rows", "a dataset without any", "Check the dataset")


def _reduced(dataset, columns: Columns, function: Callable[[np.ndarray], Any]) -> list:
    """Returns function(values) of each block, computed in the task that reads it."""
    mapped = stored.projected(dataset, {"column": columns}).map_batches(
        functools.partial(statistics.reduce, columns, function),
        batch_format="pyarrow",
        batch_size=None,
        zero_copy_batch=True,
    )
    mapped = partitions.unbound(mapped)
    with stored.unwrapped(mapped.context):
        batches = mapped.iter_batches(batch_size=None, batch_format="pyarrow")
        results = [pickle.loads(value) for table in batches if table.num_rows for value in table["result"].to_pylist()]
    if not results:
        raise _without_rows()
    return results


# ------------------------------------------------------------------------------------------ mean and variance


def _of_equal_moments(dataset, columns: Columns, axis: tuple[int, ...]) -> np.ndarray:
    """Returns two rows with the mean and the variance of all rows, over all axes but `axis`."""
    count, mean, squares = 0, np.zeros(()), np.zeros(())
    for n, block_mean, block_squares in _reduced(dataset, columns, functools.partial(statistics.moments, axis)):
        if count and mean.shape != block_mean.shape:
            shapes = f"{mean.shape[1:]} and {block_mean.shape[1:]}"
            raise ConfigError("All rows of a column need one shape", shapes, "Resize or pad them")
        delta = block_mean - mean
        squares = squares + block_squares + delta**2 * (count * n / (count + n))
        mean = mean + delta * (n / (count + n))
        count += n
    deviation = np.sqrt(squares / count)
    return np.concatenate([mean - deviation, mean + deviation])


# ------------------------------------------------------------------------------------------ quantiles


def _summary(dataset, columns: Columns, epsilon: float) -> np.ndarray:
    """Returns what Keras' `summarize` returns for all values: some of the sorted ones, and the weight of each.

    A first pass counts values by the upper half of their bits. A second one counts by the lower half where values are
    picked.
    """
    counts = np.zeros(1 << 16, np.int64)
    for upper, number in _reduced(dataset, columns, statistics.count_upper):
        counts[upper] += number
    ends = counts.cumsum()
    step = max(int(ends[-1]) / (1.0 / epsilon), 1)
    ranks = np.arange(int(step - 1), ends[-1], int(step))
    picked = np.searchsorted(ends, ranks, side="right")
    chosen, column_of = np.unique(picked, return_inverse=True)
    lower_counts = np.zeros((len(chosen), 1 << 16), np.int64)
    for upper, lower, number in _reduced(dataset, columns, functools.partial(statistics.count_lower, chosen)):
        lower_counts[np.searchsorted(chosen, upper), lower] += number
    ranks = ranks - (ends - counts)[picked]
    lower = [
        np.searchsorted(lower_counts[i].cumsum(), rank, side="right") for i, rank in zip(column_of, ranks, strict=True)
    ]
    keys = (picked.astype(np.uint32) << statistics.HALF) | np.array(lower, np.uint32)
    values = np.where(keys >> 31, keys & np.uint32(0x7FFFFFFF), ~keys).view(np.float32)
    return np.stack([values, np.ones_like(values) * step])


# ------------------------------------------------------------------------------------------ FeatureSpace


def _adapt_space(space, dataset) -> None:
    specs = {name: Columns.from_spec(name, "features of the FeatureSpace") for name in space.features}
    with stored.quiet():
        first = next(_streamed(dataset.limit(1), specs))
        signature = {
            name: tf.TensorSpec((None, *values.shape[1:]), tf.convert_to_tensor(values).dtype)
            for name, values in first.items()
        }
        space.adapt(tf.data.Dataset.from_generator(lambda: _streamed(dataset, specs), output_signature=signature))
