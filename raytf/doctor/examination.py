"""Examination of a cluster: a probe on each node measures with deadlines; a node without an answer is a finding."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import timeouts
from raytf.collectives import ring_token
from raytf.compat import ray_core, versions
from raytf.console.phases import Phases, starting_phase
from raytf.doctor import probe
from raytf.doctor.findings import Finding, Measurements, address_of, find_problems, hinders_training
from raytf.errors import ConfigError, first_line, one_line
from raytf.launch.runner import TaskRunner
from raytf.launch.spec import LaunchSpec
from raytf.runtime import networks, roles, shared_folders
from raytf.runtime.connection import connect, resolve_address
from raytf.runtime.ports import split_address
from raytf.runtime.settings import PORTS, Listening, check_ports

# Number of a node's links that are measured at a time.
_THREADS = 8
# Number of nodes up to which all links are measured; with more nodes, number of measured links per node.
_ALL_LINKS_NODES = 16
_LINKS = 8
LEAST_TIME = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExaminationReport:
    """The result of an examination.

    Args:
        nodes: All living nodes.
        findings: Problems; empty if the cluster is healthy.
        left_out: Omitted checks with reasons, in sentences.
        interfaces: Network interface of each node's worker traffic, None if unknown.
        seconds: Duration in seconds.
    """

    nodes: list[str]
    findings: list[Finding]
    left_out: list[str]
    interfaces: dict[str, str | None]
    seconds: float


def run_examination(
    address: str | None = None,
    *,
    storage: str | None = None,
    ports: tuple[int, int] = PORTS,
    network: str | None = None,
    training: bool = True,
    seconds: float = 55.0,
    shown: Phases | None = None,
) -> ExaminationReport:
    """Examines a running cluster.

    Args:
        address: Address of the cluster; None uses RAY_ADDRESS, or the newest of this machine; "local" starts one.
        storage: Absolute path or URI that all nodes should share; None checks none.
        ports: First and last port by which nodes should reach each other.
        network: As `TensorflowConfig.network`.
        training: Whether to make two steps of Keras over all nodes.
        seconds: Deadline for the examination in seconds, at least 30.
        shown: Shows what is examined, or None.

    Raises:
        ConfigError: An argument is wrong, or no cluster answers.
    """
    shown = shown or Phases(None)
    check_ports(ports)
    networks.check_network(network)
    if not seconds >= LEAST_TIME:
        raise ConfigError(
            f"An examination takes at least {LEAST_TIME:g} seconds", seconds, f"Pass {LEAST_TIME:g} or more"
        )
    if storage is not None and "://" not in storage and not os.path.isabs(storage):
        raise ConfigError("The storage is an absolute path or a URI", repr(storage), "Write it from the root")
    if resolve_address(address) is None and "local" not in (address, os.environ.get("RAY_ADDRESS")):
        raise ConfigError(
            "raytf doctor examines a running Ray cluster",
            "no address, and none runs on this machine",
            "Give --address HOST:PORT, or start one with `ray start --head`",
        )
    began = time.monotonic()
    shown.begin(starting_phase())
    connect([], address, logging_level=logging.ERROR, log_to_driver=False)
    with contextlib.closing(_Cluster(Listening(ports, network), began + seconds)) as cluster:
        shown.begin(f"starting a process on each of {len(cluster.measurements.nodes)} node(s), and looking at it")
        cluster.ask_facts()
        cluster.ask_clocks()
        cluster.ask_dashboard()
        shown.begin("measuring the network")
        cluster.measure_network()
        left_out = []
        facts = cluster.measurements.facts
        if untraced := [name for name, of_node in facts.items() if of_node["container"]["traces"] is None]:
            left_out.append(
                f"The stack of a worker that hangs is not shown on {', '.join(untraced)}: the containers have no "
                "capabilities, as the Pod Security Standard restricted wants it"
            )
        nodes, links = len(cluster.measurements.nodes), len(cluster.measurements.links)
        if links < nodes * (nodes - 1) and nodes > _ALL_LINKS_NODES:
            left_out.append(f"{links} of {nodes * (nodes - 1)} links were measured, those of each node to some others")
        if storage is None:
            left_out.append("No shared storage was named (--storage)")
        else:
            shown.begin("writing to the storage, and reading it")
            cluster.try_storage(storage)
        if training and hinders_training(find_problems(cluster.measurements)):
            left_out.append("No training was tried, as nodes do not answer, differ in versions, or do not reach others")
        elif training:
            shown.begin("making two steps of Keras")
            cluster.train()
        measurements = cluster.measurements
    return ExaminationReport(
        nodes=measurements.nodes,
        findings=find_problems(measurements),
        left_out=left_out,
        interfaces={node: interface for node, (interface, _) in measurements.interfaces.items()},
        seconds=round(time.monotonic() - began, 1),
    )


class _Cluster:
    """Probes of a cluster, and their measurements."""

    def __init__(self, listening: Listening, deadline: float):
        self._listening, self._deadline = listening, deadline
        nodes = _nodes()
        counted = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        self.measurements = Measurements(
            nodes=list(nodes),
            tested=versions.TESTED,
            ports=listening.ports,
            network=listening.network,
            counted={name: counted[node] for name, node in nodes.items()},
        )
        token, limits = secrets.token_bytes(32), timeouts.get()
        seconds = limits.link_step, limits.link, limits.name_lookup
        self._locations = {name: NodeAffinitySchedulingStrategy(node, soft=False) for name, node in nodes.items()}
        by_value = probe, networks
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            actor_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_THREADS)(probe.Probe)
            self._actors = {
                name: actor_class.options(scheduling_strategy=strategy).remote(token, listening.ports, *seconds)
                for name, strategy in self._locations.items()
            }
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)
        self._runners: dict = {}

    def ask_facts(self) -> None:
        """Collects the facts of each node; nodes that start no process in time count as silent from now on."""
        started = {name: actor.clock.remote() for name, actor in self._actors.items()}
        self._answers(started, timeouts.get().doctor_start, "a process of Ray's there")
        requests = {name: self._actors[name].facts.remote() for name in self._answering_nodes()}
        self.measurements.facts = self._answers(requests, timeouts.get().doctor_facts, "its versions, limits and disks")
        self.measurements.interfaces = {
            name: networks.choose_address(facts["interfaces"], self._listening.network, address_of(name))
            for name, facts in self.measurements.facts.items()
        }

    def ask_clocks(self) -> None:
        """Bounds the difference of clocks: a node's time is between request and answer, if clocks agree."""
        for name in self._answering_nodes():
            requested_at = time.time()
            times = self._answers({name: self._actors[name].clock.remote()}, timeouts.get().doctor_clock, "the time")
            if name in times:
                answered_at = time.time()
                self.measurements.skew[name] = min(times[name] - requested_at, 0.0) + max(
                    times[name] - answered_at, 0.0
                )

    def ask_dashboard(self) -> None:
        """Connects to Ray's dashboard on the head at the head's address; one for that host alone is left out."""
        given = ray_core.dashboard_address()
        host, port = split_address(given) if given else ("", 0)
        head = [name for name in self._answering_nodes() if address_of(name) == host][:1]
        requests = {name: self._actors[name].connect_error.remote(host, port) for name in head}
        refused, _ = self._gather(requests, timeouts.get().doctor_facts)
        self.measurements.dashboard = {name: f"{given}: {error}" for name, error in refused.items() if error}

    def measure_network(self) -> None:
        """Measures links, see `choose_links`, and the rate to the next node, as in the ring of a training."""
        address_of = {
            name: address for name, (_, address) in self.measurements.interfaces.items() if address is not None
        }
        requests = {
            name: self._actors[name].listen.remote(address_of[name])
            for name in self._answering_nodes()
            if name in address_of
        }
        open_at, errors = self._gather(requests, timeouts.get().doctor_facts)
        names = list(open_at)
        pairs = choose_links(names)
        links = {
            (source, target): self._actors[source].reach.remote(address_of[target], open_at[target])
            for source, target in pairs
        }
        # Each node measures `_THREADS` links at a time, and each link may use its whole timeout.
        per_node = -(-len(pairs) // max(1, len(names)))
        self.measurements.links = self._collect_measurements(links, _network() * (1 + per_node // _THREADS))
        for name, error in errors.items():
            for target in names:
                self.measurements.links[target, name] = {"error": f"{name} could not listen: {error}"}
        rates = {}
        for source, target in zip(names, names[1:] + names[:1], strict=True):
            if source != target and self.measurements.links[source, target]["error"] is None:
                rates[source, target] = self._actors[source].bandwidth.remote(address_of[target], open_at[target][0])
        for link, seen in self._collect_measurements(rates, _network()).items():
            error = seen.pop("error")
            self.measurements.links[link] |= seen if error is None else {"stalled": f"{error}, with 8 MiB on their way"}

    def try_storage(self, storage: str) -> None:
        """Writes from each node; all nodes read the first one's file, and the first reads all files."""
        folder, content = f"{storage.rstrip('/')}/raytf-doctor-{secrets.token_hex(8)}", secrets.token_hex(16)
        names = self._answering_nodes()
        try:
            requests = {(n, n): self._actors[n].write.remote(folder, f"{i}", content) for i, n in enumerate(names)}
            self._check_stored(requests)
            wrote = [n for n in names if (n, n) not in self.measurements.storage]
            first = wrote[0] if wrote else None
            pairs = [(first, n) for n in names if n != first] + [(n, first) for n in wrote if n != first]
            self._check_stored(
                {
                    (writer, reader): self._actors[reader].read.remote(folder, f"{names.index(writer)}", content)
                    for writer, reader in (pairs if first else ())
                    if (reader, reader) not in self.measurements.storage
                }
            )
        finally:
            # A folder that is not shared exists on each node that wrote.
            self._gather({n: self._actors[n].remove.remote(folder) for n in names}, timeouts.get().doctor_storage)

    def _check_stored(self, requests: Mapping[tuple[str, str], object]) -> None:
        errors_read, errors = self._gather(requests, timeouts.get().doctor_storage)
        self.measurements.storage |= {
            pair: error for pair, error in (errors_read | errors).items() if error is not None
        }

    def train(self) -> None:
        """Makes two steps of a training over all nodes."""
        names = self._answering_nodes()
        spec = LaunchSpec(script="raytf.doctor.two_steps", module=True, num_workers=len(names))
        tasks = dict(zip(names, spec.tasks(), strict=True))
        actor_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(TaskRunner)
        self._runners = {n: actor_class.options(scheduling_strategy=self._locations[n]).remote() for n in names}
        folder = shared_folders.describe_folder(os.getcwd())
        requests = {
            n: runner.reserve.remote(folder, timeouts.get(), self._listening) for n, runner in self._runners.items()
        }
        locations, errors = self._gather(requests, self._remaining())
        self.measurements.training = dict(errors)
        if errors:
            return
        configs = roles.environment({tasks[n]: locations[n].address for n in names})
        token, numbers = ring_token.new_token(), {}
        for n, runner in self._runners.items():
            environment = {"TF_CONFIG": configs[tasks[n]]} | spec.variables(tasks[n])
            numbers[n] = runner.start.remote([spec.script], True, environment, token, float("inf"))
        numbers, errors = self._gather(numbers, self._remaining())
        self.measurements.training = errors or self._follow(numbers)

    def _follow(self, numbers: Mapping[str, int]) -> dict[str, str]:
        """Returns the errors of scripts by node; a script that has not ended in time is one, too."""
        requests = {self._runners[n].follow.remote(number): n for n, number in numbers.items()}
        errors: dict[str, str] = {}
        while requests and self._remaining() > 0:
            for ref in ray.wait(list(requests), timeout=min(1.0, self._remaining()))[0]:
                name, end = requests.pop(ref), None
                try:
                    end = next((value for kind, value in _value(ref) if kind == "exit"), None)
                except ray.exceptions.RayError as error:
                    errors[name] = one_line(error)
                    continue
                if end is None:
                    requests[self._runners[name].follow.remote(numbers[name])] = name
                elif end.code:
                    errors[name] = end.reason()
        return errors | dict.fromkeys(requests.values(), "timeout: the two steps did not end")

    def close(self) -> None:
        """Ends all processes, sockets and scripts."""
        stops = {n: runner.stop.remote(0.0) for n, runner in self._runners.items()}
        closes = {("close", n): self._actors[n].close.remote() for n in self._answering_nodes()}
        refs = [*stops.values(), *closes.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeouts.get().doctor_close)
        for actor in [*self._runners.values(), *self._actors.values()]:
            ray.kill(actor)

    # ---------------------------------------------------------------------------------------------- answers

    def _answering_nodes(self) -> list[str]:
        return [name for name in self.measurements.nodes if name not in self.measurements.silent]

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _answers(self, requests: Mapping[str, object], seconds: float, action: str) -> dict:
        """Returns the answers of nodes; nodes without one count as silent from now on."""
        answers, errors = self._gather(requests, seconds)
        self.measurements.silent |= {name: f"waited for {action}: {error}" for name, error in errors.items()}
        return answers

    def _collect_measurements(
        self, requests: Mapping[tuple[str, str], object], seconds: float
    ) -> dict[tuple[str, str], dict]:
        measured, errors = self._gather(requests, seconds)
        return measured | {link: {"error": error} for link, error in errors.items()}

    def _gather(self, requests: Mapping, seconds: float) -> tuple[dict, dict[object, str]]:
        """Returns (answers, errors) by the keys of the requests, within `seconds`."""
        if not requests:
            return {}, {}
        seconds = min(seconds, self._remaining())
        done = set(ray.wait(list(requests.values()), num_returns=len(requests), timeout=seconds)[0])
        answers, errors = {}, {}
        for key, ref in requests.items():
            if ref not in done:
                errors[key] = f"timeout: no answer within {seconds:.0f} s"
                continue
            try:
                answers[key] = _value(ref)
            except Exception as error:  # from Ray or from the node; it is reported in either case
                cause = getattr(error, "cause", None) or error
                errors[key] = f"{type(cause).__name__}: {first_line(cause)}"
        return answers, errors


def choose_links(names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the links to measure, (from, to): all of few nodes; of many, each node's to `_LINKS` others.

    These are the next one, as in a training's ring, and others at growing distances. Their number grows linearly with
    the nodes, and each node is both ends of equally many.
    """
    count = len(names)
    distances = range(1, count)
    if count > _ALL_LINKS_NODES:
        distances = sorted({max(i + 1, round(count ** (i / _LINKS))) for i in range(_LINKS)})
    return [(names[i], names[(i + distance) % count]) for i in range(count) for distance in distances]


def _value(ref):
    """Returns the value of a completed ref."""
    return ray.get(ref, timeout=timeouts.get().doctor_close)


def _nodes() -> dict[str, str]:
    """Returns the ids of living nodes by name: the address, then a number if several nodes have the same."""
    living = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"])
    ids: dict[str, str] = {}
    for address, node in living:
        name = address if address not in ids else f"{address}#{sum(n.startswith(address) for n in ids)}"
        ids[name] = node
    return ids


def report_lines(report: ExaminationReport) -> Iterable[str]:
    """Yields a line for each finding of a report, and a summary."""
    yield from (finding.line() for finding in report.findings)
    yield from (f"left out: {text}." for text in report.left_out)
    yield from (f"network: {line}" for line in networks.interface_lines(report.interfaces))
    wrong = f"{len(report.findings)} finding(s)" if report.findings else "healthy"
    yield f"{len(report.nodes)} node(s), {report.seconds:.0f} s: {wrong}"


def _network() -> float:
    limits = timeouts.get()
    return limits.link + limits.link_step
