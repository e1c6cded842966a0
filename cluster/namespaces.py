"""Network namespaces of this machine as hosts on a network whose links have a rate: needs root, and `ip` and `tc`.

with cluster.namespaces.hosts(2, rate="100mbit") as found:
    subprocess.run(found[0].command(["python", "server.py"]))
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from raytf.errors import ConfigError

# Of a link: what it may send at once, and how long a packet may wait for it.
_BURST, _LATENCY = "256kb", "50ms"


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Args:
        name: of the namespace.
        address: address under which the others know it.
        link: the other end of its cable.
        further: addresses on further networks, on the interfaces net1, net2, ...
    """

    name: str
    address: str
    link: str
    further: tuple[str, ...] = ()

    def command(self, command: list[str]) -> list[str]:
        """The command that runs another in this namespace."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        """Pulls its cable: nothing reaches it or comes from it any more, and no connection gets an error."""
        _ip("link", "set", self.link, "down")


def available() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed (iproute2)"
    probe = f"raytf{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None, networks: int = 1, ipv6: bool = False) -> Iterator[list[Host]]:
    """Namespaces on one bridge or several, which end with the block.

    Args:
        count: how many, 2 to 200.
        rate: of each one's link in either direction, as `tc` writes it ("100mbit"), or None for no limit.
        networks: how many each is on, 1 to 9.
        ipv6: whether they have IPv6 alone, but for 127.0.0.1.

    Raises:
        ConfigError: namespaces cannot be had here.
    """
    why = available()
    if why is not None:
        raise ConfigError("Namespaces need root and iproute2", why, "Run it as root, with iproute2")
    mark, made, bridges = secrets.token_hex(2), [], []
    nets = [_net(ipv6) for _ in range(networks)]
    try:
        for k in range(networks):
            bridges.append(f"rtb{mark}{k}")
            _ip("link", "add", bridges[-1], "type", "bridge")
            _ip("link", "set", bridges[-1], "up")
        for i in range(count):
            name = f"raytf{mark}-{i}"
            _ip("netns", "add", name)
            addresses = [f"{net}{i + 1}" for net in nets]
            made.append(Host(name, addresses[0], f"rto{mark}{i}", tuple(addresses[1:])))
            for k, address in enumerate(addresses):
                outside, inside = (f"rtn{mark}{k}{i}", f"net{k}") if k else (f"rto{mark}{i}", f"rti{mark}{i}")
                _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
                _ip("link", "set", outside, "master", bridges[k], "up")
                # nodad: it need not wait to see whether another host has the same address
                prefix = ["/64", "nodad"] if ipv6 else ["/24"]
                _ip("-n", name, "addr", "add", address + prefix[0], *prefix[1:], "dev", inside)
                _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limit = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
                _run("tc", "qdisc", "add", "dev", made[-1].link, *limit)
                inside = made[-1].link.replace("rto", "rti")
                _run(*made[-1].command(["tc", "qdisc", "add", "dev", inside, *limit]))
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        for bridge in bridges:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _net(ipv6: bool) -> str:
    """A network's part of its addresses."""
    if ipv6:
        return f"fd{secrets.token_hex(1)}:{secrets.token_hex(2)}::"
    return f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}."


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")
