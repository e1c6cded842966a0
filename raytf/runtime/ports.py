"""The port of a worker, for its ring or TensorFlow: reserved until it is bound there, and its sockets."""

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

from raytf import liveness, logs, procfs
from raytf.errors import ConfigError
from raytf.runtime import networks, packet_filter
from raytf.runtime.settings import Listening

logger = logs.get_logger(__name__)

# Not Python's own generator: Keras draws its seeds from it, and the user has seeded it.
_RANDOM = random.SystemRandom()

_reserved: list[socket.socket] = []


def reserve_address(allowed: Listening) -> str:
    """Returns this worker's "host:port", on a port that no other raytf process of the host uses until `end_claims`.

    Args:
        allowed: Allowed ports, and the network of the address.

    Raises:
        ConfigError: No port is free, or this host is not in the network.
    """
    release_port()
    host = _own_address(allowed.network)
    # on all interfaces, as TensorFlow listens
    bound_socket, claim = _bound("::" if ":" in host else "", allowed.ports)
    _reserved[:] = [bound_socket]
    _claims.append(claim)
    port = bound_socket.getsockname()[1]
    return join_address(host, port)


def _own_address(network: str | None) -> str:
    """Returns the address of this host on which a worker listens.

    NCCL chooses an interface by itself, unless the user has named one for it: it gets the worker's.

    Raises:
        ConfigError: The host has none in `network`.
    """
    node = ray.util.get_node_ip_address()
    if network is None:
        return node
    interface, address = networks.worker_addresses({node: networks.interfaces()}, network)[node]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return address


def _bound(host: str, ports: tuple[int, int]) -> tuple[socket.socket, socket.socket]:
    """Returns (a bound socket, the claim that keeps other raytf processes from its port)."""
    first, last = ports
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    order = _RANDOM.sample(range(first, last + 1), last + 1 - first)
    # last, ports that another user's processes claim: any user can claim all ports
    for port, claimed in [*((port, False) for port in order), *((port, True) for port in order)]:
        claim = _claim(port)
        is_own = claim is not None
        if claim is None and claimed and _is_another_users(port):
            claim = socket.socket(socket.AF_UNIX)
        if claim is None:
            continue
        bound_socket = socket.socket(family, socket.SOCK_STREAM)
        if is_own:  # connections of an earlier ring may remain
            bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound_socket.bind((host, port))
        except OSError as error:
            bound_socket.close()
            claim.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # another program listens there
                raise
            continue
        return bound_socket, claim
    raise ConfigError(
        "A worker needs a free port, for its ring or its TensorFlow",
        f"none of {first} to {last} is free",
        "Free some, or give others with ports=(first, last)",
    )


def own_socket(address: str) -> socket.socket:
    """Returns a socket on this worker's own "host:port", which does not listen so far; frees the reserved port for it.

    Binds the port on all addresses if another address is translated to this host's.

    Raises:
        ConfigError: Another program uses the port.
    """
    release_port()
    host, port = split_address(address)
    bound_socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier ring may remain
    try:
        try:
            bound_socket.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            bound_socket.bind(("", port))
    except OSError as error:
        bound_socket.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigError(
            "A worker listens at its own address of TF_CONFIG", f"{address}: {error.strerror}", "Choose a free port"
        ) from error
    return bound_socket


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns "host:port", the inverse of `split_address`; an IPv6 host has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_listening(address: str, seconds: float = 1.0) -> bool:
    """Returns whether a process listens at "host:port"."""
    try:
        socket.create_connection(split_address(address), seconds).close()
    except OSError:
        return False
    return True


def close_connections(address: str) -> None:
    """Shuts down this process' connections to "host:port", as the vanished peer would have done. On Linux."""
    for number in procfs.sockets():
        with contextlib.suppress(OSError), _copied_socket(number) as connection:  # not connected, or closed meanwhile
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            peer = connection.getpeername()
            # gRPC's sockets are IPv6, and write IPv4 addresses so
            if (peer[0].removeprefix("::ffff:"), peer[1]) == split_address(address):
                connection.shutdown(socket.SHUT_RDWR)


def listen_only_at(address: str) -> None:
    """Restricts this process' listeners on a port to one address, as if they were bound to it.

    TensorFlow listens on all interfaces. The kernel drops packets for other addresses of this host, by a filter on the
    socket. Does nothing outside Linux, or if another address is translated to this host's. Logs a warning if the kernel
    takes no filter from this process.

    Args:
        address: "host:port" with a numeric host.
    """
    host, port = split_address(address)
    if sys.platform != "linux" or not _is_own_host(host):
        return
    program = packet_filter.only_to_address(host)
    for number in procfs.sockets():
        with contextlib.suppress(OSError), _copied_socket(number) as listener:  # closed meanwhile
            if listener.family == socket.AF_UNIX or listener.getsockname()[1] != port:
                continue
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                try:
                    packet_filter.attach_filter(listener, program)
                except OSError as error:  # the copy is open: it is the kernel's, such as one that has no filters
                    logger.warning(
                        f"port {port} of TensorFlow's server can be reached at all addresses of this host, as the "
                        f"kernel refuses a packet filter ({error}): close it to others in a firewall"
                    )


def _is_own_host(host: str) -> bool:
    """Returns whether a numeric address is one of this host's."""
    try:
        ipaddress.ip_address(host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        return False
    return True


@contextlib.contextmanager
def _copied_socket(number: int) -> Iterator[socket.socket]:
    """Yields a socket of another object's descriptor, which that may close meanwhile; closes the copy at the end."""
    copy = os.dup(number)
    try:
        opened = socket.socket(fileno=copy)
    except OSError:  # no longer a socket
        os.close(copy)
        raise
    with opened:
        yield opened


_claims: list[socket.socket] = []


def _claim(port: int) -> socket.socket | None:
    """Keeps other raytf processes from a port between its release and TensorFlow's bind.

    The claim is a Unix socket in Linux' abstract namespace: it is no file, and ends with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not hasattr(os, "sched_getaffinity"):  # not Linux: the bound socket alone must suffice
        return claim
    try:
        claim.bind(f"\0raytf/{port}")
        claim.listen()  # so that other processes can read its user
    except OSError:
        claim.close()
        return None
    return claim


def _is_another_users(port: int) -> bool:
    """Returns whether another user's process has claimed a port."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0raytf/{port}")
        except OSError as error:
            return error.errno == errno.EPROTOTYPE  # raytf's own sockets are of one kind
        return not liveness.is_same_user(probe)


def release_port() -> None:
    """Frees the reserved port, just before TensorFlow binds it."""
    while _reserved:
        _reserved.pop().close()


def end_claims() -> None:
    """Lets other processes use this one's ports, at the end of a training."""
    release_port()
    while _claims:
        _claims.pop().close()
