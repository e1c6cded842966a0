"""A worker's port, for its ring or its TensorFlow: kept until that binds it, and what hangs on it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import sys
from collections.abc import Iterator

import ray.util

from raytf import liveness, procfs
from raytf.errors import ConfigError
from raytf.runtime import packet_filter
from raytf.runtime.settings import PORTS

# Not Python's own numbers: Keras draws its seeds from them, and a user has set theirs.
_RANDOM = random.SystemRandom()

_reserved: list[socket.socket] = []


def reserve_address(ports: tuple[int, int] = PORTS) -> str:
    """This worker's "host:port", on a port that no other raytf process of the host takes while this one lives.

    Args:
        ports: the first and the last that it may have.

    Raises:
        ConfigError: none is free.
    """
    release_port()
    host = ray.util.get_node_ip_address()
    # on all interfaces, as TensorFlow listens
    held, claim = _bound("::" if ":" in host else "", ports)
    _reserved[:] = [held]
    _claims.append(claim)
    port = held.getsockname()[1]
    return joined(host, port)


def _bound(host: str, ports: tuple[int, int]) -> tuple[socket.socket, socket.socket]:
    """(a bound socket, what keeps other raytf processes from its port)."""
    first, last = ports
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    order = _RANDOM.sample(range(first, last + 1), last + 1 - first)
    # at last those that another user's processes claim: any user can claim all there are
    for port, claimed in [*((port, False) for port in order), *((port, True) for port in order)]:
        claim = _claim(port)
        if claim is None and claimed and _is_another_users(port):
            claim = socket.socket(socket.AF_UNIX)
        if claim is None:
            continue
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.bind((host, port))
        except OSError as error:
            held.close()
            claim.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # another program listens there
                raise
            continue
        return held, claim
    raise ConfigError(
        "A worker needs a free port, for its ring or its TensorFlow",
        f"none of {first} to {last} is free",
        "Free some, or give others with ports=(first, last)",
    )


def own(address: str) -> socket.socket:
    """A socket on this worker's own "host:port", which does not listen yet; the port that is kept is let go for it.

    Where this host does not itself have the address, but another that is translated to it, to the port on all of them.

    Raises:
        ConfigError: another program has the port.
    """
    release_port()
    host, port = split(address)
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier ring may be left
    try:
        try:
            held.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            held.bind(("", port))
    except OSError as error:
        held.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigError(
            "A worker listens at its own address of TF_CONFIG", f"{address}: {error.strerror}", "Choose a free port"
        ) from error
    return held


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """ "host:port", of which `split` gives both; an IPv6 host has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def answers(address: str, seconds: float = 1.0) -> bool:
    """Whether something listens at "host:port"."""
    try:
        socket.create_connection(split(address), seconds).close()
    except OSError:
        return False
    return True


def hang_up(address: str) -> None:
    """Ends this process' connections to "host:port", as their other end would have, had it not vanished. On Linux."""
    for number in procfs.sockets():
        with contextlib.suppress(OSError), _copied(number) as one:  # not connected, or closed meanwhile
            peer = one.getpeername()
            # gRPC's sockets are of IPv6, and write IPv4 so
            if len(peer) > 1 and (peer[0].removeprefix("::ffff:"), peer[1]) == split(address):
                one.shutdown(socket.SHUT_RDWR)


def listen_only_at(address: str) -> None:
    """Makes what this process listens on at a port take connections to one address only, as if it were bound there.

    TensorFlow listens on all interfaces whatever address it is told. Here the kernel drops what comes to another of
    this host's addresses, by a filter on the socket. Nothing happens where that cannot be: outside Linux, and where the
    host does not itself have the address, but another that is translated to it.

    Args:
        address: "host:port"; the host as a number.
    """
    host, port = split(address)
    if sys.platform != "linux" or not _has(host):
        return
    program = packet_filter.to_address_only(host)
    for number in procfs.sockets():
        with contextlib.suppress(OSError), _copied(number) as one:  # closed meanwhile
            if one.family == socket.AF_UNIX or one.getsockname()[1] != port:
                continue
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                packet_filter.attach(one, program)


def _has(host: str) -> bool:
    """Whether an address, as a number, is one of this host's."""
    try:
        ipaddress.ip_address(host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


@contextlib.contextmanager
def _copied(number: int) -> Iterator[socket.socket]:
    """A socket of another's descriptor, which may be closed meanwhile; closed at the end."""
    copy = os.dup(number)
    try:
        one = socket.socket(fileno=copy)
    except OSError:  # no socket any more
        os.close(copy)
        raise
    with one:
        yield one


_claims: list[socket.socket] = []


def _claim(port: int) -> socket.socket | None:
    """Keeps other raytf processes from a port between its release here and TensorFlow's bind.

    The claim is a Unix socket in Linux' abstract namespace: it is no file, and ends with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not hasattr(os, "sched_getaffinity"):  # not Linux: the bound socket alone must do
        return claim
    try:
        claim.bind(f"\0raytf/{port}")
        claim.listen()  # so that its user is known
    except OSError:
        claim.close()
        return None
    return claim


def _is_another_users(port: int) -> bool:
    """Returns whether a port is claimed by a process that is not this user's."""
    with socket.socket(socket.AF_UNIX) as asks:
        asks.setblocking(False)
        try:
            asks.connect(f"\0raytf/{port}")
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # raytf's own are of one kind
        return not liveness.is_own_peer(asks)


def release_port() -> None:
    """Frees the reserved port, just before TensorFlow binds it (it cannot while it is held)."""
    while _reserved:
        _reserved.pop().close()
