"""Files of which only arrays change: they are laid out once, and then these are copied into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


class Image:
    """A file in which only arrays change, at fixed places, without these: what is between them lies in each buffer.

    Args:
        size: bytes of the file.
        texts: (offset, bytes) of what is in no place, in order.
        places: where each array lies, as (offset, bytes).
    """

    def __init__(self, size: int, texts: Sequence[tuple[int, bytes]], places: Sequence[tuple[int, int]]):
        self.size, self.texts, self.places = size, list(texts), list(places)

    @classmethod
    def of(cls, content: bytes, places: Sequence[tuple[int, int]]) -> Image:
        """That of a file as it was written once.

        Args:
            content: of the file.
            places: where arrays lie, as (offset, bytes).
        """
        texts, at = [], 0
        for begin, size in sorted(place for place in places if place[1]):
            texts += [(at, content[at:begin])] if begin > at else []
            at = begin + size
        return cls(len(content), [*texts, *([(at, content[at:])] if at < len(content) else [])], places)

    def pieces(self, values: Sequence[np.ndarray]) -> list:
        """The file with these arrays, as pieces of memory one after the other; arrays that are contiguous by reference.

        Args:
            values: one for each place.
        """
        arrays = [(at, flat(value)) for (at, size), value in zip(self.places, values, strict=True) if size]
        return [piece for _, piece in sorted([*self.texts, *arrays], key=lambda piece: piece[0])]


def flat(value: np.ndarray) -> np.ndarray:
    """The bytes of an array; of its own memory where that is contiguous."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Archive:
    """A zip file of members that are not packed.

    Args:
        members: (name, content) in order; content is bytes, or the `image`.
        image: the member whose arrays are `values`.
        values: an array for each of the image's places, of as many bytes.
    """

    members: Sequence[tuple[str, bytes | Image]]
    image: Image
    values: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file that is an image with its values, as a range of another one is.

    Args:
        image: all of the file.
        values: an array for each of the image's places, of as many bytes.
    """

    image: Image
    values: Sequence[np.ndarray]
