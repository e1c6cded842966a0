"""A port for each TensorFlow process, kept until TensorFlow binds it. On a worker."""

from __future__ import annotations

import contextlib
import os
import random
import socket

import ray.util

from raytf.errors import ConfigError

# Below the range that Linux hands out for outgoing connections and above the ports that Ray gives its workers.
_PORTS = range(20_000, 32_000)

_reserved: list[socket.socket] = []


def reserve_address() -> str:
    """This worker's "host:port", on a port that no other raytf process of the host takes while this one lives."""
    release_port()
    host = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = _claim(port)
        if claim is None:
            continue
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.bind(("::" if family == socket.AF_INET6 else "", port))
        except OSError:  # another program listens there
            held.close()
            claim.close()
            continue
        _reserved[:] = [held]
        _claims.append(claim)
        return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
    raise ConfigError("A worker needs a free port", f"none of {_PORTS[0]} to {_PORTS[-1]} is free", "Free one")


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def answers(address: str, seconds: float = 1.0) -> bool:
    """Whether something listens at "host:port"."""
    try:
        socket.create_connection(split(address), seconds).close()
    except OSError:
        return False
    return True


def hang_up(address: str) -> None:
    """Ends this process' connections to "host:port", as their other end would have, had it not vanished. On Linux."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, not connected, or closed meanwhile
            with socket.socket(fileno=os.dup(int(name))) as one:
                peer = one.getpeername()
                # gRPC's sockets are of IPv6, and write IPv4 so
                if len(peer) > 1 and (peer[0].removeprefix("::ffff:"), peer[1]) == split(address):
                    one.shutdown(socket.SHUT_RDWR)


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
    except OSError:
        claim.close()
        return None
    return claim


def release_port() -> None:
    """Frees the reserved port, just before TensorFlow binds it (it cannot while it is held)."""
    while _reserved:
        _reserved.pop().close()
