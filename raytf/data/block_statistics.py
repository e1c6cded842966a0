"""Statistics of a block of rows for `raytf.adapt`, computed in the task that reads it.

Needs no TensorFlow, whose import takes seconds of each process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from raytf.data import gather
from raytf.data.columns import Columns
from raytf.errors import ConfigError

HALF = np.uint32(16)  # bits of a float32 that are counted in each of two passes


def values_of(table: pa.Table, columns: Columns) -> np.ndarray:
    """Returns the rows of a table, (rows, *shape); single values have the shape (1,), as in a model."""
    rows = np.arange(len(table))
    (values,) = gather.source([table], columns).gather(gather.RowLocations(np.zeros(len(table), np.int64), rows))
    return values[:, None] if values.ndim == 1 else values


def reduce(columns: Columns, function: Callable, table: pa.Table) -> pa.Table:
    """Returns function(values) of a block as a table of one row, or of none for a block without rows."""
    results = [pickle.dumps(function(values_of(table, columns)))] if table.num_rows else []
    return pa.table({"result": pa.array(results, pa.large_binary())})


def moments(axis: tuple[int, ...], values: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns (number of values, their mean, their sum of squared deviations), broadcast to a row's shape."""
    values = values.astype(np.float64)
    kept_axes = {a % values.ndim for a in axis}
    axes = tuple(d for d in range(values.ndim) if d not in kept_axes)
    if 0 in kept_axes:
        raise ConfigError("axis of a Normalization must not be that of the rows", repr(axis), "Use -1, or None")
    mean = values.mean(axes, keepdims=True)
    squares = ((values - mean) ** 2).sum(axes, keepdims=True)
    row = (1, *values.shape[1:])
    number = int(np.prod([values.shape[d] for d in axes]))
    return number, np.broadcast_to(mean, row), np.broadcast_to(squares, row)


def _keys(values: np.ndarray) -> np.ndarray:
    """Returns integers that are ordered as the values are, in float32; NaN comes last."""
    numbers = values.astype(np.float32).ravel()
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))


def count_upper(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (upper halves of the values' bits, how often each occurs)."""
    return np.unique(_keys(values) >> HALF, return_counts=True)


def count_lower(chosen: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (upper halves, lower halves, how often each pair occurs) of the values with chosen upper halves."""
    keys = _keys(values)
    keys, number = np.unique(keys[np.isin(keys >> HALF, chosen)], return_counts=True)
    return keys >> HALF, keys & np.uint32(0xFFFF), number
