"""Connections between the processes of a ring: to both neighbours, and chords across a ring of many processes."""

from __future__ import annotations

import socket

# Smallest ring with chords across it, so that small messages are traded in log2(n) hops.
_LEAST_WITH_CHORDS = 4
# Seconds without an answer from the other host's kernel after which it is lost.
HOST_GONE = 35


def is_local(sock: socket.socket) -> bool:
    return sock.family == socket.AF_UNIX


class Link:
    """A connection between two neighbours.

    Args:
        data: Socket for the sums.
        watch: Socket on which nothing is sent until the ring ends. Linux probes the other host only on a connection
            without unsent data. A process that reads slowly leaves unsent data, so `data` could not distinguish it from
            a lost host.
        host_gone: Seconds after which a host that does not answer is lost, at least 2.
    """

    def __init__(self, data: socket.socket, watch: socket.socket, host_gone: int = HOST_GONE):
        self.data, self.watch = data, watch
        for sock in (data, watch):
            _prepare(sock, host_gone)
        if watch.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # the end of its hello may be in flight; on `data` this would cut off a neighbour that reads slowly
            watch.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, host_gone * 1000)

    def close(self) -> None:
        self.data.close()
        self.watch.close()


class Chord:
    """Two connections of a member: to the one `distance` ranks further, and from the one `distance` ranks before.

    Args:
        following, previous: Sockets.
        host_gone: Seconds after which a host that does not answer is lost, at least 2.
    """

    def __init__(self, following: socket.socket, previous: socket.socket, host_gone: int = HOST_GONE):
        self.following, self.previous = following, previous
        for sock in (following, previous):
            _prepare(sock, host_gone)

    def close(self) -> None:
        self.following.close()
        self.previous.close()


def chords(size: int) -> int:
    """Returns the number of chords of a member: to those 2, 4, 8, ... ranks further; small rings have none."""
    return 0 if size < _LEAST_WITH_CHORDS else (size - 1).bit_length() - 1


def _prepare(sock: socket.socket, seconds: int) -> None:
    """Makes a socket wait for nothing, and sets keep-alive: a lost host closes nothing, so its silence must end it."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # ten probes in the last 20 of 35 seconds: several may be lost on a congested network
    interval = max(1, seconds // 17)
    count = max(1, min(10, seconds * 4 // 7 // interval))
    idle = max(1, seconds - count * interval)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPALIVE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": count}
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has the first, macOS the second
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
