"""Warns once if callbacks of two workers on one host write the same file.

It records the files that Python's `open` opens while callbacks run at the end of the first epoch. Files that libraries
open themselves (HDF5, TensorFlow) are not seen.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
import zlib
from collections.abc import Callable

import keras
import numpy as np

from raytf.logs import warn_user

# Number of counters; each file uses one. Two of a few files rarely share one.
_COUNTERS = 1 << 14
# The recorded paths, or None; an audit hook cannot be removed from a process.
_noted: set[str] | None = None
_hooked = False


def _hook(event: str, arguments) -> None:
    # read once: another thread may end the recording meanwhile
    if event != "open" or (noted := _noted) is None or not isinstance(arguments[0], (str, os.PathLike)):
        return
    if isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        noted.add(os.path.realpath(os.fsdecode(arguments[0])))


def note(recording: bool) -> set[str]:
    """Starts or ends the recording of files opened for writing; returns the recorded paths."""
    global _noted, _hooked
    if recording and not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    paths, _noted = _noted or set(), set() if recording else None
    return paths


_recorders: list[weakref.ref] = []


def is_comparing() -> bool:
    """Returns whether the running `fit` still has to check the end of an epoch, as on all its workers."""
    callback = _recorders[0]() if _recorders else None
    return callback is not None and callback.is_comparing


class WriteRecorder(keras.callbacks.Callback):
    """Starts the recording before the user's callbacks; `WriteComparison` ends it after them."""

    raytf_local_batches = True

    def __init__(self):
        super().__init__()
        self.is_comparing = True
        _recorders[:] = [weakref.ref(self)]

    def on_epoch_end(self, epoch, logs=None):
        if self.is_comparing:
            note(True)


class WriteComparison(keras.callbacks.Callback):
    """Compares the files that the workers' callbacks wrote at the end of the first epoch; every worker must have one.

    Args:
        recorder: The `WriteRecorder` callback of this worker.
        names: Names of callback classes that may have written.
        total: total(array) -> the sum over all workers.
        chief: Whether this worker warns.
    """

    raytf_local_batches = True

    def __init__(
        self, recorder: WriteRecorder, names: list[str], total: Callable[[np.ndarray], np.ndarray], chief: bool
    ):
        super().__init__()
        self._recorder, self._names, self._total, self._chief = recorder, names, total, chief

    def on_epoch_end(self, epoch, logs=None):
        if not self._recorder.is_comparing:
            return
        self._recorder.is_comparing = False
        paths = {_counter_index(path): path for path in sorted(note(False))}
        written = np.zeros(_COUNTERS, np.int32)
        written[list(paths)] = 1
        everyones = self._total(written)
        shared = [path for index, path in paths.items() if everyones[index] > 1 and os.path.isfile(path)]
        if shared and self._chief:
            warn_user(
                f"Callbacks of several workers write {', '.join(shared)}: keep the one that does (of "
                f"{', '.join(self._names)}) to the chief with raytf.on_chief(callback), or give each worker a file of "
                "its own",
            )


def _counter_index(path: str) -> int:
    """Returns the counter of a file of this host; equal paths on different hosts count separately."""
    return zlib.crc32(f"{socket.gethostname()}:{path}".encode()) % _COUNTERS
