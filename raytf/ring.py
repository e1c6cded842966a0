"""A ring of sockets that sums arrays over processes: each sends to the next and hears from the one before.

The algorithm is the bandwidth-optimal ring all-reduce (Patarasuk and Yuan, 2009): every process sends 2 (n - 1) / n of
the array, first partial sums of segments, then the sums. Here the two halves flow as one stream: a piece is passed on
as soon as it has arrived and been added, so that the sockets work in both directions all the time. A segment is summed
along one path and then copied, so every process ends with the same bits.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from raytf.errors import PeerLostError, RaytfError

# Bytes that are received before they are added: small enough for a core's cache.
_CHUNK = 1 << 18
_SENT_AT_ONCE = 1 << 20
# Which sum, and how long: workers that disagree must not add what does not belong together.
_HEADER = struct.Struct("<QQ")
# Seconds without an answer from the other host's kernel after which it counts as gone.
_HOST_GONE = 35
TOKEN_BYTES = 16


class Ring:
    """One process's place in the ring.

    Args:
        rank, size: this process's, 0 <= rank < size, and the number of processes, at least 2.
        following, previous: connected sockets to the next process and from the one before.
        timeout: seconds that a sum may wait for a neighbour that lives and sends nothing; None waits for ever.
    """

    def __init__(self, rank: int, size: int, following: socket.socket, previous: socket.socket, timeout: float | None):
        self.rank, self.size = rank, size
        self._next, self._previous, self._timeout = following, previous, timeout
        for one in (following, previous):
            one.setblocking(False)
            _notice_lost_hosts(one)
        self._sums = 0
        self.sent = 0  # bytes, since the start
        self._lock = threading.Lock()
        self._received = np.empty(_CHUNK, np.uint8)
        self._wide = np.empty((2, _CHUNK // 2), np.float32)

    def padded(self, items: int) -> int:
        """The least number of items, at least `items`, that `add` can cut into equal segments."""
        return -(-items // self.size) * self.size

    def add(self, array: np.ndarray) -> None:
        """Sums `array` over all processes, in place; each calls it with the same sizes and in the same order.

        Args:
            array: contiguous, one dimension, of any number type; its size is a multiple of the number of processes.
                Types of two bytes are added in float32, and rounded once a process.

        Raises:
            PeerLostError: a neighbour left, or `timeout` passed. The ring is of no use afterwards.
            RaytfError: the neighbour sums something else.
        """
        with self._lock:
            if self._next.fileno() < 0:
                raise PeerLostError(self.rank, "the ring broke at an earlier sum")
            try:
                self._agree(array.nbytes)
                self._sum(array)
                self._sums += 1
                self.sent += len(_HEADER.pack(0, 0)) + 2 * (self.size - 1) * array.nbytes // self.size
            except BaseException as error:
                self.close()  # the neighbours learn it from this
                if isinstance(error, OSError):
                    raise PeerLostError(self.rank, f"{type(error).__name__}: {error}") from error
                raise

    def close(self) -> None:
        """Leaves the ring; the neighbours' sums fail."""
        self._next.close()
        self._previous.close()

    def _agree(self, size: int) -> None:
        mine = _HEADER.pack(self._sums, size)
        unsent = mine
        while unsent:  # the end of an earlier sum may still fill the socket
            try:
                unsent = unsent[self._next.send(unsent) :]
            except BlockingIOError:
                self._wait(sending=True, receiving=False)
        theirs = b""
        while len(theirs) < len(mine):
            try:
                theirs += self._read(memoryview(bytearray(len(mine) - len(theirs))))
            except BlockingIOError:
                self._wait(sending=False, receiving=True)
        if theirs != mine:
            number, length = _HEADER.unpack(theirs)
            raise RaytfError(
                f"All workers must sum gradients of the same sizes in the same order; worker {self.rank} is at sum "
                f"{self._sums} with {size} bytes, received: worker {(self.rank - 1) % self.size} at sum {number} with "
                f"{length} bytes. Build the same model on all workers, and let each make the same steps."
            )

    def _read(self, into: memoryview) -> memoryview:
        count = self._previous.recv_into(into)
        if not count:
            raise ConnectionResetError("it closed its connection")
        return into[:count]

    def _sum(self, array: np.ndarray) -> None:
        size, rank = self.size, self.rank
        bytes_ = memoryview(array.view(np.uint8))
        length = array.nbytes // size
        total = 2 * (size - 1) * length
        sent = received = waiting = 0  # bytes; `waiting` have arrived and are not added yet
        while sent < total or received < total:
            # a segment may be passed on as far as the phase before has brought and summed it
            may_send = min(total, length + received - waiting)
            moved = False
            if sent < may_send:
                phase, offset = divmod(sent, length)
                start = (rank - phase) % size * length + offset
                count = min(may_send - sent, length - offset, _SENT_AT_ONCE)
                try:
                    sent += self._next.send(bytes_[start : start + count])
                    moved = True
                except BlockingIOError:
                    pass
            if received < total:
                phase, offset = divmod(received, length)
                start = (rank - 1 - phase) % size * length + offset
                try:
                    if phase >= size - 1:  # a finished sum
                        received += len(self._read(bytes_[start : start + min(length - offset, _SENT_AT_ONCE)]))
                    else:
                        start, offset = start - waiting, offset - waiting
                        wanted = min(_CHUNK, length - offset)
                        count = len(self._read(memoryview(self._received)[waiting:wanted]))
                        received, waiting = received + count, waiting + count
                        if waiting == wanted:
                            mine = array.view(np.uint8)[start : start + wanted].view(array.dtype)
                            self._accumulate(mine, self._received[:wanted].view(array.dtype))
                            waiting = 0
                    moved = True
                except BlockingIOError:
                    pass
            if not moved:
                self._wait(sending=sent < may_send, receiving=received < total)

    @np.errstate(over="ignore", invalid="ignore")  # gradients may overflow; loss scaling looks for it afterwards
    def _accumulate(self, mine: np.ndarray, theirs: np.ndarray) -> None:
        if mine.itemsize != 2:
            np.add(mine, theirs, out=mine)
            return
        a, b = self._wide[:, : mine.size]
        a[...] = mine
        b[...] = theirs
        np.add(a, b, out=a)
        mine[...] = a

    def _wait(self, sending: bool, receiving: bool) -> None:
        poll = select.poll()
        if sending:
            poll.register(self._next, select.POLLOUT)
        if receiving:
            poll.register(self._previous, select.POLLIN)
        if not poll.poll(None if self._timeout is None else self._timeout * 1000):
            raise TimeoutError(f"a neighbour sent nothing for {self._timeout} s")


class Listener:
    """Where the process before this one finds it: a port, and on Linux a Unix socket for those of the same host.

    Args:
        host: the address of this host under which the others know it.
    """

    def __init__(self, host: str):
        self.host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sockets = [socket.create_server((host, 0), family=family)]
        self.port = self._sockets[0].getsockname()[1]
        if sys.platform == "linux":
            local = socket.socket(socket.AF_UNIX)
            local.bind(_local_name(self.port))
            local.listen()
            self._sockets.append(local)

    def join(
        self, rank: int, addresses: Sequence[tuple[str, int]], token: bytes, timeout: float, patience: float | None
    ) -> Ring:
        """Connects this process with its neighbours; all processes call it at once.

        Args:
            rank: this process's.
            addresses: (host, port) of the listeners of all processes, by rank; at least two.
            token: `TOKEN_BYTES` bytes that only the processes of this ring know; others are turned away.
            timeout: seconds within which the neighbours must be there.
            patience: the `timeout` of the ring's sums.

        Raises:
            PeerLostError: a neighbour could not be reached, or did not come.
        """
        size = len(addresses)
        host, port = addresses[(rank + 1) % size]
        deadline = time.monotonic() + timeout
        try:
            if host == self.host and sys.platform == "linux":
                following = socket.socket(socket.AF_UNIX)
                following.settimeout(timeout)
                following.connect(_local_name(port))
            else:
                following = socket.create_connection((host, port), timeout=timeout)
                following.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            following.sendall(_hello(token, rank))
            previous = self._welcome(_hello(token, (rank - 1) % size), deadline)
        except OSError as error:
            raise PeerLostError(rank, f"no connection to its neighbours ({type(error).__name__}: {error})") from error
        finally:
            self.close()
        return Ring(rank, size, following, previous, patience)

    def _welcome(self, hello: bytes, deadline: float) -> socket.socket:
        while True:
            ready, _, _ = select.select(self._sockets, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the one before did not connect in time")
            one, _ = ready[0].accept()
            one.settimeout(5)
            try:
                came = one.recv(len(hello), socket.MSG_WAITALL)
            except OSError:
                came = b""
            if secrets.compare_digest(came, hello):
                return one
            one.close()  # a stranger

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _hello(token: bytes, rank: int) -> bytes:
    return token + rank.to_bytes(4, "little")


def _local_name(port: int) -> str:
    """A Unix socket in Linux' abstract namespace: no file, gone with the process; as unique as the port."""
    return f"\0raytf/ring/{port}"


def _notice_lost_hosts(one: socket.socket) -> None:
    """A host that vanished closes nothing: its kernel's silence must end the connection."""
    if one.family == socket.AF_UNIX:
        return
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _HOST_GONE * 1000}
    for name, value in options.items():
        if hasattr(socket, name):  # not all are known outside Linux
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
