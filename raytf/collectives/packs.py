"""Packs in which a worker sends gradients, and each worker's share of their variables. Pure.

A pack is one array, in which each variable begins at an aligned offset. The ring sums it in as many equal segments as
there are workers. A worker's share of a variable is the part of it in the segment whose sum ends at that worker.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

# TensorFlow uses a NumPy array without a copy if its address is a multiple of this.
ALIGNED = 64


@functools.lru_cache(maxsize=1024)
def starts(sizes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the aligned items at which arrays begin in a pack, and the end of the last one."""
    step = ALIGNED // itemsize
    return tuple(itertools.accumulate((-(-size // step) * step for size in sizes), initial=0))


@functools.lru_cache(maxsize=1024)
def gaps(starts: tuple[int, ...], sizes: tuple[int, ...], end: int) -> tuple[slice, ...]:
    """Returns the items of a pack of `end` items in which no array is."""
    ends = (*starts[1:-1], end)
    return tuple(slice(a + size, b) for a, size, b in zip(starts, sizes, ends, strict=False) if a + size < b)


@dataclasses.dataclass(frozen=True)
class Pack:
    """Variables that are sent as one array.

    Args:
        indices: Indices of the variables, in the order of the array.
        sizes: Number of items of each.
        itemsize: Bytes of an item.
    """

    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Returns the first item of each variable, and the end of the last one."""
        return starts(self.sizes, self.itemsize)

    def shares(self, rank: int, workers: int) -> list[tuple[int, int]]:
        """Returns (begin, end) of a worker's share of each variable; an empty one is (0, 0)."""
        length = -(-self.starts[-1] // workers)
        first = segment_of(rank, workers) * length
        bounds = [
            (max(first - start, 0), min(first + length - start, size))
            for start, size in zip(self.starts, self.sizes, strict=False)
        ]
        return [(begin, end) if begin < end else (0, 0) for begin, end in bounds]


def segment_of(rank: int, workers: int) -> int:
    """Returns the number of the segment whose sum ends at a worker, see `Ring.reduce_scatter`."""
    return (rank + 1) % workers


def by_segment(workers: int) -> list[int]:
    """Returns the ranks in the order of their segments."""
    return sorted(range(workers), key=lambda rank: segment_of(rank, workers))


def packs(kinds: Sequence[tuple[int, object, int]], most_bytes: int) -> list[Pack]:
    """Returns the packs of variables, the last variables first, as the backward pass begins with these.

    Args:
        kinds: (number of items, dtype, bytes of an item) of each variable; a pack has one dtype.
        most_bytes: Largest size of a pack in bytes; a larger variable is a pack of its own.
    """
    groups: list[list[int]] = []
    filled, kind = 0, None
    for i in reversed(range(len(kinds))):
        size, dtype, itemsize = kinds[i]
        if not groups or dtype != kind or filled + size * itemsize > most_bytes:
            groups.append([])
            filled, kind = 0, dtype
        groups[-1].append(i)
        filled += size * itemsize
    return [Pack(tuple(indices), tuple(kinds[i][0] for i in indices), kinds[indices[0]][2]) for indices in groups]
