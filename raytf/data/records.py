"""Records of TFRecord files: their features, and the index of a file. Needs neither Ray nor TensorFlow."""

from __future__ import annotations

import functools
import gzip
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from raytf.data.files import Files
from raytf.errors import ConfigError

PIECE_BYTES = 16 << 20  # about what one task reads
_CHUNK = 1 << 20
_LENGTH = struct.Struct("<Q")
TYPES = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.binary()}


@dataclass(frozen=True)
class Feature:
    """A feature of records, and its column.

    Args:
        name: Name of the column.
        key: Key in the record.
        dtype: "int64", "float32" or "string".
        shape: Shape of a value, or of each item of a list.
        lists: 0 for one value in each row, 1 for a list of values, 2 for a list of lists.
        default: Value of records without the feature, or None; for a sequence whether it may be missing.
        sequence: Whether it is a feature list of a `tf.train.SequenceExample`.
    """

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...] = ()
    lists: int = 0
    default: Any = None
    sequence: bool = False

    @property
    def type(self) -> pa.DataType:
        """Returns the Arrow type of the column."""
        kind = TYPES[self.dtype]
        if self.is_tensor:
            return pa.fixed_shape_tensor(kind, self.shape)
        for size in reversed(self.shape):
            kind = pa.list_(kind, size)
        for _ in range(self.lists):
            kind = pa.list_(kind)
        return kind

    @property
    def is_tensor(self) -> bool:
        """Returns whether rows are tensors of numbers."""
        return bool(self.shape) and not self.lists and self.dtype != "string"

    def __str__(self) -> str:
        size = ", ".join([*["any"] * self.lists, *map(str, self.shape)])
        return f"{self.name} {self.dtype}" + (f" ({size})" if size else "")


@dataclass(frozen=True)
class Records:
    """Consecutive records of a file, which one task reads.

    Args:
        path: The file.
        start, stop: Bytes of the file that hold them; of a compressed file, of its content.
        first: Number of the first record in the file, from 0.
        rows: Number of records.
        compression: "GZIP" or "".
    """

    path: str
    start: int
    stop: int
    first: int
    rows: int
    compression: str


def index(filesystem: fs.FileSystem, path: str, size: int) -> list[Records]:
    """Returns the pieces of a file: of a compressed file one, as that cannot be read from within.

    Raises:
        ConfigError: The file is cut off, damaged, or no TFRecord file.
    """
    if isinstance(filesystem, fs.LocalFileSystem):
        filesystem = fs.LocalFileSystem(use_mmap=True)  # reads only the pages of headers
    with filesystem.open_input_file(path) as file:
        head = file.read_at(min(12, size), 0)
        zipped = head[:2] == b"\x1f\x8b" and not (len(head) == 12 and _are_whole(_rows_at(head, [0]))[0])
        try:
            file.seek(0)
            content: Any = gzip.GzipFile(fileobj=file) if zipped else file
            headers, starts, end = _headers(content, None if zipped else size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(path, f"which gzip cannot read ({error})") from error
    whole = _are_whole(headers)
    if not whole.all():
        record = int(np.argmin(whole))
        damage = "whose first bytes are no record" if not record else f"whose record {record} is damaged"
        raise _damaged(path, f"{damage} (byte {starts[record]})")
    if end is not None:
        raise _damaged(path, f"whose record {end} is cut off")
    if not len(headers):
        return []
    bounds = [(0, len(headers))] if zipped else cut(np.array(starts[:-1], np.int64))
    return [Records(path, starts[a], starts[b], a, b - a, "GZIP" if zipped else "") for a, b in bounds]


def cut(positions: np.ndarray) -> list[tuple[int, int]]:
    """Returns (first, stop) of the pieces of about `PIECE_BYTES` of what has these ascending positions in bytes."""
    firsts = np.unique(positions // PIECE_BYTES, return_index=True)[1].tolist()
    return list(zip(firsts, [*firsts[1:], len(positions)], strict=True))


def _headers(file, size: int | None) -> tuple[np.ndarray, list[int], int | None]:
    """Returns the headers of records, where records start and end, and the one cut off, or None.

    Headers are uint8, (records, 12).
    """
    headers = [np.zeros((0, 12), np.uint8)]
    starts = [0]
    buffer, offset, position = b"", 0, 0
    while True:
        remainder = buffer[position - offset :]
        past = position > offset + len(buffer)
        if past and ((size or position) < position or file.seek(min(position, sys.maxsize)) < position):
            return np.concatenate(headers), starts, len(starts) - 2  # a compressed file is left at its end
        buffer, offset = remainder + file.read(_CHUNK), position
        if len(buffer) < 12:
            return np.concatenate(headers), starts, len(starts) - 1 if buffer else None
        count, last, unpack = len(starts), offset + len(buffer) - 12, _LENGTH.unpack_from
        while position <= last:
            # the length, its checksum, the data, its checksum
            position += unpack(buffer, position - offset)[0] + 16
            starts.append(position)
        headers.append(_rows_at(buffer, np.array(starts[count - 1 : -1]) - offset))


def _rows_at(content: bytes, positions: Sequence[int]) -> np.ndarray:
    """Returns 12 bytes from each of some positions: uint8, (positions, 12)."""
    return np.frombuffer(content, np.uint8)[np.asarray(positions)[:, None] + np.arange(12)]


def _are_whole(headers: np.ndarray) -> np.ndarray:
    """Returns for each header of 12 bytes whether its checksum, a masked CRC-32C, is that of its length."""
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    table = _crc_table()
    for i in range(8):
        crc = table[(crc ^ headers[:, i]) & 0xFF] ^ (crc >> np.uint32(8))
    crc = ~crc
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    return masked == np.ascontiguousarray(headers[:, 8:]).view("<u4")[:, 0]


@functools.cache
def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table.astype(np.uint32)


def _damaged(path: str, damage: str) -> ConfigError:
    return ConfigError(
        "A TFRecord file must hold whole records, plain or compressed by gzip",
        f"{path!r}, {damage}",
        "Write it again, or leave it out",
    )


# ------------------------------------------------------------------------------------------ names of features

# Number of records of the first file, and of other files, whose features are looked at, and of these files.
FIRST_RECORDS, OTHER_RECORDS, OTHER_FILES = 100, 10, 15
_LONGEST = 1 << 26


def first_names(files: Files) -> list[str] | None:
    """Returns the names of the features of the first records; None if they cannot be read without TensorFlow.

    These are the records from which `read_tfrecords` infers its columns.

    Args:
        files: The files, in the order in which they are read.
    """
    first, *others = [path for path, size in zip(files.paths, files.sizes, strict=True) if size] or [""]
    looked_at = [(first, FIRST_RECORDS), *((others[i], OTHER_RECORDS) for i in spread(len(others), OTHER_FILES))]
    names: dict[str, None] = {}
    try:
        for path, count in looked_at:
            with files.filesystem.open_input_stream(path) as file:
                for record in _first(file, count):
                    names |= dict.fromkeys(_names_in(record))
    except (OSError, ValueError, IndexError, struct.error):
        return None
    return sorted(names) or None


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, evenly spread."""
    return sorted({i * (count - 1) // max(1, most - 1) for i in range(most)}) if count else []


def _first(file, count: int) -> Iterator[bytes]:
    for _ in range(count):
        head = file.read(12)
        if not head:
            return
        (size,) = _LENGTH.unpack(head[:8])
        if size > _LONGEST:
            raise ValueError("a record that is too long")
        yield file.read(size)
        file.read(4)


def _names_in(record: bytes) -> Iterator[str]:
    """Yields the keys of a serialized `tf.train.Example`, or of a `SequenceExample`."""
    for _, features in _fields(record):
        for _, entry in _fields(features):
            yield from (value.decode() for number, value in _fields(entry) if number == 1)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of the fields of a protocol buffer that are messages or texts."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position, value, shift = position + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while position < len(message):
        tag = varint()
        if tag & 7 != 2:
            raise ValueError("no message of examples")
        size = varint()
        if position + size > len(message):
            raise ValueError("a message that is cut off")
        yield tag >> 3, message[position : position + size]
        position += size
