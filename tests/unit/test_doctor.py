"""What `raytf doctor` makes of measurements, fault by fault; and its sockets, against strangers."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from ray.scripts import scripts as ray_scripts

from raytf import cli
from raytf.doctor import examination, probe
from raytf.doctor.findings import Finding, Measurements, find_problems, hinders_training
from raytf.errors import ConfigError
from raytf.runtime import connection, networks

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
VERSIONS = {"python": "3.11.9", "ray": "2.60.0", "tensorflow": "2.21.0", "keras": "3.15.1", "raytf": "0.1.0"}
GIB = 2**30


def healthy() -> Measurements:
    facts = {
        node: {
            "versions": dict(VERSIONS),
            "files": 65536,
            "shm": (8 * GIB, 8 * GIB),
            "disks": {"/tmp": (50 * GIB, 100 * GIB)},
            "name": {"host": f"host{node[-1]}", "found": [node]},
            "token": {"mode": "token", "path": "/root/.ray/auth_token", "bits": 0o600},
            "interfaces": {"eth0": [node]},
            "container": {"cpus": None, "memory": None, "traces": True},
        }
        for node in (A, B, C)
    }
    link = {"error": None, "rtt": 2e-4, "loss": 0.0, "large": 1.0, "mtu": 1500, "rate": 1e9}
    return Measurements(
        nodes=[A, B, C],
        facts=facts,
        counted={node: {"CPU": 4.0, "memory": 8 * GIB, "object_store_memory": 2 * GIB} for node in (A, B, C)},
        skew=dict.fromkeys((A, B, C), 0.01),
        links={(one, other): dict(link) for one in (A, B, C) for other in (A, B, C) if one != other},
        training={},
        interfaces={node: ("eth0", node) for node in (A, B, C)},
        tested={"keras": ("3.14", "3.15")},
    )


def change(*path, to):
    """A fault: a measured value is another."""

    def plant(found: Measurements) -> None:
        values = getattr(found, path[0])
        for key in path[1:-1]:
            values = values[key]
        values[path[-1]] = to

    return plant


FAULTS = [
    (change("silent", C, to="no answer within 20 s"), "answer", (C,), "no answer within 20 s"),
    (change("facts", B, "versions", "ray", to="2.59.0"), "versions", (B,), "2.59.0 on 10.0.0.2"),
    (change("facts", B, "versions", "python", to="3.12.1"), "versions", (B,), "3.12.1"),
    (change("facts", B, "versions", "raytf", to=None), "versions", (B,), "not installed"),
    (change("facts", C, "files", to=1024), "files", (C,), "at most 1024"),
    (change("facts", B, "shm", to=(60 * 2**20, 64 * 2**20)), "shm", (B,), "60 MiB free of 64"),
    (change("facts", B, "shm", to=(2**20, 4 * GIB)), "shm", (B,), "1 MiB free of 4096"),
    (change("facts", B, "container", "cpus", to=0.5), "cpu", (B,), "4 counted, 0.5 allowed"),
    (change("facts", A, "container", "memory", to=GIB), "memory", (A,), "1.00 GiB, wanted 2"),
    (change("facts", A, "container", "memory", to=4 * GIB), "memory", (A,), "8.00 GiB counted, 4.00 allowed"),
    (change("facts", C, "container", "traces", to=False), "stacks", (C,), "lacks the capability SYS_PTRACE"),
    (change("interfaces", B, to=(None, None)), "network", (B,), "it has eth0 (10.0.0.2)"),
    (change("dashboard", A, to="[fd00::1]:8265: refused"), "dashboard", (A,), "[fd00::1]:8265: refused"),
    (change("facts", A, "disks", "/tmp", to=(GIB, 100 * GIB)), "disk", (A,), "1.00 GiB free"),
    (change("facts", A, "disks", "/tmp", to=(4 * GIB, 100 * GIB)), "disk", (A,), "4.00 GiB free of 100.00"),
    (change("facts", B, "name", to={"host": "b", "found": ["127.0.1.1"]}), "name", (B,), "b is 127.0.1.1"),
    (change("facts", B, "name", to={"host": "b", "found": "not known"}), "name", (B,), "b: not known"),
    (change("facts", B, "token", "mode", to=None), "token", (B,), "set on 10.0.0.1, 10.0.0.3"),
    (change("facts", C, "token", "bits", to=0o644), "token", (C,), "mode 644"),
    (change("skew", B, to=-7.25), "clock", (B,), "7.2 s behind"),
    (change("skew", B, to=3.0), "clock", (B,), "3.0 s ahead"),
    (change("links", (A, C), to={"error": "TimeoutError: timed out"}), "ports", (A, C), "timed out"),
    (change("links", (A, C), "rtt", to=0.08), "latency", (A, C), "80.0 ms"),
    (change("links", (C, A), "loss", to=0.1), "loss", (C, A), "10% of small"),
    (change("links", (C, B), "large", to=0.0), "mtu", (C, B), "100% of packets of 1500 bytes"),
    (change("links", (A, B), "rate", to=1e6), "bandwidth", (A, B), "8.0 Mbit/s"),
    (change("links", (A, B), "stalled", to="TimeoutError: timed out"), "bandwidth", (A, B), "timed out"),
    (change("storage", (A, A), to="PermissionError: no"), "storage", (A,), "PermissionError"),
    (change("storage", (A, C), to="FileNotFoundError: x"), "storage", (C,), "FileNotFoundError"),
    (change("training", B, to="ended by signal 9"), "training", (B,), "ended by signal 9"),
]


# The line of YAML of a finding, and where it is in a pod.
YAML = {
    "shm": ("emptyDir: {medium: Memory, sizeLimit: 4Gi}", "volume"),
    "cpu": ('resources: {limits: {cpu: "4"}}', "container"),
    "1.00 GiB, wanted 2": ("resources: {limits: {memory: 4Gi}}", "container"),
    "8.00 GiB counted, 4.00 allowed": ("resources: {limits: {memory: 8Gi}}", "container"),
    "stacks": (
        "securityContext: {runAsUser: 0, runAsNonRoot: false, capabilities: {add: [SYS_PTRACE]}}",
        "container",
    ),
    "disk": (
        "ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], "
        "resources: {requests: {storage: 20Gi}}}}}",
        "volume",
    ),
    "b is 127.0.1.1": ("hostNetwork: false", "pod"),
    "b: not known": ("hostNetwork: false", "pod"),
    "[fd00::1]:8265: refused": ('rayStartParams: {dashboard-host: ""}', "group"),
}
LACKS = [
    (plant, YAML.get(check) or YAML[measured]) for plant, check, _, measured in FAULTS if {check, measured} & {*YAML}
]


@pytest.mark.parametrize("plant, line", LACKS, ids=[line for _, (line, _) in LACKS])
def test_what_a_pod_lacks_is_reported_with_the_line_of_yaml_that_fixes_it(plant, line):
    found = healthy()
    plant(found)
    (finding,) = find_problems(found)
    assert "num-cpus" not in finding.fix  # half a CPU is no whole one that Ray could count
    text, at = line
    assert f"`{text}`" in finding.fix
    if at == "group":
        assert yaml.safe_load(text)["rayStartParams"].keys() <= {
            p.opts[0].lstrip("-") for p in ray_scripts.start.params
        }
        return
    container, volume, pod = ({**yaml.safe_load(text)} if at == part else {} for part in ("container", "volume", "pod"))
    pod |= {"containers": [{"name": "ray", **container}], "volumes": [{"name": "x", **(volume or {"emptyDir": {}})}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    kubernetes_validate.validate(manifest, "1.32", strict=True)


@pytest.mark.parametrize(
    "plant",
    [
        change("facts", B, "shm", to=(2**20, 2 * GIB)),  # full of Ray's own objects
        change("facts", B, "container", "memory", to=8 * GIB),
        change("facts", B, "container", "traces", to=None),  # as raytf's own pods have it
    ],
)
def test_what_is_meant_so_is_no_finding(plant):
    found = healthy()
    plant(found)
    assert find_problems(found) == []


def test_ray_may_count_the_whole_cpus_of_a_limit():
    found = healthy()
    change("facts", B, "container", "cpus", to=2.5)(found)
    (finding,) = find_problems(found)
    assert finding.fix.endswith('`rayStartParams: {num-cpus: "2"}`')


@pytest.mark.parametrize(
    "files, cpus, memory",
    [
        # version 2: in a namespace, with fractions, without limits, and with a limit of a group around
        ({"cgroup": "0::/\n", "cpu.max": "50000 100000\n", "memory.max": "67108864\n"}, 0.5, 64 * 2**20),
        ({"cgroup": "0::/\n", "cpu.max": "max 100000\n", "memory.max": "max\n"}, None, None),
        ({"cgroup": "0::/a/b\n", "a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5, None),
        # version 1: paths of the host, limits in the base; -1 and a huge number are none
        (
            {
                "cgroup": "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "1073741824\n",
            },
            2.5,
            GIB,
        ),
        (
            {
                "cgroup": "4:memory:/\n2:cpu:/\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
            None,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_control_groups(tmp_path, files, cpus, memory):
    for name, text in files.items():
        path = tmp_path / ("proc/self/cgroup" if name == "cgroup" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert probe.cgroup_limits(tmp_path) == {"cpus": cpus, "memory": memory}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="capabilities are dropped by root")
@pytest.mark.parametrize("dropped, traces", [("-sys_ptrace", "False"), ("-net_raw", "True"), ("-all", "None")])
def test_a_process_without_the_capability_may_not_look_at_others(dropped, traces):
    """Its parent has the capability, and may not be looked at by one that has it not."""
    code = "from raytf.doctor import probe; print(probe._traces())"
    command = ["setpriv", f"--bounding-set={dropped}", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == traces


def test_nothing_is_found_where_all_is_right():
    assert find_problems(healthy()) == []


@pytest.mark.parametrize(("plant", "check", "nodes", "measured"), FAULTS, ids=[f"{f[1]}-{f[3]}" for f in FAULTS])
def test_a_fault_is_one_finding_with_its_node_and_fix(plant, check, nodes, measured):
    found = healthy()
    plant(found)
    (finding,) = find_problems(found)
    assert (finding.check, finding.nodes) == (check, nodes) and measured in finding.measured
    line = finding.line()
    assert "\n" not in line and line.endswith(".") and finding.fix in line and all(node in line for node in nodes)
    assert hinders_training([finding]) == (check in ("answer", "versions", "network", "ports"))


def test_a_storage_of_a_nodes_own_is_one_finding_of_that_node():
    found = healthy()
    found.storage = {(A, C): "FileNotFoundError: x", (C, A): "FileNotFoundError: y"}
    assert [(finding.check, finding.nodes) for finding in find_problems(found)] == [("storage", (C,))]


def test_the_fix_of_closed_ports_names_those_that_were_asked_for():
    found = healthy()
    found.ports, found.links[A, C] = (40000, 40100), {"error": "timed out"}
    (finding,) = find_problems(found)
    assert "40000 to 40100" in finding.fix


def test_a_version_that_no_test_has_seen_is_a_finding_where_it_is_the_same_everywhere():
    found = healthy()
    for facts in found.facts.values():
        facts["versions"]["keras"] = "3.9.2"
    (finding,) = find_problems(found)
    assert finding.nodes == (A, B, C) and "3.14, 3.15" in finding.fix


def test_one_host_may_call_itself_by_a_loopback_address_and_filtered_datagrams_are_right():
    found = healthy()
    found.nodes, found.links = [A], {(A, B): {"error": None, "rtt": 1e-4, "rate": 1e9}}
    found.facts = {A: copy.deepcopy(found.facts[A])}
    found.facts[A]["name"]["found"] = ["127.0.0.1"]
    assert find_problems(found) == []


# ------------------------------------------------------------------------------------------------------- sockets

PORTS = (32000, 60000)
LOOPBACK = "127.0.0.1"


@pytest.fixture
def probes():
    """Two probes with one token, and one with another."""
    made = [probe.Probe(token, PORTS, 3.0, 9.0, 5.0) for token in (b"a" * 32, b"a" * 32, b"b" * 32)]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("address", [LOOPBACK, "::1"])
def test_a_probe_reaches_another_and_measures(probes, address):
    if address not in networks.interfaces().get("lo", ()):
        pytest.skip(f"this host has no {address}")
    at = probes[0].listen(address)
    seen = probes[1].reach(address, at)
    assert seen["error"] is None and seen["rtt"] < 1 and seen["large"] > 0.5 and seen["loss"] < 0.5
    assert probes[1].bandwidth(address, at[0])["rate"] > 1e6


def test_a_storage_that_does_not_exist_yet_is_made_and_removed(probes, tmp_path):
    """A run makes its folder, too."""
    folder = str(tmp_path / "runs" / "mine" / "raytf-doctor-1")
    assert probes[0].write(folder, "a", "text") is None
    assert probes[1].write(folder, "b", "text") is None and probes[1].read(folder, "a", "text") is None
    for one in (probes[1], probes[0]):
        one.remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_server_at_all_addresses_of_ipv4_is_none_of_ipv6(probes):
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert probes[0].connect_error(LOOPBACK, port) is None
        assert "Error" in probes[0].connect_error("::1", port)


class Missing:
    """A UDP socket whose program or link misses each tenth of some datagrams."""

    def __init__(self, first: int):
        self.socket, self.left, self.seen = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), first, 0
        self.socket.bind((LOOPBACK, 0))

    def recvfrom(self, size):
        while True:
            found = self.socket.recvfrom(size)
            self.seen += 1
            if self.seen > self.left or self.seen % 10:
                return found

    def sendto(self, *args):
        return self.socket.sendto(*args)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "loss"), [(probe.DATAGRAMS, 0.0), (10**6, 0.1)], ids=["busy", "link"])
def test_what_a_busy_host_misses_once_is_no_loss_of_its_link(probes, first, loss):
    missing = Missing(first)
    probes[0]._sockets = [missing.socket]  # closed with the probe
    threading.Thread(target=probes[0]._echo, args=(missing,), daemon=True).start()
    seen = probes[1]._datagrams(LOOPBACK, missing.socket.getsockname()[1])
    assert seen["loss"] == pytest.approx(loss, abs=0.02)


def test_peer_with_another_token_gets_no_answer(probes):
    at = probes[0].listen(LOOPBACK)
    assert "closed the connection" in probes[2].reach(LOOPBACK, at)["error"]
    assert probes[2]._datagrams(LOOPBACK, at[1]) == {}


@pytest.mark.slow
def test_silent_or_nonsensical_strangers_block_nobody(probes):
    at = probes[0].listen(LOOPBACK)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((LOOPBACK, at[0]), 5))
        loud = stack.enter_context(socket.create_connection((LOOPBACK, at[0]), 5))
        loud.sendall(b"GET / HTTP/1.1\r\n" * 100)
        probes[0]._step = 600.0  # so long each of them may take
        assert probes[1].reach(LOOPBACK, at)["error"] is None


@pytest.mark.slow
def test_program_that_accepts_and_sends_nothing_is_an_error_in_time(probes):
    with socket.create_server((LOOPBACK, 0)) as mute:
        probes[0]._step = 0.5
        assert "timed out" in probes[0].reach(LOOPBACK, (mute.getsockname()[1], 9))["error"]


def test_a_file_of_the_storage_must_have_the_content_of_its_writer(tmp_path, probes):
    missing = str(tmp_path / "raytf-doctor-1")
    assert probes[0].write(missing, "0", "x") is None and probes[1].read(missing, "0", "x") is None
    assert probes[1].read(missing, "0", "y") == "the file has another content"
    probes[0].remove(missing)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ports", "some"], "--ports takes FIRST-LAST"),
        (["--seconds", "1"], "at least 30 seconds"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, sentence):
    done = CliRunner().invoke(cli.main, ["doctor", *arguments])
    assert done.exit_code == 2 and sentence in " ".join(done.output.split()), done.output


def test_no_cluster_exits_with_2():
    """In a process of its own: one that has a connection keeps it."""
    command = [sys.executable, "-m", "raytf.cli", "doctor", "--address", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "needs a Ray cluster that answers" in " ".join(done.stderr.split()), done.stderr
    assert not done.stdout


def test_unresponsive_cluster_is_reported_without_the_traceback_of_grpc():
    with pytest.raises(ConfigError, match=r"needs a Ray cluster that answers.*RAY_ADDRESS=local") as refused:
        connection._accepts("127.0.0.1:1", "127.0.0.1:1")
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("healthy", [True, False])
def test_findings_are_lines_or_json_and_set_the_exit_code(healthy, monkeypatch):
    finding = Finding(check="disk", problem="it is full", nodes=(A,), measured="0 GiB", fix="Free some")
    report = examination.ExaminationReport(
        nodes=[A], findings=[] if healthy else [finding], left_out=[], interfaces={A: "eth0"}, seconds=1.0
    )
    monkeypatch.setattr(examination, "run_examination", lambda *args, **options: report)
    done = CliRunner().invoke(cli.main, ["doctor"])
    assert done.exit_code == (0 if healthy else 1)
    assert f"network: workers exchange by eth0 on {A}" in done.output
    assert ("healthy" in done.output) == healthy and ("Free some." in done.output) != healthy
    done = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert len(json.loads(done.output)["findings"]) == (0 if healthy else 1)
