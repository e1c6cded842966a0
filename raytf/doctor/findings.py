"""Findings from the measurements on a cluster; pure."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from raytf.runtime import networks

# Limits: values below a minimum, or above a maximum, are findings.
MIN_FILES = 4096
MIN_SHM = 256 * 2**20
MIN_DISK = 2 * 2**30
MIN_MEMORY = 2 * 2**30
# Ray accepts no more objects above this share.
MAX_DISK_SHARE = 0.95
MAX_SKEW = 1.0
MAX_RTT = 0.02
MAX_LOSS = 0.02
MIN_LARGE = 0.5
MIN_BYTES_A_SECOND = 100e6 / 8
_GIB, _MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem of a cluster.

    Args:
        check: Name of the check, a word.
        problem: The problem, as a clause.
        nodes: Affected nodes.
        measured: The measurement.
        fix: The fix, as a clause.
    """

    check: str
    problem: str
    nodes: tuple[str, ...]
    measured: str
    fix: str

    def line(self) -> str:
        """Returns the finding in one line."""
        text = f"{self.check}: {self.problem}; on {', '.join(self.nodes)}; measured: {self.measured}. {self.fix}."
        return " ".join(text.split())


@dataclasses.dataclass(kw_only=True)
class Measurements:
    """Measurements on a cluster.

    Args:
        nodes: Names of all living nodes.
        silent: What a silent node was waited for, by node.
        facts: Results of `Probe.facts`, by node.
        counted: Resources that Ray counts, by node.
        dashboard: Why Ray's dashboard does not answer at the head's address, by the head.
        skew: Least difference of a node's clock from the driver's in seconds, by node.
        links: Results of `Probe.reach` and `Probe.bandwidth` combined, by (from, to).
        storage: Errors of the shared storage by (writer, reader); both are the same node if it cannot write.
        training: Error of the two steps, by node; None if they were not tried.
        tested: Minor versions that raytf is tested with, by package.
        ports: First and last port by which nodes should reach each other.
        network: Network on which workers are to listen, as `TensorflowConfig.network`.
        interfaces: Interface and address on which workers listen, each None if there is none, by node.
    """

    nodes: list[str]
    silent: dict[str, str] = dataclasses.field(default_factory=dict)
    facts: dict[str, dict] = dataclasses.field(default_factory=dict)
    counted: dict[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    dashboard: dict[str, str] = dataclasses.field(default_factory=dict)
    skew: dict[str, float] = dataclasses.field(default_factory=dict)
    links: dict[tuple[str, str], dict] = dataclasses.field(default_factory=dict)
    storage: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    training: dict[str, str] | None = None
    tested: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    ports: tuple[int, int] = (20000, 31999)
    network: str | None = None
    interfaces: dict[str, tuple[str | None, str | None]] = dataclasses.field(default_factory=dict)


def find_problems(measurements: Measurements) -> list[Finding]:
    """Returns all findings, in the order in which to fix them."""
    judges = (_silent, _versions, _limits, _containers, _space, _names, _tokens, _clocks)
    judges += (_networks, _dashboard, _links, _storage, _training)
    return [finding for judge in judges for finding in judge(measurements)]


def hinders_training(findings: list[Finding]) -> bool:
    """Returns whether two steps over all nodes must fail, so that a trial would add nothing."""
    return any(finding.check in ("answer", "versions", "network", "ports") for finding in findings)


def _silent(measurements: Measurements) -> Iterator[Finding]:
    for awaited, nodes in _group_by_value(measurements.silent).items():
        fix = "Look at Ray's logs there (raylet.out), and whether the host hangs; restart the node"
        yield Finding(check="answer", problem="a node does not answer", nodes=nodes, measured=awaited, fix=fix)


def _versions(measurements: Measurements) -> Iterator[Finding]:
    names = {name for facts in measurements.facts.values() for name in facts["versions"]}
    for name in sorted(names):
        nodes_by_version = _group_by_value(
            {node: facts["versions"].get(name) for node, facts in measurements.facts.items()}
        )
        if missing := nodes_by_version.pop(None, ()):
            yield Finding(
                check="versions",
                problem=f"{name} is missing",
                nodes=missing,
                measured="not installed in the Python that Ray runs there",
                fix="Install it there, as on the other nodes",
            )
        if len(nodes_by_version) > 1:
            usual = max(nodes_by_version.values(), key=len)
            yield Finding(
                check="versions",
                problem=f"{name} is not the same everywhere",
                nodes=tuple(node for node in measurements.facts if node not in (*missing, *usual)),
                measured="; ".join(
                    f"{version} on {', '.join(nodes_of)}" for version, nodes_of in nodes_by_version.items()
                ),
                fix="Install one version on all nodes (constraints.txt of raytf names one that is tested)",
            )
        for version, nodes_of in nodes_by_version.items():
            tested = measurements.tested.get(name)
            if tested and ".".join(version.split(".")[:2]) not in tested:
                yield Finding(
                    check="versions",
                    problem=f"raytf is not tested with this {name}",
                    nodes=nodes_of,
                    measured=f"{name} {version}",
                    fix=f"Install one of {', '.join(tested)}",
                )


def _limits(measurements: Measurements) -> Iterator[Finding]:
    few = {n: facts["files"] for n, facts in measurements.facts.items() if 0 <= facts["files"] < MIN_FILES}
    for limit, nodes in _group_by_value(few).items():
        yield Finding(
            check="files",
            problem="a process may open too few files",
            nodes=nodes,
            measured=f"at most {limit}, wanted {MIN_FILES}",
            fix="Run `ulimit -n 65536` before `ray start` there, or raise it in /etc/security/limits.conf",
        )


def _containers(measurements: Measurements) -> Iterator[Finding]:
    for node, facts in measurements.facts.items():
        box, resources = facts["container"], measurements.counted.get(node, {})
        counted, memory = resources.get("CPU", 0), resources.get("memory", 0)
        whole = math.floor(box["cpus"] or 0)
        if box["cpus"] is not None and counted > box["cpus"] + 0.01:
            yield Finding(
                check="cpu",
                problem="Ray counts more CPUs than the container may use",
                nodes=(node,),
                measured=f"{counted:g} counted, {box['cpus']:g} allowed",
                fix=f'In the pod set `resources: {{limits: {{cpu: "{math.ceil(counted)}"}}}}` (docker run --cpus)'
                + (f', or start Ray with fewer, `rayStartParams: {{num-cpus: "{whole}"}}`' if whole else ""),
            )
        if box["memory"] is not None and box["memory"] < MIN_MEMORY:
            yield Finding(
                check="memory",
                problem="the container has too little memory for a worker",
                nodes=(node,),
                measured=f"{box['memory'] / _GIB:.2f} GiB, wanted {MIN_MEMORY / _GIB:.0f}",
                fix="In the pod set `resources: {limits: {memory: 4Gi}}` (docker run --memory)",
            )
        elif box["memory"] is not None and memory > box["memory"] * 1.01:
            yield Finding(
                check="memory",
                problem="Ray counts more memory than the container may use",
                nodes=(node,),
                measured=f"{memory / _GIB:.2f} GiB counted, {box['memory'] / _GIB:.2f} allowed",
                fix=f"In the pod set `resources: {{limits: {{memory: {math.ceil(memory / _GIB)}Gi}}}}` (docker run "
                "--memory, sbatch --mem=0), or start Ray with less (--memory)",
            )
        if box["traces"] is False:
            yield Finding(
                check="stacks",
                problem="the stack of a worker that hangs cannot be shown",
                nodes=(node,),
                measured="a process may not look at another one, and the container lacks the capability SYS_PTRACE",
                fix="In the container set `securityContext: {runAsUser: 0, runAsNonRoot: false, capabilities: {add: "
                "[SYS_PTRACE]}}`, as root alone gets it (docker run --cap-add), or do without",
            )


def _space(measurements: Measurements) -> Iterator[Finding]:
    for node, facts in measurements.facts.items():
        # What is full of Ray's own objects is not too small.
        store = measurements.counted.get(node, {}).get("object_store_memory", 0)
        free, total = facts["shm"] or (MIN_SHM, MIN_SHM)
        if total < MIN_SHM or (free < MIN_SHM and total - free > store):
            yield Finding(
                check="shm",
                problem="/dev/shm is too small for Ray's objects",
                nodes=(node,),
                measured=f"{free / _MIB:.0f} MiB free of {total / _MIB:.0f}",
                fix="In the pod mount `emptyDir: {medium: Memory, sizeLimit: 4Gi}` at /dev/shm (docker run "
                "--shm-size=4g), or remove files there",
            )
        for path, space in facts["disks"].items():
            if space is not None and (space[0] < MIN_DISK or 1 - space[0] / space[1] > MAX_DISK_SHARE):
                yield Finding(
                    check="disk",
                    problem=f"the disk of {path} is nearly full",
                    nodes=(node,),
                    measured=f"{space[0] / _GIB:.2f} GiB free of {space[1] / _GIB:.2f}",
                    fix="Free some, or start Ray with --temp-dir on another disk; in a pod mount at /tmp `ephemeral: "
                    "{volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], "
                    "resources: {requests: {storage: 20Gi}}}}}`",
                )


def _names(measurements: Measurements) -> Iterator[Finding]:
    several = len({address_of(node) for node in measurements.nodes}) > 1
    for node, facts in measurements.facts.items() if several else ():
        host, addresses = facts["name"]["host"], facts["name"]["found"]
        if isinstance(addresses, str):
            problem, measured = "the host's own name does not resolve", f"{host}: {addresses}"
            pod = "`hostNetwork: false`, and mount nothing at /etc/hosts, into which Kubernetes writes the name"
        elif looped := [a for a in addresses if ipaddress.ip_address(a.partition("%")[0]).is_loopback]:
            problem, measured = "the host's own name is a loopback address", f"{host} is {', '.join(looped)}"
            pod = "`hostNetwork: false`, which gives it a name of its own"
        else:
            continue
        fix = f"Write `{address_of(node)} {host}` into /etc/hosts there, instead of a line with 127.0.1.1; "
        fix += f"in a pod set {pod}"
        yield Finding(check="name", problem=problem, nodes=(node,), measured=measured, fix=fix)


def _networks(measurements: Measurements) -> Iterator[Finding]:
    for node, (_, address) in measurements.interfaces.items():
        if address is None:
            yield Finding(
                check="network",
                problem=f"the node has no interface or address of {measurements.network!r}",
                nodes=(node,),
                measured=f"it has {networks.describe_interfaces(measurements.facts[node]['interfaces'])}",
                fix='Name an interface that all nodes have, or a network of their addresses ("10.1.0.0/16")',
            )


def _dashboard(measurements: Measurements) -> Iterator[Finding]:
    for node, error in measurements.dashboard.items():
        yield Finding(
            check="dashboard",
            problem="jobs cannot be submitted: Ray's dashboard does not listen at the head's address",
            nodes=(node,),
            measured=error,
            fix='Start the head with `--dashboard-host ""`, in a pod `rayStartParams: {dashboard-host: ""}`: it then '
            "listens by IPv4 and IPv6 (0.0.0.0 by IPv4 alone, :: by IPv6 alone)",
        )


def _tokens(measurements: Measurements) -> Iterator[Finding]:
    modes = _group_by_value({node: facts["token"]["mode"] == "token" for node, facts in measurements.facts.items()})
    if len(modes) > 1:
        yield Finding(
            check="token",
            problem="only some nodes were started with RAY_AUTH_MODE=token",
            nodes=modes[False],
            measured=f"it is set on {', '.join(modes[True])}",
            fix="Set RAY_AUTH_MODE=token before `ray start` on all nodes",
        )
    for node, facts in measurements.facts.items():
        bits = facts["token"]["bits"]
        if bits is not None and bits & 0o004:
            yield Finding(
                check="token",
                problem="others of the host may read Ray's token",
                nodes=(node,),
                measured=f"{facts['token']['path']} has mode {bits:o}",
                fix=f"chmod 600 {facts['token']['path']}",
            )


def _clocks(measurements: Measurements) -> Iterator[Finding]:
    for node, skew in measurements.skew.items():
        if abs(skew) > MAX_SKEW:
            yield Finding(
                check="clock",
                problem="the clock differs from that of the driver's host",
                nodes=(node,),
                measured=f"{abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}",
                fix="Start chrony or systemd-timesyncd on both",
            )


def _links(measurements: Measurements) -> Iterator[Finding]:
    """Yields a finding for each problem and link."""
    rules = (
        (
            "ports",
            "does not reach",
            "Open TCP ports {} to {} between the nodes in both directions, in the firewall".format(*measurements.ports),
        ),
        ("latency", "is far away from", "Put the nodes into one zone or switch"),
        ("loss", "loses packets to", "Look at cable, switch port and the host's drops (`ip -s link`)"),
        ("mtu", "loses large packets to", "Set one MTU on all hosts and switches, `ip link set dev eth0 mtu 1400`"),
        ("bandwidth", "sends slowly to", "Look at the link's speed (`ethtool`), and at other traffic"),
    )
    for check, verb, fix in rules:
        bad = {link: text for link, seen in measurements.links.items() if (text := _out_of_range(check, seen))}
        for (source, target), text in bad.items():
            yield Finding(
                check=check, problem=f"{source} {verb} {target}", nodes=(source, target), measured=text, fix=fix
            )


def _out_of_range(check: str, value: Mapping) -> str | None:
    """Returns the measurement if it is out of range."""
    if check == "ports":
        return value.get("error")
    if check == "latency" and value.get("rtt", 0) > MAX_RTT:
        return f"a round trip takes {value['rtt'] * 1000:.1f} ms, wanted {MAX_RTT * 1000:.0f}"
    if check == "loss" and value.get("loss", 0) > MAX_LOSS:
        return f"{value['loss']:.0%} of small datagrams are lost"
    if check == "mtu" and value.get("loss", 1) < MIN_LARGE and value.get("large", 1) < MIN_LARGE:
        return (
            f"{1 - value['large']:.0%} of packets of {value['mtu']} bytes are lost, {value['loss']:.0%} of small ones"
        )
    if check == "bandwidth" and value.get("stalled"):
        return value["stalled"]
    if check == "bandwidth" and value.get("rate", MIN_BYTES_A_SECOND) < MIN_BYTES_A_SECOND:
        return f"{value['rate'] * 8 / 1e6:.1f} Mbit/s, wanted {MIN_BYTES_A_SECOND * 8 / 1e6:.0f}"
    return None


def _storage(measurements: Measurements) -> Iterator[Finding]:
    for (writer, reader), error in measurements.storage.items():
        if reader == measurements.nodes[0] != writer and (reader, writer) in measurements.storage:
            continue  # neither sees the other's files, and the other direction is reported
        if writer == reader:
            problem, nodes = "a node cannot write to the storage", (writer,)
            fix = "Give a folder that Ray's user can write to on every node, or a URI"
        else:
            problem, nodes = f"what {writer} writes to the storage is not seen by others", (reader,)
            fix = "Mount one storage at the same path on all nodes, or give a URI"
        yield Finding(check="storage", problem=problem, nodes=nodes, measured=error, fix=fix)


def _training(measurements: Measurements) -> Iterator[Finding]:
    for error, nodes in _group_by_value(measurements.training or {}).items():
        fix = "Put the other findings right first; else try `raytf run` with a script of two lines there"
        yield Finding(check="training", problem="two steps over all nodes fail", nodes=nodes, measured=error, fix=fix)


def address_of(node: str) -> str:
    """Returns the address of a node in Ray."""
    return node.partition("#")[0]


def _group_by_value(values: Mapping[str, object]) -> dict:
    """Groups nodes by value."""
    groups = defaultdict(list)
    for node, value in values.items():
        groups[value].append(node)
    return {value: tuple(nodes) for value, nodes in groups.items()}
