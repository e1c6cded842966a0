"""Files that callbacks of several workers write: one warning where two processes of a host have opened the same.

Looks at the first epoch that ends: at what Python's `open` is asked for while callbacks run. What libraries open
themselves (HDF5, TensorFlow's) is not seen.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable

import keras
import numpy as np

# Each file counts in one of so many places; two different ones in one place, among a few, are rare.
_PLACES = 1 << 14
# The paths that are noted at present, or None; an audit hook stays for the life of a process.
_noted: set[str] | None = None
_hooked = False


def _hook(event: str, arguments) -> None:
    if event != "open" or _noted is None or not isinstance(arguments[0], (str, os.PathLike)):
        return
    if isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        _noted.add(os.path.realpath(os.fsdecode(arguments[0])))


def note(on: bool) -> set[str]:
    """Begins, or ends, to note what is opened for writing; gives what was noted."""
    global _noted, _hooked
    if on and not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    found, _noted = _noted or set(), set() if on else None
    return found


_looks: list[weakref.ref] = []


def looking() -> bool:
    """Whether the end of an epoch is still to be looked at in the `fit` that runs, as on all its workers."""
    before = _looks[0]() if _looks else None
    return before is not None and before.looking


class Before(keras.callbacks.Callback):
    """Stands before the user's callbacks, as `After` stands behind them."""

    raytf_local_batches = True

    def __init__(self):
        super().__init__()
        self.looking = True
        _looks[:] = [weakref.ref(self)]

    def on_epoch_end(self, epoch, logs=None):
        if self.looking:
            note(True)


class After(keras.callbacks.Callback):
    """Compares what the workers' callbacks wrote at the end of the first epoch; every worker must have one.

    Args:
        before: the `Before` of this worker.
        names: of the classes of callbacks that may have written.
        total: total(array) -> the sum over all workers.
        chief: whether this worker warns.
    """

    raytf_local_batches = True

    def __init__(self, before: Before, names: list[str], total: Callable[[np.ndarray], np.ndarray], chief: bool):
        super().__init__()
        self._before, self._names, self._total, self._chief = before, names, total, chief

    def on_epoch_end(self, epoch, logs=None):
        if not self._before.looking:
            return
        self._before.looking = False
        paths = {_place(path): path for path in sorted(note(False))}
        mine = np.zeros(_PLACES, np.int32)
        mine[list(paths)] = 1
        everyones = self._total(mine)
        shared = [path for place, path in paths.items() if everyones[place] > 1 and os.path.isfile(path)]
        if shared and self._chief:
            warnings.warn(
                f"Callbacks of several workers write {', '.join(shared)}: keep the one that does (of "
                f"{', '.join(self._names)}) to the chief with raytf.on_chief(callback), or give each worker a file of "
                "its own",
                stacklevel=2,
            )


def _place(path: str) -> int:
    """Where a file of this host counts; whether the same path on another host is the same file is not known."""
    return zlib.crc32(f"{socket.gethostname()}:{path}".encode()) % _PLACES
