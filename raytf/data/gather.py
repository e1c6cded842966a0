"""Gathers rows of a tensor from a list of Arrow tables, in any order, into new arrays.

Object-store memory is read-only by convention but mapped writable, and TensorFlow may write in place to arrays that it
receives. Rows are therefore always copied, once.

Over 500 lines: one function for each kind of column.
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
_CACHED_BYTES = 256 << 10  # bytes of rows that are gathered before they are scattered to the output
# A tensor up to this size is copied into one array, from which rows are gathered in one pass.
COPIED_BYTES = 64 << 20
# Types whose arrays hold more than 2 GiB, by those whose arrays do not.
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def source(tables: Sequence[pa.Table], columns: Columns, copied_bytes: float = math.inf) -> ColumnSource:
    """Returns the `ColumnSource` for the columns' types.

    Args:
        tables: Tables with the columns.
        columns: Columns of one tensor.
        copied_bytes: Bytes above which stacked columns are gathered one by one, without a copy beforehand.

    Raises:
        ConfigError: There are nulls without a fill, or lists of different lengths without `pad` or `ragged`. Or a type
            has no tensor.
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
        shape: Shape of a row; dimensions that differ by row are None.
        dtype: NumPy dtype.
        row_bytes: Approximate bytes of a row.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype
    row_bytes: float

    def gather(self, locations: RowLocations) -> tuple[np.ndarray, ...]:
        """Copies the rows at `locations`, in their order.

        Returns:
            One array, (rows, *shape). Lists return two: the concatenated values, and the int64 length of each list.
        """
        raise NotImplementedError


class RowLocations:
    """Locations of rows.

    Args:
        table: Index of each row's table, (rows,).
        row: Each row's number in its table, (rows,).
    """

    def __init__(self, table: np.ndarray, row: np.ndarray):
        self.table, self.row = table, row

    def __len__(self) -> int:
        return len(self.row)

    @functools.cached_property
    def by_table(self) -> list[tuple[int, np.ndarray, np.ndarray | slice]]:
        """Returns (table, rows in it, their indices among all rows) for each table that occurs."""
        if not len(self.table):
            return []
        if (self.table[0] == self.table).all():
            return [(int(self.table[0]), self.row, slice(None))]
        order = np.argsort(self.table, kind="stable")  # a radix sort for small integers
        edges = np.flatnonzero(np.diff(self.table[order])) + 1
        return [(int(self.table[part[0]]), self.row[part], part) for part in np.split(order, edges)]

    @functools.cached_property
    def run(self) -> tuple[int, int] | None:
        """Returns (table, first row) if the rows are consecutive in one table, or None."""
        if len(self.by_table) != 1 or self.row[-1] - self.row[0] + 1 != len(self.row):
            return None
        return (int(self.table[0]), int(self.row[0])) if (np.diff(self.row) == 1).all() else None


class Dense(ColumnSource):
    """Source of rows of one shape."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        arrays = [_stored_array(table, column) for table in tables]
        shapes = {(a.shape[1:], np.dtype(column.dtype or a.dtype)) for a in arrays}
        if len(shapes) > 1:
            raise _different(shapes, column.name)
        ((self.shape, self.dtype),) = shapes
        self.row_bytes = max(1, int(np.prod(self.shape))) * self.dtype.itemsize
        small = len(arrays) > 1 and self.row_bytes * sum(map(len, arrays)) <= COPIED_BYTES
        whole = [np.concatenate(arrays)] if small else arrays
        self._arrays = Arrays(whole, self.dtype, [len(a) for a in arrays] if small else None)

    def gather(self, locations):
        return (self._arrays.take(locations),)


class Stacked(ColumnSource):
    """Source of several columns of single numbers, stacked into one float32 vector.

    It copies small data beforehand. Else it gathers from the columns, which takes about ten times as long as from the
    vectors of `stack`.
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

    def gather(self, locations):
        if self._whole is not None:
            return (self._whole.take(locations),)
        out = aligned_empty((len(locations), *self.shape), self.dtype)
        for table, rows, indices in locations.by_table:
            indices = np.arange(len(rows)) if isinstance(indices, slice) else indices
            for start in range(0, len(rows), _STACK_ROWS):
                few = slice(start, start + _STACK_ROWS)
                part = np.empty((len(rows[few]), *self.shape), self.dtype)
                for j, array in enumerate(self._parts[table]):
                    part[:, j] = array.take(rows[few], mode="clip")
                out[indices[few]] = part
        return (out,)


def stack(table: pa.Table, columns: Columns) -> pa.Array:
    """Stacks columns into a float32 vector for each row of a table, for the column `columns.stored`.

    Raises:
        ConfigError: The columns cannot be stacked, see `source`.
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
            description = f"type {kind}" if array is None else f"shape {array.shape[1:]} and dtype {array.dtype}"
            raise ConfigError(
                "Columns that are stacked into one vector must hold single numbers",
                f"{name!r} of {description}",
                f'Make it an input of its own, features={{"numbers": [...], {name!r}: {name!r}}}, or number its values',
            )
        arrays.append(array)
    return arrays


class Arrays:
    """Rows of arrays.

    Args:
        arrays: One array for each table, or one for all.
        dtype: Dtype of the copied rows, to which the arrays' dtypes are converted.
        rows: Number of rows of each table if there is one array for all, or None.
    """

    def __init__(self, arrays: list[np.ndarray], dtype: np.dtype, rows: Sequence[int] | None = None):
        self._arrays, self._dtype = arrays, dtype
        self._starts = None if rows is None else np.cumsum([0, *rows])[:-1]

    def take(self, locations: RowLocations) -> np.ndarray:
        """Copies the rows into aligned memory."""
        first = self._arrays[0]
        out = aligned_empty((len(locations), *first.shape[1:]), self._dtype)
        if locations.run is not None:
            table, row = locations.run
            array, start = (self._arrays[table], row) if self._starts is None else (first, self._starts[table] + row)
            out[:] = array[start : start + len(out)]
        elif self._starts is not None and first.dtype == out.dtype:
            rows = self._starts[locations.table] + locations.row
            _items(first).take(rows, axis=0, out=_items(out), mode="clip")
        elif self._starts is not None:
            out[:] = first[self._starts[locations.table] + locations.row]
        else:
            for table, rows, indices in locations.by_table:
                array = self._arrays[table]
                # a row as one item is copied faster
                source, target = (_items(array), _items(out)) if array.dtype == out.dtype else (array, out)
                if isinstance(indices, slice) and source.dtype == target.dtype:
                    source.take(rows, axis=0, out=target, mode="clip")
                elif isinstance(indices, slice):
                    target[indices] = source.take(rows, axis=0, mode="clip")
                else:
                    few = max(1, _CACHED_BYTES // max(1, source.itemsize * int(np.prod(source.shape[1:]))))
                    for i in range(0, len(rows), few):
                        target[indices[i : i + few]] = source.take(rows[i : i + few], axis=0, mode="clip")
        return out


def _items(array: np.ndarray) -> np.ndarray:
    """Returns a view in which each row is one item, or the array if it has no such view.

    NumPy copies such items several times faster.
    """
    width = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    if array.ndim == 1 or not width or array.dtype.hasobject or not array.flags.c_contiguous:
        return array
    return array.reshape(len(array), width // array.dtype.itemsize).view(np.dtype((np.void, width)))[:, 0]


class Texts(ColumnSource):
    """Source of strings or bytes."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        arrays = [filled(table, column) for table in tables]
        self._parts = [_in_one(a if a.num_chunks == 1 else a.cast(_LARGE.get(a.type, a.type))) for a in arrays]
        self.shape, self.dtype = (), np.dtype(object)
        sizes = sum(part.nbytes for part in self._parts)
        self.row_bytes = max(8, sizes / max(1, sum(map(len, self._parts))))

    def gather(self, locations):
        out = np.empty(len(locations), object)
        for table, rows, indices in locations.by_table:
            out[indices] = self._parts[table].take(pa.array(rows)).to_numpy(zero_copy_only=False)
        return (out,)


class Lists(ColumnSource):
    """Source of lists of numbers with different lengths."""

    def __init__(self, tables: Sequence[pa.Table], column: Column):
        self._values, self._offsets, lengths = [], [], []
        for table in tables:
            array = _in_one(filled(table, column))
            if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
                raise ConfigError(
                    "ragged and pad are for columns of lists",
                    f"{column.name!r} of type {array.type}",
                    "Leave ragged and pad out",
                )
            if not (pa.types.is_integer(array.type.value_type) or pa.types.is_floating(array.type.value_type)):
                raise ConfigError(
                    "Lists of different lengths must hold numbers",
                    f"{column.name!r} of type {array.type}",
                    "Convert the lists to numbers",
                )
            offsets = array.offsets.to_numpy()
            # `flatten` excludes values outside of a sliced array, which may be nulls
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
        typed = next((values for values in self._values if len(values)), self._values[0])
        self.dtype = np.dtype(column.dtype or typed.dtype)
        for values in self._values if column.dtype is None else ():
            if len(values):
                check_type(values.dtype, self.dtype, column.name)
        rows = max(1, sum(map(len, lengths)))
        self.row_bytes = 8 + self.dtype.itemsize * sum(int(part.sum()) for part in lengths) / rows
        self._lengths = None
        if 8 * rows <= COPIED_BYTES:
            whole = np.concatenate(lengths).astype(np.int64)
            self._lengths = Arrays([whole], whole.dtype, [len(part) for part in lengths])

    def lengths(self, locations: RowLocations) -> np.ndarray:
        """Returns the length of each list: int64, (rows,)."""
        if self._lengths is not None:
            return self._lengths.take(locations)
        out = aligned_empty((len(locations),), np.int64)
        for table, rows, indices in locations.by_table:
            offsets = self._offsets[table]
            out[indices] = offsets.take(rows + 1, mode="clip") - offsets.take(rows, mode="clip")
        return out

    def _starts(self, table: int, rows: np.ndarray) -> np.ndarray:
        offsets = self._offsets[table]
        return offsets.take(rows, mode="clip").astype(np.int64) - int(offsets[0])

    def gather(self, locations):
        lengths = self.lengths(locations)
        ends = np.cumsum(lengths)
        out = aligned_empty((int(ends[-1]) if len(ends) else 0,), self.dtype)
        if locations.run is not None:
            table, row = locations.run
            (start,) = self._starts(table, np.array([row]))
            out[:] = self._values[table][start : start + len(out)]
            return out, lengths
        for table, rows, indices in locations.by_table:
            size = lengths[indices]
            offsets = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
            values = self._values[table][np.repeat(self._starts(table, rows), size) + offsets]
            if isinstance(indices, slice):
                out[:] = values
            else:
                out[np.repeat(ends[indices] - size, size) + offsets] = values
        return out, lengths


# --------------------------------------------------------------------------------------------- arrays of a table


def check_type(dtype: np.dtype, known: np.dtype, name: str) -> None:
    """Raises ConfigError if the numbers of a column could change in the dtype of its earlier rows."""
    if not np.can_cast(dtype, known):
        raise _different(f"{dtype} after {known}", name)


def _different(received, name: str) -> ConfigError:
    return ConfigError(
        "All rows of a column need one shape and dtype",
        f"{received} in {name!r}",
        "Convert the rows to one shape and dtype",
    )


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """Returns an uninitialized array whose memory starts at a multiple of `ALIGNMENT` bytes."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def column_array(table: pa.Table, column: Column) -> np.ndarray:
    """Returns a column as an array of shape (rows, ...), without a copy if Arrow's layout and the dtype allow it.

    Raises:
        ConfigError: There are nulls without a fill, lists of different lengths, or a type that has no tensor.
    """
    array = _stored_array(table, column)
    return array if column.dtype is None else array.astype(column.dtype, copy=False)


def _stored_array(table: pa.Table, column: Column) -> np.ndarray:
    """Returns a column as `column_array` does, in the dtype of the table."""
    array = filled(table, column)
    kind, name = array.type, column.name
    chunks = array.chunks or [pa.array([], kind)]
    if isinstance(kind, pa.BaseExtensionType):
        arrays = [_tensor(chunk, name) for chunk in chunks]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        arrays = [_equal_lists(chunk, name) for chunk in chunks]
    elif pa.types.is_fixed_size_binary(kind) and column.shape is not None:
        arrays = [_raw(chunk, column) for chunk in chunks]
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        arrays = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_duration(kind):
        arrays = [chunk.to_numpy(zero_copy_only=False).astype(np.int64) for chunk in chunks]
    else:
        raise ConfigError(
            "A column that a model is fed with must hold numbers, tensors, lists of equal length, or strings",
            f"{name!r} of type {kind}",
            "Convert it with Ray Data's map_batches",
        )
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def filled(table: pa.Table, column: Column) -> pa.ChunkedArray:
    """Returns the column with nulls replaced, also inside lists or tensors, and decoded if it is a dictionary."""
    array = table.column(column.name)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    missing = [sum(counts) for counts in zip(*(_nulls(chunk) for chunk in array.chunks), strict=True)]
    if not any(missing) and not _encoded(array.type):
        return array
    if any(missing) and column.fill is None:
        whole, *nested = missing
        counts = [f"{whole} null(s)"] * bool(whole) + [f"{sum(nested)} null(s) inside the rows"] * any(nested)
        raise ConfigError(
            "A column that a model is fed with must hold no nulls, unless it defines what replaces them",
            f"{' and '.join(counts)} of {column.name!r}, {array.type}",
            f"Use raytf.Column({column.name!r}, fill=...), or --fill {column.name}=VALUE of a command, or drop them "
            "with Ray Data",
        )
    return pa.chunked_array([_complete(chunk, column) for chunk in array.chunks])


def _in_one(array: pa.ChunkedArray) -> pa.Array:
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # would copy a single chunk too


def _nulls(array: pa.Array) -> list[int]:
    """Returns the numbers of nulls: of rows, of values in them if these are lists or tensors, and so on."""
    if isinstance(array, pa.ExtensionArray):
        return _nulls(array.storage)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(array.type):
        nested = [_nulls(part) for part in array.flatten()]
        return [array.null_count, sum(map(sum, nested))]
    return [array.null_count, *(_nulls(array.flatten()) if _has_values(array.type) else [])]


def _complete(array: pa.Array, column: Column) -> pa.Array:
    """Returns the array with nulls replaced by `fill`, of rows or inside them."""
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
    scalar, numbers = pa.scalar(value, kind), kind
    while _has_values(numbers):
        numbers = numbers.value_type
    if pa.types.is_integer(numbers) and not np.array_equal(scalar.as_py(), value):
        raise ValueError(value)  # Arrow truncates decimals
    return scalar


def _encoded(kind: pa.DataType) -> bool:
    return pa.types.is_dictionary(kind) or (_has_values(kind) and _encoded(kind.value_type))


def _has_values(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _of_one_type(tables: Sequence[pa.Table], names: Sequence[str]) -> Sequence[pa.Table]:
    """Returns tables in which columns of only nulls, or of empty lists, have the type of the other tables."""
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


def are_typed(tables: Sequence[pa.Table], column: Column) -> bool:
    """Returns whether a column has values; else what fills it has the type of `fill`."""
    return not all(_untyped(table.schema.field(column.name).type) for table in tables)


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
    width, remainder = divmod(len(values), rows) if rows else (0, 0)
    lengths = chunk.value_lengths().to_numpy() if rows and not pa.types.is_fixed_size_list(chunk.type) else width
    if remainder or np.any(lengths != width):
        raise ConfigError(
            "A list column must hold lists of one length, unless it defines how to treat others",
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
