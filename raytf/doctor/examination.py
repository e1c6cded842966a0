"""Examination of a cluster: a probe on each node measures within deadlines; whoever does not answer is a finding."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import timeouts
from raytf.collectives import ring
from raytf.compat import versions
from raytf.doctor import probe
from raytf.doctor.findings import Finding, Measurements, examine, hinders_training
from raytf.errors import ConfigError, first_line, in_a_line
from raytf.launch.runner import TaskRunner
from raytf.launch.spec import LaunchSpec
from raytf.runtime import roles, shared_folders
from raytf.runtime.connection import connect, located
from raytf.runtime.settings import PORTS, check_ports

# Links of a node that are measured at a time.
_THREADS = 8
# Of so many nodes all links are measured; of more, so many of each node's.
_ALL_LINKS_NODES = 16
_LINKS = 8
LEAST_TIME = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminationReport:
    """What an examination found.

    Args:
        nodes: all that were living.
        findings: what is wrong; empty where the cluster is healthy.
        left_out: what could not be looked at, and why, in sentences.
        interfaces: the network interface by which workers of each node exchange, None where it is not known.
        seconds: that it took.
    """

    nodes: list[str]
    findings: list[Finding]
    left_out: list[str]
    interfaces: dict[str, str | None]
    seconds: float


def run(
    address: str | None = None,
    *,
    storage: str | None = None,
    ports: tuple[int, int] = PORTS,
    training: bool = True,
    seconds: float = 55.0,
) -> ExaminationReport:
    """Examines a running cluster.

    Args:
        address: of the cluster; None takes RAY_ADDRESS, or the newest of this machine; "local" starts one here.
        storage: absolute path or URI that all nodes are to share; None looks at none.
        ports: the first and the last port by which nodes are to reach each other.
        training: make two steps of Keras over all nodes.
        seconds: deadline for all, at least 30.

    Raises:
        ConfigError: an argument is wrong, or no cluster answers.
    """
    check_ports(ports)
    if not seconds >= LEAST_TIME:
        raise ConfigError(f"An examination takes at least {LEAST_TIME:g} seconds", seconds, "Give it more")
    if storage is not None and "://" not in storage and not os.path.isabs(storage):
        raise ConfigError("The storage is an absolute path or a URI", repr(storage), "Write it from the root")
    if located(address) is None and "local" not in (address, os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            "raytf doctor examines a running Ray cluster",
            "no address, and none runs on this machine",
            "Give --address HOST:PORT, or start one with `ray start --head`",
        )
    began = time.monotonic()
    connect([], address, logging_level=logging.ERROR, log_to_driver=False)
    with _probes(ports, began + seconds) as cluster:
        cluster.ask_facts()
        cluster.ask_clocks()
        cluster.measure_network()
        left_out = []
        nodes, links = len(cluster.found.nodes), len(cluster.found.links)
        if links < nodes * (nodes - 1) and nodes > _ALL_LINKS_NODES:
            left_out.append(f"{links} of {nodes * (nodes - 1)} links were measured, those of each node to some others")
        if storage is None:
            left_out.append("No shared storage was named (--storage)")
        else:
            cluster.try_storage(storage)
        if training and hinders_training(examine(cluster.found)):
            left_out.append("No training was tried, as nodes do not answer, differ in versions, or do not reach others")
        elif training:
            cluster.train()
        found = cluster.found
    return ExaminationReport(
        nodes=found.nodes,
        findings=examine(found),
        left_out=left_out,
        interfaces={node: facts["interface"] for node, facts in found.facts.items()},
        seconds=round(time.monotonic() - began, 1),
    )


@contextlib.contextmanager
def _probes(ports: tuple[int, int], deadline: float):
    """A cluster with a probe on each node, which ends with the block."""
    cluster = _Cluster(ports, deadline)
    try:
        yield cluster
    finally:
        cluster.close()


class _Cluster:
    """Probes of a cluster, and what they have measured."""

    def __init__(self, ports: tuple[int, int], deadline: float):
        self._ports, self._deadline = ports, deadline
        nodes = _nodes()
        counted = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes()}
        self.found = Measurements(
            nodes=list(nodes),
            tested=versions.TESTED,
            ports=ports,
            counted={name: counted[node] for name, node in nodes.items()},
        )
        token, its = secrets.token_bytes(32), timeouts.get()
        seconds = its.link_step, its.link, its.name_lookup
        self._places = {name: NodeAffinitySchedulingStrategy(node, soft=False) for name, node in nodes.items()}
        cloudpickle.register_pickle_by_value(probe)
        try:
            made = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_THREADS)(probe.Probe)
            self._actors = {
                name: made.options(scheduling_strategy=place).remote(token, _address(name), ports, *seconds)
                for name, place in self._places.items()
            }
        finally:
            cloudpickle.unregister_pickle_by_value(probe)
        self._runners: dict = {}

    def ask_facts(self) -> None:
        """Asks each node what it is; those that do not start a process in time are silent from here on."""
        started = {name: actor.clock.remote() for name, actor in self._actors.items()}
        self._answers(started, timeouts.get().doctor_start, "a process of Ray's there")
        asked = {name: self._actors[name].facts.remote() for name in self._answering()}
        self.found.facts = self._answers(asked, timeouts.get().doctor_facts, "its versions, limits and disks")

    def ask_clocks(self) -> None:
        """Bounds the difference of clocks: a node's time lies between question and answer, if clocks agree."""
        for name in self._answering():
            before = time.time()
            told = self._answers({name: self._actors[name].clock.remote()}, timeouts.get().doctor_clock, "the time")
            if name in told:
                after = time.time()
                self.found.skew[name] = min(told[name] - before, 0.0) + max(told[name] - after, 0.0)

    def measure_network(self) -> None:
        """Measures links, see `links_of`, and the rate to the next node, as the ring of a training uses it."""
        asked = {name: self._actors[name].listen.remote() for name in self._answering()}
        open_at, errors = self._gathered(asked, timeouts.get().doctor_facts)
        names = list(open_at)
        pairs = links_of(names)
        links = {(one, other): self._actors[one].reach.remote(_address(other), open_at[other]) for one, other in pairs}
        # A node has so many at a time, and each may take as long as a link may.
        each = -(-len(pairs) // max(1, len(names)))
        self.found.links = self._measured(links, _network() * (1 + each // _THREADS))
        for name, error in errors.items():
            for other in names:
                self.found.links[other, name] = {"error": f"{name} could not listen: {error}"}
        rates = {}
        for one, other in zip(names, names[1:] + names[:1], strict=True):
            if one != other and self.found.links[one, other]["error"] is None:
                rates[one, other] = self._actors[one].bandwidth.remote(_address(other), open_at[other][0])
        for link, seen in self._measured(rates, _network()).items():
            error = seen.pop("error")
            self.found.links[link] |= seen if error is None else {"stalled": f"{error}, with 8 MiB on their way"}

    def try_storage(self, storage: str) -> None:
        """Writes from each node; all read what the first wrote, and the first reads what all wrote."""
        folder, content = f"{storage.rstrip('/')}/raytf-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
        names = self._answering()
        try:
            asked = {(n, n): self._actors[n].write.remote(folder, f"{i}", content) for i, n in enumerate(names)}
            self._stored(asked)
            wrote = [n for n in names if (n, n) not in self.found.storage]
            first = wrote[0] if wrote else None
            pairs = [(first, n) for n in names if n != first] + [(n, first) for n in wrote if n != first]
            self._stored(
                {
                    (writer, reader): self._actors[reader].read.remote(folder, f"{names.index(writer)}", content)
                    for writer, reader in (pairs if first else ())
                    if (reader, reader) not in self.found.storage
                }
            )
        finally:
            # A folder that is not shared is there on each node that wrote.
            self._gathered({n: self._actors[n].remove.remote(folder) for n in names}, timeouts.get().doctor_storage)

    def _stored(self, asked: Mapping[tuple[str, str], object]) -> None:
        told, errors = self._gathered(asked, timeouts.get().doctor_storage)
        self.found.storage |= {pair: error for pair, error in (told | errors).items() if error is not None}

    def train(self) -> None:
        """Makes two steps over all nodes."""
        names = self._answering()
        spec = LaunchSpec(script="raytf.doctor.two_steps", module=True, num_workers=len(names))
        tasks = dict(zip(names, spec.tasks(), strict=True))
        made = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(TaskRunner)
        self._runners = {n: made.options(scheduling_strategy=self._places[n]).remote() for n in names}
        folder = shared_folders.folder(os.getcwd())
        asked = {n: runner.reserve.remote(folder, timeouts.get(), self._ports) for n, runner in self._runners.items()}
        places, errors = self._gathered(asked, self._left())
        self.found.training = dict(errors)
        if errors:
            return
        configs = roles.environment({tasks[n]: places[n].address for n in names})
        token, numbers = ring.new_token(), {}
        for n, runner in self._runners.items():
            environment = {"TF_CONFIG": configs[tasks[n]]} | spec.variables(tasks[n])
            numbers[n] = runner.start.remote([spec.script], True, environment, token, float("inf"))
        numbers, errors = self._gathered(numbers, self._left())
        self.found.training = errors or self._follow(numbers)

    def _follow(self, numbers: Mapping[str, int]) -> dict[str, str]:
        """How the scripts ended, where that is an error; a node whose script has not ended in time is one, too."""
        asked = {self._runners[n].follow.remote(number): n for n, number in numbers.items()}
        errors: dict[str, str] = {}
        while asked and self._left() > 0:
            for ref in ray.wait(list(asked), timeout=min(1.0, self._left()))[0]:
                name, end = asked.pop(ref), None
                try:
                    end = next((value for kind, value in _value(ref) if kind == "exit"), None)
                except ray.exceptions.RayError as error:
                    errors[name] = in_a_line(error)
                    continue
                if end is None:
                    asked[self._runners[name].follow.remote(numbers[name])] = name
                elif end.code:
                    errors[name] = end.reason()
        return errors | dict.fromkeys(asked.values(), "the two steps did not end in time")

    def close(self) -> None:
        """Ends all processes, sockets and scripts."""
        stops = {n: runner.stop.remote(0.0) for n, runner in self._runners.items()}
        closes = {("close", n): self._actors[n].close.remote() for n in self._answering()}
        refs = [*stops.values(), *closes.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeouts.get().doctor_close)
        for actor in [*self._runners.values(), *self._actors.values()]:
            ray.kill(actor)

    # ---------------------------------------------------------------------------------------------- answers

    def _answering(self) -> list[str]:
        return [name for name in self.found.nodes if name not in self.found.silent]

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _answers(self, asked: Mapping[str, object], seconds: float, what: str) -> dict:
        """What nodes answer; those that do not are silent from here on."""
        told, errors = self._gathered(asked, seconds)
        self.found.silent |= {name: f"waited for {what}: {error}" for name, error in errors.items()}
        return told

    def _measured(self, asked: Mapping[tuple[str, str], object], seconds: float) -> dict[tuple[str, str], dict]:
        told, errors = self._gathered(asked, seconds)
        return told | {link: {"error": error} for link, error in errors.items()}

    def _gathered(self, asked: Mapping, seconds: float) -> tuple[dict, dict[object, str]]:
        """(answers, errors) by what was asked, within a time."""
        if not asked:
            return {}, {}
        seconds = min(seconds, self._left())
        done = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)[0])
        told, errors = {}, {}
        for key, ref in asked.items():
            if ref not in done:
                errors[key] = f"no answer within {seconds:.0f} s"
                continue
            try:
                told[key] = _value(ref)
            except Exception as error:  # of Ray, or of the node; either way it is told
                cause = getattr(error, "cause", None) or error
                errors[key] = f"{type(cause).__name__}: {first_line(cause)}"
        return told, errors


def links_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the links to measure, (from, to): all of few nodes; of many, each node's to `_LINKS` others.

    These are the next one, as in a training's ring, and others at growing distances, so that the number grows with that
    of the nodes, and each node is both ends of as many.
    """
    count = len(names)
    distances = range(1, count)
    if count > _ALL_LINKS_NODES:
        distances = sorted({max(i + 1, round(count ** (i / _LINKS))) for i in range(_LINKS)})
    return [(names[i], names[(i + distance) % count]) for i in range(count) for distance in distances]


def _value(ref):
    """What has been answered, for which nobody waits any more."""
    return ray.get(ref, timeout=timeouts.get().doctor_close)


def _nodes() -> dict[str, str]:
    """Ids of living nodes by name: the address, and a number behind it where several have one address."""
    living = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"])
    found: dict[str, str] = {}
    for address, node in living:
        name = address if address not in found else f"{address}#{sum(n.startswith(address) for n in found)}"
        found[name] = node
    return found


def _address(name: str) -> str:
    return name.partition("#")[0]


def show(report: ExaminationReport, say: Callable[[str], None]) -> None:
    """Says a report: a line for each finding, and one for all."""
    for line in _lines(report):
        say(line)


def _lines(report: ExaminationReport) -> Iterable[str]:
    yield from (finding.line() for finding in report.findings)
    yield from (f"left out: {text}." for text in report.left_out)
    for interface in dict.fromkeys(report.interfaces.values()):
        nodes = [node for node, its in report.interfaces.items() if its == interface]
        yield f"network: workers exchange by {interface or 'an unknown interface'} on {', '.join(nodes)}"
    wrong = f"{len(report.findings)} finding(s)" if report.findings else "healthy"
    yield f"{len(report.nodes)} node(s), {report.seconds:.0f} s: {wrong}"


def _network() -> float:
    its = timeouts.get()
    return its.link + its.link_step
