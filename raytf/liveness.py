"""Detects stopped and dead processes from another process of the same host; a long computation is neither.

Linux reports the state (`procfs.read_state`) without the process' help, also in a long step or with Python's lock held.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

from raytf import timeouts
from raytf.procfs import ProcessState

# Seconds after which a process stopped by SIGSTOP or a debugger counts as lost, unless it continues before.
# TensorFlow's coordination service gives up the others after 22 s, and names the wrong one: this must be earlier.
STOPPED_INTERVAL = 10.0
# Seconds between two checks.
POLL_INTERVAL = 2.0

_WORDS = {
    "T": "stopped by a signal (SIGSTOP?)",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep without using its processor: a disk or file system does not answer it",
    "Z": "dead, though its parent has not noticed it",
    "X": "gone",
}


def describe_stop(state: str) -> str | None:
    """Returns how the kernel stops a process in this state, as a clause after "it is"; else None."""
    return _WORDS.get(state) if state in "Tt" else None


class StopWatch:
    """Detects from states of one process that it has been stopped for too long.

    Args:
        seconds: Timeout of a stop in seconds.
        clock: Function that returns seconds, for tests.

    Attributes:
        stopped_how: How the process was stopped at the last check, as a clause; None if it was not.
    """

    def __init__(self, seconds: float = STOPPED_INTERVAL, clock: Callable[[], float] = time.monotonic):
        self._limit, self._clock = seconds, clock
        self.stopped_how: str | None = None
        self._last: ProcessState | None = None
        self._stopped_at: float | None = None

    def update(self, state: ProcessState | None) -> str | None:
        """Processes the next state (None: no such process). Returns a clause after "it is" at a timeout, else None."""
        last, self._last = self._last, state or self._last
        if last is not None and state is not None and state.started != last.started:
            self._last, state = last, None  # another process has its pid
        letter = _letter(last, state)
        self.stopped_how = _WORDS.get(letter)
        if self.stopped_how is None:
            self._stopped_at = None
            return None
        time_now = self._clock()
        if self._stopped_at is None:
            self._stopped_at = time_now
        limit = timeouts.get().uninterruptible if letter == "D" else self._limit
        return (
            f"{self.stopped_how}, for {time_now - self._stopped_at:.0f} s"
            if time_now - self._stopped_at >= limit
            else None
        )


def _letter(last: ProcessState | None, seen: ProcessState | None) -> str:
    """Returns Linux' letter for a stopped process, "R" for a running one, "X" for one that has ended."""
    if seen is None:
        return "X"
    if seen.state == "D":
        return "D" if last is not None and seen.ticks == last.ticks else "R"
    return seen.state if seen.state in _WORDS else "R"


_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_same_user(connection: socket.socket) -> bool:
    """Returns whether the other end of a connected Unix socket belongs to this user, or to root.

    Any user of a host can bind an abstract name. The kernel records the user of an end at its `listen` or `connect`.
    Outside Linux the result is always True, as the user is unknown.

    Args:
        connection: A connected stream socket of the family AF_UNIX.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (os.getuid(), 0)
