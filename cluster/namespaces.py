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
        address: IPv4 address under which the others know it.
        link: the other end of its cable.
    """

    name: str
    address: str
    link: str

    def command(self, command: list[str]) -> list[str]:
        """The command that runs another in this namespace."""
        return ["ip", "netns", "exec", self.name, *command]

    def cut(self) -> None:
        """Pulls its cable: nothing reaches it or comes from it any more, and no connection is told."""
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
def hosts(count: int, rate: str | None = None) -> Iterator[list[Host]]:
    """Namespaces on one bridge, which end with the block.

    Args:
        count: how many, 2 to 200.
        rate: of each one's link in either direction, as `tc` writes it ("100mbit"), or None for no limit.

    Raises:
        ConfigError: namespaces cannot be had here.
    """
    why = available()
    if why is not None:
        raise ConfigError("Namespaces need root and iproute2", why, "Run it as root, with iproute2")
    mark = secrets.token_hex(2)
    net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    bridge, made = f"rtb{mark}", []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for i in range(count):
            name = f"raytf{mark}-{i}"
            outside, inside = f"rto{mark}{i}", f"rti{mark}{i}"
            _ip("netns", "add", name)
            made.append(Host(name, f"{net}.{i + 1}", outside))
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("link", "set", inside, "netns", name)
            _ip("-n", name, "addr", "add", f"{net}.{i + 1}/24", "dev", inside)
            _ip("-n", name, "link", "set", inside, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limit = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
                _run("tc", "qdisc", "add", "dev", outside, *limit)
                _run(*made[-1].command(["tc", "qdisc", "add", "dev", inside, *limit]))
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")
