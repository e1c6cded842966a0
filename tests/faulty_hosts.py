"""Hosts that are network namespaces with names, files and mounts of their own, and faults planted in their network."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

from cluster import namespaces


@dataclasses.dataclass(frozen=True)
class OwnHost(namespaces.Host):
    """A host with a name, an /etc/hosts and mounts of its own; what `before` does, a shell does there first."""

    hosts_file: str = ""
    before: str = ":"

    def command(self, command: list[str]) -> list[str]:
        lines = f"set -e; hostname {self.name}; mount --bind {self.hosts_file} /etc/hosts; {self.before}"
        return super().command(["unshare", "-mu", "bash", "-c", f'{lines}; exec "$@"', "bash", *command])


def own(
    hosts: Sequence[namespaces.Host],
    folder: pathlib.Path,
    before: Mapping[int, str] | None = None,
    names: Mapping[int, str] | None = None,
) -> list[OwnHost]:
    """Hosts whose names are right, but for those of `names`: the content of their /etc/hosts, by place."""
    made = []
    for i, host in enumerate(hosts):
        line = (names or {}).get(i, f"{host.address} {host.name}").format(name=host.name)
        file = folder / f"hosts-{i}"
        file.write_text(f"127.0.0.1 localhost\n{line}\n")
        fields = dataclasses.asdict(host)
        made.append(OwnHost(**fields, hosts_file=str(file), before=(before or {}).get(i, ":")))
    return made


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def plant_in_the_network(hosts) -> None:
    """A smaller MTU at host 1, closed ports at host 2, and a slow link at host 3 that loses what comes at once."""
    run("ip", "link", "set", hosts[1].link, "mtu", "1200")
    inside = hosts[1].link.replace("rto", "rti")
    run("ip", "-n", hosts[1].name, "link", "set", inside, "mtu", "1200")
    for kind in ("tcp", "udp"):
        closed = ["ipproto", kind, "sport", "20000-31999", "blackhole"]
        run("ip", "-n", hosts[2].name, "rule", "add", "pref", "10", *closed)
    slow = ["root", "tbf", "rate", "1mbit", "burst", "1600", "limit", "1600"]
    run("tc", "qdisc", "add", "dev", hosts[3].link, *slow)
    inside = hosts[3].link.replace("rto", "rti")
    run("ip", "netns", "exec", hosts[3].name, "tc", "qdisc", "add", "dev", inside, *slow)
