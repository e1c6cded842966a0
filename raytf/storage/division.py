"""Division of a checkpoint's model file among the workers that write it at once; the parts in order are the file. Pure.

    cat model.keras.* > model.keras

Workers write ranges of the weights, which all of them have; the chief writes the first range with what is before the
weights in the file, and what is behind them. A part's name holds its checksum, so that the chief, which has all of the
bytes, sees by the name alone whether a worker has written what belongs there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raytf.storage import scattered
from raytf.storage.images import Archive, Image, Piece, flat


def ranges(size: int, count: int) -> list[tuple[int, int]]:
    """(begin, end) of `count` ranges, nearly alike, of so many bytes."""
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def prefix(file: str, index: int) -> str:
    """How the name of a part begins."""
    return f"{file}.{index:04d}-"


def name_of(file: str, index: int, pieces: Sequence) -> str:
    """The name of a part that has these bytes."""
    return f"{prefix(file, index)}{scattered.crc32(pieces):08x}"


def split(pieces: Sequence, count: int) -> list[list]:
    """The parts of a file, `count` and one more, which is what is behind the weights.

    Args:
        pieces: of the file; the largest is that of the weights.
        count: of the workers that write.
    """
    views = [memoryview(piece) for piece in pieces]
    at = max(range(len(views)), key=lambda i: len(views[i]))
    cut = [views[at][begin:end] for begin, end in ranges(len(views[at]), count)]
    return [[*views[:at], cut[0]], *([one] for one in cut[1:]), views[at + 1 :]]


class Cutter:
    """Cuts one range out of a file's weights, again and again.

    Args:
        index: of the range, 0 <= index < count.
        count: ranges in all.

    Attributes:
        of: (index, count).
    """

    def __init__(self, index: int, count: int):
        self.of = index, count
        self._image_of: Image | None = None

    def piece(self, archive: Archive) -> Piece:
        """The range as it is in an archive now."""
        if self._image_of is not archive.image:
            self._image_of = archive.image
            index, count = self.of
            begin, end = ranges(archive.image.size, count)[index]
            self._parts = [  # (which array, its bytes from, to)
                (i, max(begin - at, 0), min(end - at, size))
                for i, (at, size) in enumerate(archive.image.places)
                if max(at, begin) < min(at + size, end)
            ]
            places = [
                (max(archive.image.places[i][0], begin) - begin, until - since) for i, since, until in self._parts
            ]
            texts = [
                (max(at, begin) - begin, text[max(begin - at, 0) : end - at])
                for at, text in archive.image.texts
                if max(at, begin) < min(at + len(text), end)
            ]
            self._image = Image(end - begin, texts, places)
        return Piece(self._image, [flat(archive.values[i])[since:until] for i, since, until in self._parts])


def layout(image: Image) -> int:
    """A number that is the same for images with the same arrays at the same places, whatever these hold."""
    places = [image.size, *(number for place in image.places for number in place), *(at for at, _ in image.texts)]
    return scattered.crc32([np.array(places, np.int64).tobytes(), *(text for _, text in image.texts)])
