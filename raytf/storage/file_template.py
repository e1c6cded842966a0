"""Files in which only arrays change: laid out once, then the arrays are copied in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


class FileTemplate:
    """Layout of a file in which only arrays change, at fixed offsets; the bytes between them stay in each buffer.

    Args:
        size: Bytes of the file.
        texts: (offset, bytes) of the constant content, in order.
        places: (offset, bytes) of each array.
    """

    def __init__(self, size: int, texts: Sequence[tuple[int, bytes]], places: Sequence[tuple[int, int]]):
        self.size, self.texts, self.places = size, list(texts), list(places)

    @classmethod
    def from_content(cls, content: bytes, places: Sequence[tuple[int, int]]) -> FileTemplate:
        """Returns the image of a file from its content.

        Args:
            content: The file's content.
            places: (offset, bytes) of the arrays.
        """
        texts, offset = [], 0
        for begin, size in sorted(region for region in places if region[1]):
            texts += [(offset, content[offset:begin])] if begin > offset else []
            offset = begin + size
        return cls(len(content), [*texts, *([(offset, content[offset:])] if offset < len(content) else [])], places)

    def pieces(self, values: Sequence[np.ndarray]) -> list:
        """Returns the file with these arrays as consecutive pieces of memory; contiguous arrays by reference.

        Args:
            values: One array for each place.
        """
        arrays = [
            (offset, flat_bytes(value)) for (offset, size), value in zip(self.places, values, strict=True) if size
        ]
        return [piece for _, piece in sorted([*self.texts, *arrays], key=lambda piece: piece[0])]


def flat_bytes(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array; a view of its memory if it is contiguous."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class ZipTemplate:
    """A zip file of uncompressed members.

    Args:
        members: (name, content) in order; content is bytes, or the `image`.
        image: The member whose arrays are `values`.
        values: An array for each of the image's places, with as many bytes.
    """

    members: Sequence[tuple[str, bytes | FileTemplate]]
    image: FileTemplate
    values: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class TemplatePart:
    """A file that is one image with its values, such as a range of another image.

    Args:
        image: The whole file.
        values: An array for each of the image's places, with as many bytes.
    """

    image: FileTemplate
    values: Sequence[np.ndarray]
