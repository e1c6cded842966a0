"""Digests of tables that do not depend on how their rows are divided into blocks, nor on Arrow's buffers. Pure.

Each column is one or several streams of bytes: its numbers, the lengths of its lists and texts, where it has nulls. A
block gives the CRC of its part of each stream, and CRCs of parts give that of the whole.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

# Of a sample: rows in a piece, and how many pieces about.
_PIECE, _PIECES = 16, 4096
_POLYNOMIAL = 0xEDB88320


def stride(rows: int) -> int:
    """Of so many rows in all, that many lie between the beginnings of two pieces of a sample."""
    return max(16 * _PIECE, rows // _PIECES)


def digest(table: pa.Table, start: int, stride: int = 1) -> dict[str, tuple[int, int]]:
    """The CRC and the length of a block's part of each stream.

    Args:
        table: at least one row.
        start: rows that come before it.
        stride: 1 for all rows, or see `stride`.

    Returns:
        {"column type stream": (crc, bytes)}.
    """
    found: dict[str, list[int]] = {}
    for first, part in _sample(table, start, stride):
        for name, column in zip(part.column_names, part.columns, strict=True):
            at = first
            for chunk in column.chunks:
                for stream, data in _streams(chunk, functools.partial(np.arange, at, at + len(chunk))):
                    crc = found.setdefault(f"{name} {_type(column.type)} {stream}", [0, 0])
                    crc[0], crc[1] = zlib.crc32(data, crc[0]), crc[1] + len(data)
                at += len(chunk)
    return {name: (crc, length) for name, (crc, length) in found.items()}


def joined(digests: Iterable[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """The digest of all rows, of those of blocks in order."""
    whole: dict[str, tuple[int, int]] = {}
    for part in digests:
        for name, (crc, length) in part.items():
            before = whole.get(name, (0, 0))
            whole[name] = (_combined(before[0], crc, length), before[1] + length)
    return whole


def _sample(table: pa.Table, start: int, stride: int) -> Iterator[tuple[int, pa.Table]]:
    if stride == 1:
        yield start, table
        return
    end = start + table.num_rows
    for piece in range(start // stride * stride, end, stride):
        first, last = max(piece, start), min(piece + _PIECE, end)
        if first < last:
            yield first, table.slice(first - start, last - first)


def _type(kind: pa.DataType) -> str:
    return str(kind).replace("large_", "")


def _streams(array: pa.Array, places: Callable[[], np.ndarray]) -> Iterator[tuple[str, memoryview]]:
    """(name, bytes) of an array; `places()` are its values' numbers within their column."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield from _streams(array.dictionary_decode(), places)
        return
    nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    if nulls is not None and len(nulls):
        yield "nulls", _bytes(places()[nulls])
    if pa.types.is_null(kind):
        return
    elif pa.types.is_boolean(kind):
        yield "values", _bytes(array.fill_null(False).cast(pa.uint8()).to_numpy())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large(kind):
        yield from _texts(array)
    elif pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            yield from ((f"{field.name}.{name}", data) for name, data in _streams(child, places))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_fixed_size_list(kind):
            lengths = np.full(len(array), kind.list_size)
            lengths[[] if nulls is None else nulls] = 0
        else:
            lengths = array.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        yield "lengths", _bytes(lengths)
        within = functools.partial(_within, lengths, places)
        yield from ((f"item.{name}", data) for name, data in _streams(array.flatten(), within))
    elif pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind):
        yield "values", _fixed(array, nulls)
    else:  # kinds that are rare
        yield "values", memoryview(repr(array.to_pylist()).encode())


def _within(lengths: np.ndarray, places: Callable[[], np.ndarray]) -> np.ndarray:
    """A number for each item of lists, of its list's and of where it stands there."""
    firsts = np.cumsum(lengths) - lengths
    return np.repeat(places() * 1_000_003 - firsts, lengths) + np.arange(lengths.sum())


def _is_large(kind: pa.DataType) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)


def _texts(array: pa.Array) -> Iterator[tuple[str, memoryview]]:
    if array.null_count:  # what lies under a null is any text
        array = array.fill_null("" if "string" in str(array.type) else b"")
    width = np.int64 if _is_large(array.type) else np.int32
    buffers = array.buffers()
    offsets = np.frombuffer(buffers[1], width)[array.offset : array.offset + len(array) + 1]
    yield "lengths", _bytes(np.diff(offsets).astype(np.int64))
    if buffers[2] is not None and len(offsets):
        yield "values", memoryview(buffers[2])[int(offsets[0]) : int(offsets[-1])].cast("B")


def _fixed(array: pa.Array, nulls: np.ndarray | None) -> memoryview:
    width = array.type.bit_width // 8
    buffer = array.buffers()[1]
    raw = np.frombuffer(buffer, np.uint8)[array.offset * width : (array.offset + len(array)) * width]
    if nulls is not None and len(nulls):  # what lies under a null is any number
        raw = raw.copy().reshape(len(array), width)
        raw[nulls] = 0
    return _bytes(raw)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


# ------------------------------------------------------------------------------- the CRC of two parts, as zlib has it


def _combined(one: int, other: int, length: int) -> int:
    """The CRC of two texts in a row, of theirs and the bytes of the second."""
    return _times(_shift(length), one) ^ other if length else one


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total, i = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[i]
        vector >>= 1
        i += 1
    return total


@functools.cache
def _power(bits: int) -> tuple[int, ...]:
    """What 2**bits zero bits do to a CRC, as the columns of a matrix over two elements."""
    if bits == 0:
        return (_POLYNOMIAL, *(1 << i for i in range(31)))
    half = _power(bits - 1)
    return tuple(_times(half, column) for column in half)


@functools.lru_cache(1024)
def _shift(length: int) -> tuple[int, ...]:
    """What so many zero bytes do to a CRC."""
    matrix = tuple(1 << i for i in range(32))
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            matrix = tuple(_times(_power(bit + 3), column) for column in matrix)
    return matrix
