"""Arrow columns to the arrays that a model is fed with; pure NumPy and pyarrow, used by driver and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raytf.errors import ConfigError

ALIGNMENT = 64  # bytes; TensorFlow then takes an array without a copy


@dataclass(frozen=True)
class Columns:
    """What one tensor is made of.

    Args:
        names: columns of the dataset.
        stacked: whether the columns become one float32 vector (a list was given), or there is one as it is.
    """

    names: tuple[str, ...]
    stacked: bool

    @staticmethod
    def of(spec: str | Sequence[str], role: str) -> Columns:
        """From "column" or ["column", ...]."""
        if isinstance(spec, str):
            return Columns((spec,), False)
        if isinstance(spec, Sequence) and spec and all(isinstance(name, str) for name in spec):
            return Columns(tuple(spec), True)
        raise ConfigError(
            f"{role} must be a column, a list of columns, or a dict of these by input name",
            repr(spec),
            "Name columns of the dataset",
        )


def parse(spec, role: str) -> Columns | dict[str, Columns] | None:
    """The columns of `features`, `labels` or `sample_weights` as the trainers take them."""
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return {str(name): Columns.of(part, f"{role}[{name!r}]") for name, part in spec.items()}
    return Columns.of(spec, role)


def flat(spec) -> list[Columns]:
    """The `Columns` of a parsed spec, in order."""
    return [] if spec is None else list(spec.values()) if isinstance(spec, dict) else [spec]


def check_names(spec, schema_names: Sequence[str], role: str) -> None:
    """Raises ConfigError for a column that the dataset does not have."""
    for part in flat(spec):
        for name in part.names:
            if name not in schema_names:
                raise ConfigError(
                    f"{role} must name columns of the dataset, which has {', '.join(map(repr, schema_names))}",
                    repr(name),
                    "Name one of these",
                )


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An uninitialized array whose memory starts at a multiple of `ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def column_array(block: pa.Table, name: str) -> np.ndarray:
    """One column of a block as an array of shape (rows, ...); without a copy where Arrow's layout allows it.

    Raises:
        ConfigError: nulls, lists of different lengths, or a type that has no tensor.
    """
    column = block.column(name)
    if column.null_count:
        raise ConfigError(
            "A column that a model is fed with must hold no nulls",
            f"{column.null_count} null(s) in {name!r}",
            "Fill or drop them with Ray Data",
        )
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        chunks = [_tensor(chunk, name) for chunk in column.chunks]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        chunks = [_equal_lists(chunk, name) for chunk in column.chunks]
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        chunks = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind):
        chunks = [chunk.to_numpy(zero_copy_only=False).astype(np.int64) for chunk in column.chunks]
    elif any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        chunks = [np.array(chunk.to_pylist(), dtype=object) for chunk in column.chunks]
    else:
        raise ConfigError(
            "A column that a model is fed with must hold numbers, tensors, lists of equal length, or strings",
            f"{name!r} of type {kind}",
            "Convert it with Ray Data's map_batches",
        )
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _tensor(chunk, name: str) -> np.ndarray:
    if isinstance(chunk, pa.FixedShapeTensorArray):
        return chunk.to_numpy_ndarray()
    array = chunk.to_numpy() if hasattr(chunk, "to_numpy") else np.asarray(chunk)
    if array.dtype == object:
        raise ConfigError(
            "A tensor column must hold tensors of one shape", f"different shapes in {name!r}", "Resize or pad them"
        )
    return array


def _equal_lists(chunk, name: str) -> np.ndarray:
    values = chunk.flatten()
    rows = len(chunk)
    width, rest = divmod(len(values), rows) if rows else (0, 0)
    lengths = chunk.value_lengths().to_numpy() if rows and not pa.types.is_fixed_size_list(chunk.type) else width
    if rest or np.any(lengths != width):
        raise ConfigError(
            "A list column must hold lists of one length", f"different lengths in {name!r}", "Pad or cut the lists"
        )
    if isinstance(values, (pa.ListArray, pa.FixedSizeListArray, pa.LargeListArray)):
        inner = _equal_lists(values, name)
        return inner.reshape(rows, width, *inner.shape[1:])
    return values.to_numpy(zero_copy_only=False).reshape(rows, width)


class Source:
    """The rows of one tensor in a list of blocks, to be gathered in any order.

    Args:
        blocks: Arrow tables; their memory is read only and never handed out.
        columns: what the tensor is made of.
    """

    def __init__(self, blocks: Sequence[pa.Table], columns: Columns):
        self._parts = [[column_array(block, name) for block in blocks] for name in columns.names]
        self._stacked = columns.stacked
        for name, part in zip(columns.names, self._parts, strict=True):
            shapes = {(a.shape[1:], a.dtype) for a in part}
            if len(shapes) > 1:
                raise ConfigError(
                    "All rows of a column need one shape and dtype", f"{shapes} in {name!r}", "Convert it"
                )
            if self._stacked and (part[0].ndim != 1 or part[0].dtype.hasobject):
                raise ConfigError(
                    "Columns that are stacked into one vector must hold single numbers",
                    f"{name!r} of shape {part[0].shape[1:]} and dtype {part[0].dtype}",
                    "Name such a column alone",
                )
        first = self._parts[0][0]
        self.shape: tuple[int, ...] = (len(self._parts),) if self._stacked else first.shape[1:]
        self.dtype = np.dtype(np.float32) if self._stacked else first.dtype

    def gather(self, block_of: np.ndarray, row_of: np.ndarray) -> np.ndarray:
        """The rows at (block, row in block), in this order, in memory of their own: (len(row_of), *shape)."""
        out = aligned_empty((len(row_of), *self.shape), self.dtype)
        by_block = np.argsort(block_of, kind="stable")
        edges = np.flatnonzero(np.diff(block_of[by_block])) + 1
        for places in np.split(by_block, edges) if len(by_block) else ():
            block, rows = block_of[places[0]], row_of[places]
            if self._stacked:
                for j, part in enumerate(self._parts):
                    out[places, j] = part[block][rows]
            else:
                out[places] = self._parts[0][block][rows]
        return out
