"""Files assembled from pieces of memory without copies: archives of arrays, and of members."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

# Smaller pieces are copied, as zipfile overwrites its headers after it has written the content.
_SMALL = 1 << 12


class ScatteredFile(io.RawIOBase):
    """A file in memory that keeps large writes by reference; small ones are copied and can be overwritten.

    Written memory must not change until `pieces` were used.
    """

    def __init__(self):
        super().__init__()
        self._pieces: list[tuple[int, bytearray | memoryview]] = []
        self._offset = self._size = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        return self._offset

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        if self._offset < self._size:
            self._write_over(view)
        elif len(view):
            self._pieces.append((self._offset, bytearray(view) if len(view) < _SMALL else view))
            self._size += len(view)
        self._offset += len(view)
        return len(view)

    def _write_over(self, view: memoryview) -> None:
        for begin, piece in self._pieces:
            if (
                begin <= self._offset
                and self._offset + len(view) <= begin + len(piece)
                and isinstance(piece, bytearray)
            ):
                piece[self._offset - begin : self._offset - begin + len(view)] = view
                return
        raise io.UnsupportedOperation("only what was written in one small piece can be written over")

    def pieces(self) -> list[bytearray | memoryview]:
        """Returns the written pieces, in order."""
        return [piece for _, piece in self._pieces]


def zip_pieces(members: Iterable[tuple[str, memoryview | bytes | list]]) -> list:
    """Returns the pieces of a zip file with uncompressed members.

    Args:
        members: (name, content) of each, in order; a content may itself be a list of pieces.
    """
    file = ScatteredFile()
    with zipfile.ZipFile(file, "w") as made:
        for name, content in members:
            if not isinstance(content, list):
                made.writestr(name, content)
                continue
            with made.open(name, "w", force_zip64=total_size(content) > zipfile.ZIP64_LIMIT // 2) as member:
                for piece in content:
                    member.write(memoryview(piece))
    return file.pieces()


def npz_pieces(arrays: Mapping[str, np.ndarray]) -> list:
    """Returns the pieces of an `.npz` file, as `numpy.savez` writes it; the arrays must be contiguous."""
    file = ScatteredFile()
    with zipfile.ZipFile(file, "w") as made:
        for name, array in arrays.items():
            with made.open(f"{name}.npy", "w", force_zip64=array.nbytes > zipfile.ZIP64_LIMIT // 2) as member:
                header = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(member, header)
                if array.nbytes:
                    member.write(memoryview(array.reshape(-1).view(np.uint8)))
    return file.pieces()


def crc32(pieces: Iterable) -> int:
    """Returns the checksum of consecutive pieces."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def total_size(pieces: Iterable) -> int:
    """Returns the total bytes of the pieces."""
    return sum(map(len, pieces))


def chunks(pieces: Iterable, most: int) -> Iterator[memoryview]:
    """Yields the pieces in parts of at most `most` bytes."""
    for piece in pieces:
        view = memoryview(piece)
        for begin in range(0, len(view), most):
            yield view[begin : begin + most]
