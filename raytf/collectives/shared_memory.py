"""Memory shared by processes of one host: a process writes what it sends, and its neighbour reads it there.

It has no name, in `/dev/shm` or elsewhere: the neighbour receives its descriptor over their connection. The kernel
frees it with the last process that holds it, however that process ends.
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

# Bytes of addresses, not of memory: the kernel allocates pages at the first write.
_MOST_BYTES = 1 << 36
# Sizes of blocks differ by an eighth, so that arrays of about one size reuse the same ones.
_SIZES_A_DOUBLING = 8


class OwnMemory:
    """Memory of this process, in blocks that are reused when their arrays are gone.

    Attributes:
        descriptor: File descriptor to send to the neighbour; `sent()` closes it.

    Raises:
        OSError: The system provides no such memory.
    """

    def __init__(self):
        if sys.platform != "linux":
            raise OSError("only Linux has memory without a name")
        self.descriptor = os.memfd_create("raytf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.sent = weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _MOST_BYTES)
        # a process that reads beyond the end of a file is killed
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self.descriptor, _MOST_BYTES)
        self._begin = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._end, self._lock = 0, threading.Lock()
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def empty(self, items: int, dtype: np.dtype) -> np.ndarray | None:
        """Returns a flat, uninitialized array that begins at a page, or None if all addresses are in use."""
        count = items * dtype.itemsize
        size = _size(count)
        with self._lock:
            if self._free[size]:
                offset = self._free[size].pop()
            elif self._end + size <= _MOST_BYTES:
                offset, self._end = self._end, self._end + size
            else:
                return None
        block = np.frombuffer(self._memory, np.uint8, count, offset)
        weakref.finalize(block, self._free[size].append, offset).atexit = False  # all views keep the block alive
        return block.view(dtype)

    def offset_of(self, array: np.ndarray) -> int | None:
        """Returns the offset of a contiguous array in bytes, or None if it is not in this memory."""
        offset = array.ctypes.data - self._begin
        return offset if 0 <= offset < _MOST_BYTES else None


class PeerMemory:
    """Memory of another process, for reading.

    Args:
        descriptor: File descriptor from that process; it is closed.

    Raises:
        OSError: The memory cannot be mapped.
    """

    def __init__(self, descriptor: int):
        try:
            self._bytes = os.fstat(descriptor).st_size
            self._memory = mmap.mmap(descriptor, self._bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def read(self, offset: int, count: int) -> np.ndarray:
        """Returns `count` bytes from the offset `offset`.

        Raises:
            RaytfError: They are not in this memory.
        """
        if offset + count > self._bytes:
            raise RaytfError(
                f"What a worker shares with another is in its shared memory of {self._bytes} bytes, received: {count} "
                f"bytes at {offset}. Start all workers with one version of raytf."
            )
        return np.frombuffer(self._memory, np.uint8, count, offset)


def _size(count: int) -> int:
    """Returns the size of a block for `count` bytes: whole pages, and one of few sizes."""
    step = max(mmap.PAGESIZE, (1 << max(0, count - 1).bit_length()) // (2 * _SIZES_A_DOUBLING))
    return max(1, -(-count // step)) * step
