"""Memory that processes of one host have in common: one lays down what it sends, and its neighbour reads it there.

It has no name, in `/dev/shm` or elsewhere: the neighbour gets its descriptor over their connection, and the kernel
frees it with the last process that holds it, however that one ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict

import numpy as np

from raytf.errors import RaytfError

# Of addresses, not of memory: the kernel gives pages when they are written first.
_MOST_BYTES = 1 << 36
# How far apart the sizes of blocks are: an eighth, so that arrays of about one size use the same ones.
_SIZES_A_DOUBLING = 8


class Own:
    """Memory of this process, in blocks that are used again when their arrays are gone.

    Attributes:
        descriptor: to be sent to the neighbour; `sent()` closes it.

    Raises:
        OSError: the system gives none.
    """

    def __init__(self):
        if sys.platform != "linux":
            raise OSError("only Linux has memory without a name")
        self.descriptor = os.memfd_create("raytf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.sent = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _MOST_BYTES)
        # who reads beyond the end of a file is killed
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self.descriptor, _MOST_BYTES)
        self._begin = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._end, self._lock = 0, threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def empty(self, items: int, dtype: np.dtype) -> np.ndarray | None:
        """A flat array that begins at a page, of any content; None where all addresses are taken."""
        count = items * dtype.itemsize
        size = _size(count)
        with self._lock:
            if self._free[size]:
                place = self._free[size].pop()
            elif self._end + size <= _MOST_BYTES:
                place, self._end = self._end, self._end + size
            else:
                return None
        block = np.frombuffer(self._memory, np.uint8, count, place)
        weakref.finalize(block, self._free[size].append, place).atexit = False  # all views of it keep it
        return block.view(dtype)

    def place(self, array: np.ndarray) -> int | None:
        """Where a contiguous array begins, in bytes; None if it lies elsewhere."""
        place = array.ctypes.data - self._begin
        return place if 0 <= place < _MOST_BYTES else None


class Neighbours:
    """Memory of another process, to be read.

    Args:
        descriptor: that it sent; it is closed.

    Raises:
        OSError: it cannot be had in this process.
    """

    def __init__(self, descriptor: int):
        try:
            self._bytes = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, self._bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def at(self, place: int, count: int) -> np.ndarray:
        """So many bytes that begin there.

        Raises:
            RaytfError: they are not in this memory.
        """
        if place + count > self._bytes:
            raise RaytfError(
                f"What a worker shares with another is in its shared memory of {self._bytes} bytes, received: {count} "
                f"bytes at {place}. Start all workers with one version of raytf."
            )
        return np.frombuffer(self._memory, np.uint8, count, place)


def _size(count: int) -> int:
    """Bytes of a block for so many: whole pages, and of few sizes."""
    step = max(mmap.PAGESIZE, (1 << max(0, count - 1).bit_length()) // (2 * _SIZES_A_DOUBLING))
    return max(1, -(-count // step)) * step
