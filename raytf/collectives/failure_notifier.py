"""Sends the first cause of a ring's end to all members: lost rank, reason, and the rank that noticed it.

Each member has a control connection to both neighbours. Nothing is sent on it until the ring ends, so that Linux probes
the other host's kernel. A thread reads it also while the process computes, and forwards causes. The kernel reports the
death of a process: a process that holds Python's lock for long is not lost.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_TEXT_BYTES = 400
# Generation, lost rank, rank that noticed it, whether running sums may finish and the text's bytes.
_MESSAGE = struct.Struct(f"<IIIBI{_TEXT_BYTES}s")


@dataclass(frozen=True)
class Cause:
    """The cause of a ring's end.

    Args:
        lost: Rank of the lost member.
        seen_by: Rank of the member that noticed the loss first.
        why: Reason, as a clause that follows "worker N".
        departed: Whether the member closed the ring itself. Data that it sent before is still on its way and counts.
    """

    lost: int
    seen_by: int
    why: str
    departed: bool = False

    def __str__(self) -> str:
        seen = "" if self.seen_by == self.lost else f" (seen by worker {self.seen_by})"
        return f"worker {self.lost} {self.why}{seen}"


def pack(cause: Cause, generation: int) -> bytes:
    """Returns a message of fixed size; a text that is too long is cut."""
    text = cause.why.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
    return _MESSAGE.pack(generation, cause.lost, cause.seen_by, cause.departed, len(text), text)


def unpack(message: bytes, generation: int) -> Cause | None:
    """Returns the cause of a message of `pack`, or None for another generation."""
    received, lost, seen_by, departed, length, text = _MESSAGE.unpack(message)
    return (
        Cause(lost, seen_by, text[:length].decode(errors="replace"), bool(departed)) if received == generation else None
    )


class FailureNotifier:
    """Listens on the control connections of a member, in its own thread, until `close`.

    Args:
        rank, generation: Rank and generation of this member.
        channels: (rank of the neighbour, non-blocking socket) for both neighbours.
    """

    def __init__(self, rank: int, generation: int, channels: Sequence[tuple[int, socket.socket]]):
        self._rank, self._generation = rank, generation
        self._channels = {channel.fileno(): (neighbour, channel) for neighbour, channel in channels}
        self._received = dict.fromkeys(self._channels, b"")
        self._departed: set[int] = set()  # connections whose other end announced that it leaves
        self._lock = threading.Lock()
        self._cause: Cause | None = None
        self._known, self._closed = threading.Event(), False
        # readable when sums must end, and when the thread must end
        self._alarm, self._set_alarm = socket.socketpair()
        self._stop, self._set_stop = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="raytf-ring-notifier", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable as soon as a sum cannot be finished."""
        return self._alarm.fileno()

    def cause(self, seconds: float = 0.0) -> Cause | None:
        """Returns the first cause that this member received; waits up to `seconds` for one."""
        self._known.wait(seconds)
        return self._cause

    @property
    def loss(self) -> Cause | None:
        """The known cause, unless that member left the ring itself. With a loss, no exchange begins."""
        cause = self._cause
        return None if cause is None or cause.departed else cause

    def notify(self, cause: Cause) -> Cause:
        """Sends a cause to both neighbours, unless another cause came first. Returns the cause that counts.

        A member that left after the last sum ends no sum of others. A cause that ends a sum replaces it.
        """
        with self._lock:
            if self._closed or (self._cause is not None and (cause.departed or not self._cause.departed)):
                return self._cause or cause
            self._cause = cause
            self._send(cause)
            if not cause.departed:
                self._set_alarm.send(b"\1")
            self._known.set()
            return cause

    def close(self) -> None:
        """Leaves the ring; neighbours without another cause receive that this member left."""
        leaving = Cause(self._rank, self._rank, "left the ring", departed=True)
        first = self.notify(leaving)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if first.departed and first != leaving:  # otherwise the closed connections would look like a death
                self._send(leaving)
            self._set_stop.send(b"\1")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._close_sockets()

    def abandon(self) -> None:
        """Closes a fork's copies of the connections without a message: the parent process still uses them."""
        self._lock = threading.Lock()  # the thread that held it at the fork does not exist here
        self._closed = True
        self._cause = Cause(self._rank, self._rank, "is another process, of which this one is a fork")
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in (*(sock for _, sock in self._channels.values()), self._set_stop, self._stop, self._set_alarm):
            sock.close()
        self._alarm.close()

    def _send(self, cause: Cause) -> None:
        message = pack(cause, self._generation)
        for _, channel in self._channels.values():
            with contextlib.suppress(OSError):  # that neighbour is lost, or left for the same cause
                channel.send(message)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for number in self._channels:
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number not in self._channels:
                    return
                if not self._receive(number):
                    poll.unregister(number)

    def _receive(self, number: int) -> bool:
        """Reads a message from a connection, and returns whether more may come."""
        neighbour, channel = self._channels[number]
        try:
            came = channel.recv(_MESSAGE.size - len(self._received[number]))
        except BlockingIOError:
            return True
        except OSError as error:
            if number not in self._departed:  # a member that leaves with unread data resets the connection
                self.notify(Cause(neighbour, self._rank, f"is lost: {describe_error(error)}"))
            return False
        if not came:
            if number not in self._departed:
                self.notify(Cause(neighbour, self._rank, "is lost: its process closed the connection"))
            return False
        self._received[number] += came
        if len(self._received[number]) < _MESSAGE.size:
            return True
        message, self._received[number] = self._received[number], b""
        cause = unpack(message, self._generation)
        if cause is not None:
            if cause.departed and cause.lost == neighbour:
                self._departed.add(number)
            self.notify(cause)
        return True


def describe_error(error: OSError) -> str:
    """Returns the meaning of a connection's error, as a clause."""
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"its host does not answer any more ({error.strerror})"
    return f"{type(error).__name__}: {error}"
