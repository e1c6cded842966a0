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
        regions: (offset, bytes) of each array.
    """

    def __init__(self, size: int, texts: Sequence[tuple[int, bytes]], regions: Sequence[tuple[int, int]]):
        self.size, self.texts, self.regions = size, list(texts), list(regions)

    @classmethod
    def from_content(cls, content: bytes, regions: Sequence[tuple[int, int]]) -> FileTemplate:
        """Returns the template of a file from its content.

        Args:
            content: The file's content.
            regions: (offset, bytes) of the arrays.
        """
        texts, offset = [], 0
        for begin, size in sorted(region for region in regions if region[1]):
            texts += [(offset, content[offset:begin])] if begin > offset else []
            offset = begin + size
        return cls(len(content), [*texts, *([(offset, content[offset:])] if offset < len(content) else [])], regions)

    def pieces(self, values: Sequence[np.ndarray]) -> list:
        """Returns the file with these arrays as consecutive pieces of memory; contiguous arrays by reference.

        Args:
            values: One array for each region.
        """
        arrays = [
            (offset, flat_bytes(value)) for (offset, size), value in zip(self.regions, values, strict=True) if size
        ]
        return [piece for _, piece in sorted([*self.texts, *arrays], key=lambda piece: piece[0])]


def flat_bytes(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array; a view of its memory if it is contiguous."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class ZipTemplate:
    """A zip file of uncompressed members.

    Args:
        members: (name, content) in order; content is bytes, or the `template`.
        template: The member whose arrays are `values`.
        values: An array for each of the template's regions, with as many bytes.
    """

    members: Sequence[tuple[str, bytes | FileTemplate]]
    template: FileTemplate
    values: Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class TemplatePart:
    """A file that is one template with its values, such as a range of another template.

    Args:
        template: The whole file.
        values: An array for each of the template's regions, with as many bytes.
    """

    template: FileTemplate
    values: Sequence[np.ndarray]
