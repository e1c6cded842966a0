"""`raytf doctor` on hosts that are network namespaces: faults of each are all found, and none where there are none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from cluster import local, namespaces
from tests import blocks
from tests.faulty_hosts import own, plant_in_the_network

ROOT = pathlib.Path(__file__).parents[2]
WHY_NOT = namespaces.available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]


def cluster_on(hosts):
    """A node on each."""
    return local.local_cluster(nodes=len(hosts), cpus=1, hosts=hosts)


def doctor(cluster, host, *options: str, code: int, **variables: str) -> str:
    """What the command of the page prints, with other options."""
    (command,) = blocks.commands(blocks.named("docs/guides/cluster.md", "doctor"))
    words = command.replace("HEAD:6379", cluster.address).split()
    assert words[-2:] == ["--storage", "/shared"]
    done = subprocess.run(
        host.command([os.path.join(os.path.dirname(sys.executable), words[0]), *words[1:-2], *options]),
        env=os.environ | cluster.environment | variables,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == code, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr * (code == 2)


def test_nothing_is_found_on_a_healthy_cluster_and_nothing_is_left(tmp_path):
    storage, wrong = tmp_path / "storage", tmp_path / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    with namespaces.hosts(2) as hosts:
        hosts = own(hosts, tmp_path)
        with cluster_on(hosts) as cluster:
            printed = doctor(cluster, hosts[0], "--storage", str(storage), "--seconds", "100", code=0)
            refused = doctor(cluster, hosts[0], code=2, RAY_AUTH_TOKEN_PATH=str(wrong))
            unusable = doctor(cluster, hosts[0], "--storage", str(wrong / "none"), "--no-training", "--json", code=1)
    assert re.fullmatch(r"(network: workers exchange by \S+ on \S+\n){2}2 node\(s\), \d+ s: healthy\n", printed)
    assert "requires its token; received: another one" in refused and "Traceback" not in refused
    report = json.loads(unusable)
    assert {(f["check"], "NotADirectoryError" in f["measured"]) for f in report["findings"]} == {("storage", True)}
    assert report["nodes"] == [host.address for host in hosts] and report["left_out"] == []
    assert not storage.exists()  # it is made as a run would make it, and removed


def test_planted_faults_are_all_found(tmp_path):
    storage, metadata = tmp_path / "storage", tmp_path / "METADATA"
    storage.mkdir()
    keras = pathlib.Path(importlib.metadata.distribution("keras").locate_file(""))
    keras = keras / f"keras-{importlib.metadata.version('keras')}.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.9.9\n")
    before = {
        1: f"mount --bind {storage} {storage}; mount -o remount,bind,ro {storage}; ulimit -n 2048",
        2: "mount -t tmpfs -o size=100m none /dev/shm; "
        f'mount -t tmpfs -o size=200m none "$TMPDIR"; mount --bind {metadata} {keras}',
        3: f"mount -t tmpfs -o size=1m none {storage}",
    }
    names = {1: "127.0.1.1 {name}", 3: ""}
    with namespaces.hosts(5) as hosts:
        hosts = own(hosts, tmp_path, before, names)
        with cluster_on(hosts) as cluster:
            plant_in_the_network(hosts)
            (frozen,) = [
                process
                for process in local.members(cluster)
                if process.name() == "raylet" and f"--node_ip_address={hosts[4].address}" in process.cmdline()
            ]
            frozen.send_signal(signal.SIGSTOP)
            try:
                report = json.loads(doctor(cluster, hosts[0], "--storage", str(storage), "--json", code=1))
            finally:
                frozen.send_signal(signal.SIGCONT)
    place = {host.address: i for i, host in enumerate(hosts)}
    found = {(f["check"], tuple(place[node] for node in f["nodes"])) for f in report["findings"]}
    text = "\n".join(f"{f['check']} {f['nodes']} {f['problem']}: {f['measured']}" for f in report["findings"])
    planted = {("answer", (4,)), ("files", (1,)), ("name", (1,)), ("storage", (1,))}
    planted |= {("shm", (2,)), ("disk", (2,)), ("versions", (2,)), ("ports", (0, 2)), ("mtu", (0, 1))}
    planted |= {("name", (3,)), ("storage", (3,)), ("loss", (0, 3)), ("bandwidth", (3, 0))}
    assert planted <= found, f"{planted - found}\n{text}"
    # and nothing of what is right: of the first host only ways to others
    assert {check for check, nodes in found if nodes == (0,)} == set(), text
    assert {check for check, _ in found} == {check for check, _ in planted}, text
    assert report["seconds"] < 60
    assert list(storage.iterdir()) == []
