"""The first cause of a ring's end, told to all its members at once: who is lost, why, and who saw it.

Each member has a control connection with both neighbours, on which nothing is said until the ring ends, so that Linux
asks the other kernel whether it lives. A thread listens there also while the process computes, and passes on what it
learns. It is the kernel that tells of a process that has died: one that holds Python's lock for long is not lost.
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
# Generation, rank that is lost, who saw it, whether sums still to be finished may go on, and the text's bytes.
_MESSAGE = struct.Struct(f"<IIIBI{_TEXT_BYTES}s")


@dataclass(frozen=True)
class Cause:
    """Why a ring ends.

    Args:
        lost: rank of the member that the ring is without.
        seen_by: rank of the member that noticed it first.
        why: what it saw, as a clause that follows "worker N".
        left: whether it closed the ring itself, so that what it sent before is still on its way and counts.
    """

    lost: int
    seen_by: int
    why: str
    left: bool = False

    def __str__(self) -> str:
        seen = "" if self.seen_by == self.lost else f" (seen by worker {self.seen_by})"
        return f"worker {self.lost} {self.why}{seen}"


def pack(cause: Cause, generation: int) -> bytes:
    """A message of fixed size; a text that is too long is cut."""
    text = cause.why.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
    return _MESSAGE.pack(generation, cause.lost, cause.seen_by, cause.left, len(text), text)


def unpack(message: bytes, generation: int) -> Cause | None:
    """What `pack` made of a cause; None for one of another generation."""
    theirs, lost, seen_by, left, length, text = _MESSAGE.unpack(message)
    return Cause(lost, seen_by, text[:length].decode(errors="replace"), bool(left)) if theirs == generation else None


class Lookout:
    """Listens on the control connections of a member, in a thread of its own, until `close`.

    Args:
        rank, generation: this member's.
        channels: (rank of the neighbour, connection that does not block) for both neighbours.
    """

    def __init__(self, rank: int, generation: int, channels: Sequence[tuple[int, socket.socket]]):
        self._rank, self._generation = rank, generation
        self._channels = {one.fileno(): (other, one) for other, one in channels}
        self._heard = dict.fromkeys(self._channels, b"")
        self._left: set[int] = set()  # the connections whose other end said that it leaves
        self._lock = threading.Lock()
        self._cause: Cause | None = None
        self._known, self._closed = threading.Event(), False
        # readable when sums must end, and when the thread must
        self._alarm, self._set_alarm = socket.socketpair()
        self._stop, self._set_stop = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="raytf-ring-lookout", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Of what is readable as soon as a sum cannot be finished."""
        return self._alarm.fileno()

    def cause(self, seconds: float = 0.0) -> Cause | None:
        """The first cause that this member has heard of; waits so long for one."""
        self._known.wait(seconds)
        return self._cause

    @property
    def loss(self) -> Cause | None:
        """The cause that is known now, unless it is one that left: with it no exchange begins."""
        cause = self._cause
        return None if cause is None or cause.left else cause

    def tell(self, cause: Cause) -> Cause:
        """Tells both neighbours, unless another cause came first; the one that counts.

        One that left after the last sum ends nobody's sum: what does end one counts more.
        """
        with self._lock:
            if self._closed or (self._cause is not None and (cause.left or not self._cause.left)):
                return self._cause or cause
            self._cause = cause
            self._send(cause)
            if not cause.left:
                self._set_alarm.send(b"\1")
            self._known.set()
            return cause

    def close(self) -> None:
        """Leaves; neighbours that know of no other cause are told that this member left."""
        leaving = Cause(self._rank, self._rank, "left the ring", left=True)
        first = self.tell(leaving)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if first.left and first != leaving:  # else the end of the connections would tell of a death
                self._send(leaving)
            self._set_stop.send(b"\1")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._close_sockets()

    def abandon(self) -> None:
        """Lets go of the connections in a fork, without a word: they are those of the process that was forked."""
        self._lock = threading.Lock()  # who held it at the fork is not here
        self._closed = True
        self._cause = Cause(self._rank, self._rank, "is another process, of which this one is a fork")
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (*(one for _, one in self._channels.values()), self._set_stop, self._stop, self._set_alarm):
            one.close()
        self._alarm.close()

    def _send(self, cause: Cause) -> None:
        message = pack(cause, self._generation)
        for _, one in self._channels.values():
            with contextlib.suppress(OSError):  # that neighbour is the lost one, or has gone for the same cause
                one.send(message)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for number in self._channels:
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number not in self._channels:
                    return
                if not self._hear(number):
                    poll.unregister(number)

    def _hear(self, number: int) -> bool:
        """Takes what came on a connection; whether more may come."""
        other, one = self._channels[number]
        try:
            came = one.recv(_MESSAGE.size - len(self._heard[number]))
        except BlockingIOError:
            return True
        except OSError as error:
            if number not in self._left:  # one that left did not read what was on its way to it: a reset, too
                self.tell(Cause(other, self._rank, f"is lost: {said(error)}"))
            return False
        if not came:
            if number not in self._left:
                self.tell(Cause(other, self._rank, "is lost: its process has ended without a word"))
            return False
        self._heard[number] += came
        if len(self._heard[number]) < _MESSAGE.size:
            return True
        message, self._heard[number] = self._heard[number], b""
        cause = unpack(message, self._generation)
        if cause is not None:
            if cause.left and cause.lost == other:
                self._left.add(number)
            self.tell(cause)
        return True


def said(error: OSError) -> str:
    """What a connection's error means, as a clause."""
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"its host does not answer any more ({error.strerror})"
    return f"{type(error).__name__}: {error}"
