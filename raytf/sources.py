"""The rows of a tensor in a list of Arrow tables, gathered in any order into memory of their own.

Object-store memory is read only by convention but mapped writable, and TensorFlow may work in place on memory that it
was given: rows are therefore always copied, once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytf.columns import Column, Columns
from raytf.errors import ConfigError

ALIGNMENT = 64  # bytes; TensorFlow then takes an array without a copy
_STACK_ROWS = 1024  # rows that are transposed at once, so that they stay in the cache
# A column of no more than this is copied into one array: rows of one array are gathered in one pass.
_COPIED_BYTES = 64 << 20


def source(tables: Sequence[pa.Table], columns: Columns) -> Source:
    """The `Source` that fits the columns' types.

    Raises:
        ConfigError: nulls without a fill, lists of different lengths without a way to treat them, or a type that has no
            tensor.
    """
    if columns.stacked:
        return Stacked(tables, columns)
    (column,) = columns.parts
    if column.is_list:
        return Lists(tables, column)
    if _is_text(_filled(tables[0], column).type) and column.shape is None:
        return Texts(tables, column)
    return Dense(tables, column)


class Source:
    """Rows of one tensor.

    Attributes:
        shape: of a row; dimensions that differ by row are None.
        dtype: NumPy's.
        row_bytes: about how many bytes a row takes.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    row_bytes: float

    def gather(self, places: Places) -> tuple[np.ndarray, ...]:
        """The rows at these places, in their order: one array, (rows, *shape), or for lists two, the values of all
        lists, one after the other, and the int64 length of each."""
        raise NotImplementedError


class Places:
    """Where some rows lie.

    Args:
        table: index of each row's table, (rows,).
        row: its number in the table, (rows,).
    """

    def __init__(self, table: np.ndarray, row: np.ndarray):
        self.table, self.row = table, row

    def __len__(self) -> int:
        return len(self.row)

    @functools.cached_property
    def by_table(self) -> list[tuple[int, np.ndarray, np.ndarray | slice]]:
        """(table, rows in it, where they stand among all) for each table that occurs."""
        if not len(self.table):
            return []
        if (self.table[0] == self.table).all():
            return [(int(self.table[0]), self.row, slice(None))]
        order = np.argsort(self.table, kind="stable")  # a radix sort for small integers
        edges = np.flatnonzero(np.diff(self.table[order])) + 1
        return [(int(self.table[part[0]]), self.row[part], part) for part in np.split(order, edges)]

    @functools.cached_property
    def run(self) -> tuple[int, int] | None:
        """(table, first row) if the rows are neighbours in one table, in its order."""
        if len(self.by_table) != 1 or self.row[-1] - self.row[0] + 1 != len(self.row):
            return None
        return (int(self.table[0]), int(self.row[0])) if (np.diff(self.row) == 1).all() else None


class Dense(Source):
    """Rows of one shape."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        arrays = [column_array(table, column) for table in tables]
        shapes = {(a.shape[1:], a.dtype) for a in arrays}
        if len(shapes) > 1:
            raise ConfigError(
                "All rows of a column need one shape and dtype", f"{shapes} in {column.name!r}", "Convert it"
            )
        ((self.shape, self.dtype),) = shapes
        self.row_bytes = max(1, int(np.prod(self.shape))) * self.dtype.itemsize
        small = len(arrays) > 1 and sum(a.nbytes for a in arrays) <= _COPIED_BYTES
        self._arrays = Arrays([np.concatenate(arrays)], [len(a) for a in arrays]) if small else Arrays(arrays)

    def gather(self, places):
        return (self._arrays.take(places),)


class Stacked(Source):
    """Columns of single numbers that become one float32 vector, in a copy of them all."""

    def __init__(self, tables: Sequence[pa.Table], columns: Columns):
        parts = [[column_array(table, column) for column in columns.parts] for table in tables]
        for arrays in parts:
            for column, array in zip(columns.parts, arrays, strict=True):
                if array.ndim != 1 or array.dtype.hasobject:
                    raise ConfigError(
                        "Columns that are stacked into one vector must hold single numbers",
                        f"{column.name!r} of shape {array.shape[1:]} and dtype {array.dtype}",
                        "Name such a column alone",
                    )
        rows = [len(arrays[0]) for arrays in parts]
        self.shape, self.dtype = (len(columns.parts),), np.dtype(np.float32)
        self.row_bytes = 4 * len(columns.parts)
        whole = np.empty((sum(rows), *self.shape), np.float32)
        for arrays, stop in zip(parts, np.cumsum(rows), strict=True):
            _stack(arrays, whole[stop - len(arrays[0]) : stop])
        self._arrays = Arrays([whole], rows)

    def gather(self, places):
        return (self._arrays.take(places),)


class Arrays:
    """Rows of arrays.

    Args:
        arrays: one for each table, or one for all.
        rows: rows of each table, where there is one array for all.
    """

    def __init__(self, arrays: list[np.ndarray], rows: Sequence[int] | None = None):
        self._arrays = arrays
        self._starts = None if rows is None else np.cumsum([0, *rows])[:-1]

    def take(self, places: Places) -> np.ndarray:
        """The rows, in aligned memory of their own."""
        first = self._arrays[0]
        out = aligned_empty((len(places), *first.shape[1:]), first.dtype)
        if places.run is not None:
            table, row = places.run
            array, start = (self._arrays[table], row) if self._starts is None else (first, self._starts[table] + row)
            out[:] = array[start : start + len(out)]
        elif self._starts is not None:
            np.take(first, self._starts[places.table] + places.row, axis=0, out=out, mode="clip")
        else:
            for table, rows, where in places.by_table:
                if isinstance(where, slice):
                    np.take(self._arrays[table], rows, axis=0, out=out, mode="clip")
                else:
                    out[where] = self._arrays[table][rows]
        return out


class Texts(Source):
    """Strings or bytes."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        self._parts = [_filled(table, column).combine_chunks() for table in tables]
        self.shape, self.dtype = (), np.dtype(object)
        sizes = sum(part.nbytes for part in self._parts)
        self.row_bytes = max(8, sizes / max(1, sum(map(len, self._parts))))

    def gather(self, places):
        out = np.empty(len(places), object)
        for table, rows, where in places.by_table:
            out[where] = self._parts[table].take(pa.array(rows)).to_pylist()
        return (out,)


class Lists(Source):
    """Lists of numbers whose lengths differ."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        self.bucket = column.bucket
        self._values, self._starts, lengths = [], [], []
        for table in tables:
            array = _filled(table, column).combine_chunks()
            if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
                raise ConfigError(
                    "ragged and pad are for columns of lists", f"{column.name!r} of type {array.type}", "Leave it out"
                )
            if not (pa.types.is_integer(array.type.value_type) or pa.types.is_floating(array.type.value_type)):
                raise ConfigError(
                    "Lists of different lengths must hold numbers",
                    f"{column.name!r} of type {array.type}",
                    "Convert them",
                )
            offsets = array.offsets.to_numpy().astype(np.int64)
            values = array.values.to_numpy(zero_copy_only=False)
            self._values.append(values if column.dtype is None else values.astype(column.dtype, copy=False))
            self._starts.append(offsets[:-1])
            lengths.append(np.diff(offsets))
        if isinstance(column.pad, int):
            longest = max((int(part.max(initial=0)) for part in lengths), default=0)
            if longest > column.pad:
                raise ConfigError(
                    "pad must be at least the length of the longest list",
                    f"pad={column.pad} and a list of {longest} in {column.name!r}",
                    "Raise pad, or cut the lists with Ray Data",
                )
        self.shape = (column.pad if isinstance(column.pad, int) else None,)
        self.dtype = self._values[0].dtype
        rows = max(1, sum(map(len, lengths)))
        self.row_bytes = 8 + self.dtype.itemsize * sum(int(part.sum()) for part in lengths) / rows
        self._lengths = Arrays([np.concatenate(lengths)], [len(part) for part in lengths])

    def lengths(self, places: Places) -> np.ndarray:
        """The length of each list: int64, (rows,)."""
        return self._lengths.take(places)

    def gather(self, places):
        lengths = self.lengths(places)
        ends = np.cumsum(lengths)
        out = aligned_empty((int(ends[-1]) if len(ends) else 0,), self.dtype)
        if places.run is not None:
            table, row = places.run
            start = self._starts[table][row]
            out[:] = self._values[table][start : start + len(out)]
            return out, lengths
        for table, rows, where in places.by_table:
            size = lengths[where]
            within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
            values = self._values[table][np.repeat(self._starts[table][rows], size) + within]
            if isinstance(where, slice):
                out[:] = values
            else:
                out[np.repeat(ends[where] - size, size) + within] = values
        return out, lengths


# --------------------------------------------------------------------------------------------- arrays of a table


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An uninitialized array whose memory starts at a multiple of `ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def column_array(table: pa.Table, column: Column) -> np.ndarray:
    """A column as an array of shape (rows, ...); without a copy where Arrow's layout allows it.

    Raises:
        ConfigError: nulls without a fill, lists of different lengths, or a type that has no tensor.
    """
    array = _filled(table, column)
    kind, name = array.type, column.name
    chunks = array.chunks or [pa.array([], kind)]
    if isinstance(kind, pa.BaseExtensionType):
        found = [_tensor(chunk, name) for chunk in chunks]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        found = [_equal_lists(chunk, name) for chunk in chunks]
    elif pa.types.is_fixed_size_binary(kind) and column.shape is not None:
        found = [_raw(chunk, column) for chunk in chunks]
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        found = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind):
        found = [chunk.to_numpy(zero_copy_only=False).astype(np.int64) for chunk in chunks]
    else:
        raise ConfigError(
            "A column that a model is fed with must hold numbers, tensors, lists of equal length, or strings",
            f"{name!r} of type {kind}",
            "Convert it with Ray Data's map_batches",
        )
    result = found[0] if len(found) == 1 else np.concatenate(found)
    return result if column.dtype is None else result.astype(column.dtype, copy=False)


def _filled(table: pa.Table, column: Column) -> pa.ChunkedArray:
    """The column without nulls, and decoded if it is a dictionary."""
    array = table.column(column.name)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if not array.null_count:
        return array
    if column.fill is None:
        raise ConfigError(
            "A column that a model is fed with must hold no nulls, unless it says what stands for them",
            f"{array.null_count} null(s) in {column.name!r}",
            f"Use raytf.Column({column.name!r}, fill=...), or drop them with Ray Data",
        )
    try:
        return pc.fill_null(array, pa.scalar(column.fill, array.type))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(
            "fill must be a value of the column's type",
            f"{column.fill!r} for {column.name!r} of type {array.type}",
            "Choose such a value",
        ) from error


def _is_text(kind: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests) or pa.types.is_fixed_size_binary(kind)


def _raw(chunk, column: Column) -> np.ndarray:
    shape, dtype = column.shape, np.dtype(column.dtype)
    if int(np.prod(shape)) * dtype.itemsize != chunk.type.byte_width:
        raise ConfigError(
            f"shape and dtype must take the {chunk.type.byte_width} bytes of a row",
            f"{shape} of {dtype} for {column.name!r}",
            "Correct the Column",
        )
    width = chunk.type.byte_width
    raw = np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * width : (chunk.offset + len(chunk)) * width]
    return raw.view(dtype).reshape(len(chunk), *shape)


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
            "A list column must hold lists of one length, unless it says how to treat others",
            f"different lengths in {name!r}",
            f"Use raytf.Column({name!r}, pad=...) or raytf.Column({name!r}, ragged=True)",
        )
    if isinstance(values, (pa.ListArray, pa.FixedSizeListArray, pa.LargeListArray)):
        inner = _equal_lists(values, name)
        return inner.reshape(rows, width, *inner.shape[1:])
    return values.to_numpy(zero_copy_only=False).reshape(rows, width)


def _stack(arrays: list[np.ndarray], out: np.ndarray) -> None:
    for start in range(0, len(out), _STACK_ROWS):
        part = out[start : start + _STACK_ROWS]
        for j, array in enumerate(arrays):
            part[:, j] = array[start : start + _STACK_ROWS]
