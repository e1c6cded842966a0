"""The rows of a tensor in a list of Arrow tables, gathered in any order into memory of their own.

Object-store memory is read only by convention but mapped writable, and TensorFlow may work in place on memory that it
was given: rows are therefore always copied, once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytf.data.columns import Column, Columns
from raytf.errors import ConfigError

ALIGNMENT = 64  # bytes; TensorFlow then takes an array without a copy
_STACK_ROWS = 1024  # rows that are transposed at once, so that they stay in the cache
_CACHED_BYTES = 256 << 10  # of rows that are brought together before they go where they belong
# A tensor of no more than this is copied into one array: rows of one array are gathered in one pass.
COPIED_BYTES = 64 << 20


def source(tables: Sequence[pa.Table], columns: Columns, copied_bytes: float = math.inf) -> ColumnSource:
    """The `ColumnSource` that fits the columns' types.

    Args:
        tables: that hold the columns.
        columns: of one tensor.
        copied_bytes: stacked columns of more than this are not copied beforehand, but gathered one by one.

    Raises:
        ConfigError: nulls without a fill, lists of different lengths without a way to treat them, or a type that has no
            tensor.
    """
    if columns.stacked and all(columns.stored in table.column_names for table in tables):
        return Dense(tables, Column(columns.stored))
    tables = _of_one_type(tables, columns.names)
    if columns.stacked:
        return Stacked(tables, columns, copied_bytes)
    (column,) = columns.parts
    if column.is_list:
        return Lists(tables, column)
    if _is_text(filled(tables[0], column).type) and column.shape is None:
        return Texts(tables, column)
    return Dense(tables, column)


class ColumnSource:
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


class Dense(ColumnSource):
    """Rows of one shape."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        arrays = [_stored_array(table, column) for table in tables]
        shapes = {(a.shape[1:], np.dtype(column.dtype or a.dtype)) for a in arrays}
        if len(shapes) > 1:
            raise ConfigError(
                "All rows of a column need one shape and dtype", f"{shapes} in {column.name!r}", "Convert it"
            )
        ((self.shape, self.dtype),) = shapes
        self.row_bytes = max(1, int(np.prod(self.shape))) * self.dtype.itemsize
        small = len(arrays) > 1 and self.row_bytes * sum(map(len, arrays)) <= COPIED_BYTES
        whole = [np.concatenate(arrays)] if small else arrays
        self._arrays = Arrays(whole, self.dtype, [len(a) for a in arrays] if small else None)

    def gather(self, places):
        return (self._arrays.take(places),)


class Stacked(ColumnSource):
    """Columns of single numbers that become one float32 vector.

    In a copy of them all where that is small; else out of the columns themselves, which takes about ten times as long
    as where `stack` has put each row together before.
    """

    def __init__(self, tables: Sequence[pa.Table], columns: Columns, copied_bytes: float):
        self._parts = [_numbers(table, columns) for table in tables]
        rows = [len(arrays[0]) for arrays in self._parts]
        self.shape, self.dtype = (len(columns.parts),), np.dtype(np.float32)
        self.row_bytes = 4 * len(columns.parts)
        self._whole = None
        if self.row_bytes * sum(rows) <= copied_bytes:
            whole = np.empty((sum(rows), *self.shape), np.float32)
            for arrays, stop in zip(self._parts, np.cumsum(rows), strict=True):
                _stack(arrays, whole[stop - len(arrays[0]) : stop])
            self._whole, self._parts = Arrays([whole], self.dtype, rows), []

    def gather(self, places):
        if self._whole is not None:
            return (self._whole.take(places),)
        out = aligned_empty((len(places), *self.shape), self.dtype)
        for table, rows, where in places.by_table:
            where = np.arange(len(rows)) if isinstance(where, slice) else where
            for start in range(0, len(rows), _STACK_ROWS):
                few = slice(start, start + _STACK_ROWS)
                part = np.empty((len(rows[few]), *self.shape), self.dtype)
                for j, array in enumerate(self._parts[table]):
                    part[:, j] = array.take(rows[few], mode="clip")
                out[where[few]] = part
        return (out,)


def stack(table: pa.Table, columns: Columns) -> pa.Array:
    """The float32 vector of each row of a table, as `source` finds it again in a column `columns.stored`.

    Raises:
        ConfigError: the columns cannot be stacked, see `source`.
    """
    arrays = _numbers(table, columns)
    whole = np.empty((len(table), len(arrays)), np.float32)
    _stack(arrays, whole)
    return pa.FixedSizeListArray.from_arrays(pa.array(whole.ravel()), len(arrays))


def _numbers(table: pa.Table, columns: Columns) -> list[np.ndarray]:
    arrays = []
    for column in columns.parts:
        kind = table.schema.field(column.name).type
        decoded = kind.value_type if pa.types.is_dictionary(kind) else kind
        array = None if _is_text(decoded) else column_array(table, column)
        if array is None or array.ndim != 1 or array.dtype.hasobject:
            name = column.name
            found = f"type {kind}" if array is None else f"shape {array.shape[1:]} and dtype {array.dtype}"
            raise ConfigError(
                "Columns that are stacked into one vector must hold single numbers",
                f"{name!r} of {found}",
                f'Make it an input of its own, features={{"numbers": [...], {name!r}: {name!r}}}, or number its values',
            )
        arrays.append(array)
    return arrays


class Arrays:
    """Rows of arrays.

    Args:
        arrays: one for each table, or one for all.
        dtype: of what is taken; those of the arrays are converted to it.
        rows: rows of each table, where there is one array for all.
    """

    def __init__(self, arrays: list[np.ndarray], dtype: np.dtype, rows: Sequence[int] | None = None):
        self._arrays, self._dtype = arrays, dtype
        self._starts = None if rows is None else np.cumsum([0, *rows])[:-1]

    def take(self, places: Places) -> np.ndarray:
        """The rows, in aligned memory of their own."""
        first = self._arrays[0]
        out = aligned_empty((len(places), *first.shape[1:]), self._dtype)
        if places.run is not None:
            table, row = places.run
            array, start = (self._arrays[table], row) if self._starts is None else (first, self._starts[table] + row)
            out[:] = array[start : start + len(out)]
        elif self._starts is not None and first.dtype == out.dtype:
            rows = self._starts[places.table] + places.row
            _items(first).take(rows, axis=0, out=_items(out), mode="clip")
        elif self._starts is not None:
            out[:] = first[self._starts[places.table] + places.row]
        else:
            for table, rows, where in places.by_table:
                array = self._arrays[table]
                # what lies in one piece moves as such
                source, target = (_items(array), _items(out)) if array.dtype == out.dtype else (array, out)
                if isinstance(where, slice) and source.dtype == target.dtype:
                    source.take(rows, axis=0, out=target, mode="clip")
                elif isinstance(where, slice):
                    target[where] = source.take(rows, axis=0, mode="clip")
                else:
                    few = max(1, _CACHED_BYTES // max(1, source.itemsize * int(np.prod(source.shape[1:]))))
                    for i in range(0, len(rows), few):
                        target[where[i : i + few]] = source.take(rows[i : i + few], axis=0, mode="clip")
        return out


def _items(array: np.ndarray) -> np.ndarray:
    """A view in which each row is one item, which NumPy copies several times faster; the array itself where it has no
    such view, or is one already."""
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if array.ndim == 1 or not width or array.dtype.hasobject or not array.flags.c_contiguous:
        return array
    return array.reshape(len(array), width // array.dtype.itemsize).view(np.dtype((np.void, width)))[:, 0]


class Texts(ColumnSource):
    """Strings or bytes."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        self._parts = [_in_one(filled(table, column)) for table in tables]
        self.shape, self.dtype = (), np.dtype(object)
        sizes = sum(part.nbytes for part in self._parts)
        self.row_bytes = max(8, sizes / max(1, sum(map(len, self._parts))))

    def gather(self, places):
        out = np.empty(len(places), object)
        for table, rows, where in places.by_table:
            out[where] = self._parts[table].take(pa.array(rows)).to_pylist()
        return (out,)


class Lists(ColumnSource):
    """Lists of numbers whose lengths differ."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        self._values, self._offsets, lengths = [], [], []
        for table in tables:
            array = _in_one(filled(table, column))
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
            offsets = array.offsets.to_numpy()
            # what comes before or after the rows of a part of an array is not looked at: it may hold nulls
            self._values.append(array.flatten().to_numpy(zero_copy_only=False))
            self._offsets.append(offsets)
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
        self.dtype = np.dtype(column.dtype or self._values[0].dtype)
        rows = max(1, sum(map(len, lengths)))
        self.row_bytes = 8 + self.dtype.itemsize * sum(int(part.sum()) for part in lengths) / rows
        self._lengths = None
        if 8 * rows <= COPIED_BYTES:
            whole = np.concatenate(lengths).astype(np.int64)
            self._lengths = Arrays([whole], whole.dtype, [len(part) for part in lengths])

    def lengths(self, places: Places) -> np.ndarray:
        """The length of each list: int64, (rows,)."""
        if self._lengths is not None:
            return self._lengths.take(places)
        out = aligned_empty((len(places),), np.int64)
        for table, rows, where in places.by_table:
            offsets = self._offsets[table]
            out[where] = offsets.take(rows + 1, mode="clip") - offsets.take(rows, mode="clip")
        return out

    def _starts(self, table: int, rows: np.ndarray) -> np.ndarray:
        offsets = self._offsets[table]
        return offsets.take(rows, mode="clip").astype(np.int64) - int(offsets[0])

    def gather(self, places):
        lengths = self.lengths(places)
        ends = np.cumsum(lengths)
        out = aligned_empty((int(ends[-1]) if len(ends) else 0,), self.dtype)
        if places.run is not None:
            table, row = places.run
            (start,) = self._starts(table, np.array([row]))
            out[:] = self._values[table][start : start + len(out)]
            return out, lengths
        for table, rows, where in places.by_table:
            size = lengths[where]
            within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
            values = self._values[table][np.repeat(self._starts(table, rows), size) + within]
            if isinstance(where, slice):
                out[:] = values
            else:
                out[np.repeat(ends[where] - size, size) + within] = values
        return out, lengths


# --------------------------------------------------------------------------------------------- arrays of a table


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An uninitialized array whose memory starts at a multiple of `ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def column_array(table: pa.Table, column: Column) -> np.ndarray:
    """A column as an array of shape (rows, ...); without a copy where Arrow's layout and the dtype allow it.

    Raises:
        ConfigError: nulls without a fill, lists of different lengths, or a type that has no tensor.
    """
    array = _stored_array(table, column)
    return array if column.dtype is None else array.astype(column.dtype, copy=False)


def _stored_array(table: pa.Table, column: Column) -> np.ndarray:
    """As `column_array`, in the dtype that it has in the table."""
    array = filled(table, column)
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
    return found[0] if len(found) == 1 else np.concatenate(found)


def filled(table: pa.Table, column: Column) -> pa.ChunkedArray:
    """The column without nulls, inside its lists or tensors neither, and decoded if it is a dictionary."""
    array = table.column(column.name)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    missing = [sum(counts) for counts in zip(*(_nulls(chunk) for chunk in array.chunks), strict=True)]
    if not any(missing) and not _encoded(array.type):
        return array
    if any(missing) and column.fill is None:
        whole, *inside = missing
        counts = [f"{whole} null(s)"] * bool(whole) + [f"{sum(inside)} null(s) inside the rows"] * any(inside)
        raise ConfigError(
            "A column that a model is fed with must hold no nulls, unless it says what replaces them",
            f"{' and '.join(counts)} of {column.name!r}, {array.type}",
            f"Use raytf.Column({column.name!r}, fill=...), or drop them with Ray Data",
        )
    return pa.chunked_array([_complete(chunk, column) for chunk in array.chunks])


def _in_one(array: pa.ChunkedArray) -> pa.Array:
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # which copies one chunk, too


def _nulls(array: pa.Array) -> list[int]:
    """Number of nulls: of rows, of what is in them if they are lists or tensors, and so on."""
    if isinstance(array, pa.ExtensionArray):
        return _nulls(array.storage)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type):
        inside = [_nulls(part) for part in array.flatten()]
        return [array.null_count, sum(map(sum, inside))]
    return [array.null_count, *(_nulls(array.flatten()) if _has_values(array.type) else [])]


def _complete(array: pa.Array, column: Column) -> pa.Array:
    """The array with `fill` in the place of nulls: of rows, or inside them, wherever it is of the type that misses."""
    if isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(array.type, _complete(array.storage, column))
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        array = array.cast(pa.scalar(column.fill).type)
    if array.null_count:
        try:
            array = pc.fill_null(array, _scalar(column.fill, array.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(
                "fill must be a value of the column's type, or of what its lists hold where that is missing",
                f"{column.fill!r} for {array.null_count} null(s) of type {array.type} in {column.name!r}",
                "Choose such a value, or drop them with Ray Data",
            ) from error
    if not _has_values(array.type):
        return array
    values = _complete(array.flatten(), column)
    if pa.types.is_fixed_size_list(array.type):
        return pa.FixedSizeListArray.from_arrays(values, array.type.list_size)
    kind = pa.LargeListArray if pa.types.is_large_list(array.type) else pa.ListArray
    return kind.from_arrays(pc.subtract(array.offsets, array.offsets[0]), values)


def _scalar(value, kind: pa.DataType) -> pa.Scalar:
    made, numbers = pa.scalar(value, kind), kind
    while _has_values(numbers):
        numbers = numbers.value_type
    if pa.types.is_integer(numbers) and not np.array_equal(made.as_py(), value):
        raise ValueError(value)  # Arrow cuts what is behind the point
    return made


def _encoded(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) or (_has_values(kind) and _encoded(kind.value_type))


def _has_values(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _of_one_type(tables: Sequence[pa.Table], names: Sequence[str]) -> Sequence[pa.Table]:
    """Tables in which a column of nulls alone, or of empty lists, has the type that it has in the others."""
    for name in dict.fromkeys(names):
        kinds = [table.schema.field(name).type for table in tables]
        known = next((kind for kind in kinds if not _untyped(kind)), None)
        if known is None or not any(map(_untyped, kinds)):
            continue
        tables = [
            table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(known))
            if _untyped(kind)
            else table
            for table, kind in zip(tables, kinds, strict=True)
        ]
    return tables


def _untyped(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (_has_values(kind) and _untyped(kind.value_type))


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
