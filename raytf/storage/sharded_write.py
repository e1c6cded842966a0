"""Divides a checkpoint's model file among the workers that write it at once; its parts in order are the file. Pure.

    cat model.keras.* > model.keras

Each worker writes one range of the weights: all workers have them, or gather them together from their shares. The chief
writes the first range, and what precedes and follows the weights. A part's name holds its checksum: so the chief, which
has all bytes, can check a part by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raytf.compat.lazy_array import LazyArray
from raytf.storage import gather_io
from raytf.storage.file_template import FileTemplate, TemplatePart, ZipTemplate, flat_bytes


def ranges(size: int, count: int) -> list[tuple[int, int]]:
    """Returns (begin, end) of `count` nearly equal ranges of `size` bytes."""
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def part_prefix(file: str, index: int) -> str:
    """Returns the prefix of a part's name."""
    return f"{file}.{index:04d}-"


def part_name(file: str, index: int, pieces: Sequence) -> str:
    """Returns the name of a part with these bytes."""
    return f"{part_prefix(file, index)}{gather_io.crc32(pieces):08x}"


def split_file(pieces: Sequence, count: int) -> list[list]:
    """Splits a file into `count` parts, and one more with the bytes after the weights.

    Args:
        pieces: Pieces of the file; the largest holds the weights.
        count: Number of workers that write.
    """
    views = [memoryview(piece) for piece in pieces]
    weights = max(range(len(views)), key=lambda i: len(views[i]))
    cut = [views[weights][begin:end] for begin, end in ranges(len(views[weights]), count)]
    return [[*views[:weights], cut[0]], *([part] for part in cut[1:]), views[weights + 1 :]]


class RangeCutter:
    """Cuts one range out of a file's weights, repeatedly.

    Args:
        index: Index of the range, 0 <= index < count.
        count: Total number of ranges.

    Attributes:
        index_and_count: (index, count).
    """

    def __init__(self, index: int, count: int):
        self.index_and_count = index, count
        self._template_of: FileTemplate | None = None

    def piece(self, archive: ZipTemplate) -> TemplatePart:
        """Returns the range from the archive's current content."""
        if self._template_of is not archive.template:
            self._template_of = archive.template
            index, count = self.index_and_count
            begin, end = ranges(archive.template.size, count)[index]
            self._parts = [  # (index of the array, first byte, end byte)
                (i, max(begin - offset, 0), min(end - offset, size))
                for i, (offset, size) in enumerate(archive.template.regions)
                if max(offset, begin) < min(offset + size, end)
            ]
            regions = [
                (max(archive.template.regions[i][0], begin) - begin, stop - start) for i, start, stop in self._parts
            ]
            texts = [
                (max(offset, begin) - begin, text[max(begin - offset, 0) : end - offset])
                for offset, text in archive.template.texts
                if max(offset, begin) < min(offset + len(text), end)
            ]
            self._template = FileTemplate(end - begin, texts, regions)
        return TemplatePart(self._template, [_cut(archive.values[i], start, stop) for i, start, stop in self._parts])


def _cut(value: np.ndarray | LazyArray, begin: int, end: int) -> np.ndarray | LazyArray:
    """Returns some bytes of an array: a view, or those of a `LazyArray`, which is made when they are copied."""
    if isinstance(value, LazyArray):
        return LazyArray((end - begin,), np.dtype(np.uint8), lambda: flat_bytes(np.asarray(value))[begin:end])
    return flat_bytes(value)[begin:end]


def layout_checksum(template: FileTemplate) -> int:
    """Returns a checksum that is equal for templates with the same layout of arrays, whatever these hold."""
    regions = [
        template.size,
        *(number for region in template.regions for number in region),
        *(offset for offset, _ in template.texts),
    ]
    return gather_io.crc32([np.array(regions, np.int64).tobytes(), *(text for _, text in template.texts)])
