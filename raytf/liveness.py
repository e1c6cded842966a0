"""Whether a process lives, seen from another one of its host: a process that computes for long is not a stopped one.

Linux tells it (`procfs.look`) without asking the process, so that neither a long step nor Python's lock is in the way.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

from raytf import timeouts
from raytf.procfs import Look

# A process that is stopped for so long, by SIGSTOP or a debugger, is given up; one that goes on before is not.
# TensorFlow's coordination service gives up the others after 22 s, and blames the wrong one: this must come before.
STOPPED_INTERVAL = 10.0
# Between two looks.
LOOK_INTERVAL = 2.0

_WORDS = {
    "T": "stopped by a signal (SIGSTOP?)",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep without using its processor: a disk or file system does not answer it",
    "Z": "dead, though its parent has not noticed it",
    "X": "gone",
}


def held(state: str) -> str | None:
    """How the kernel holds a process of a state in which it runs no more, as a clause that follows "it is"; or None."""
    return _WORDS.get(state) if state in "Tt" else None


class StopWatch:
    """Judges the looks at one process: what is to be said when it has stood still for too long.

    Args:
        seconds: of a stop that is one too long.
        clock: gives seconds; for tests.

    Attributes:
        stands: how the process stood still at the last look, or None if it did not.
    """

    def __init__(self, seconds: float = STOPPED_INTERVAL, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock = seconds, clock
        self.stands: str | None = None
        self._last: Look | None = None
        self._since: float | None = None

    def judge(self, seen: Look | None) -> str | None:
        """Takes the next look (None: no such process); a clause that follows "it is", or None while all is well."""
        last, self._last = self._last, seen or self._last
        if last is not None and seen is not None and seen.started != last.started:
            self._last, seen = last, None  # another process has its number
        letter = _letter(last, seen)
        self.stands = _WORDS.get(letter)
        if self.stands is None:
            self._since = None
            return None
        now = self._clock()
        if self._since is None:
            self._since = now
        limit = timeouts.get().uninterruptible if letter == "D" else self._limit
        return f"{self.stands}, for {now - self._since:.0f} s" if now - self._since >= limit else None


def _letter(last: Look | None, seen: Look | None) -> str:
    """Linux' letter of what keeps a process from going on, "R" if nothing does, "X" if it is no more."""
    if seen is None:
        return "X"
    if seen.state == "D":
        return "D" if last is not None and seen.ticks == last.ticks else "R"
    return seen.state if seen.state in _WORDS else "R"


_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_own_peer(connection: socket.socket) -> bool:
    """Returns whether the other end of a connected Unix socket belongs to this user, or to root.

    Any user of a host can bind an abstract name. The kernel notes the user of an end at its `listen` or `connect`.
    Outside Linux nothing is known, and all are taken for own.

    Args:
        connection: a connected stream socket of the family AF_UNIX.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    noted = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(noted)
    return user in (os.getuid(), 0)
