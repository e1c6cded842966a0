"""Probes of `raytf doctor` on hosts that are network namespaces, without Ray: planted faults are found, no others."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import namespaces
from raytf.doctor.findings import Measurements, find_problems
from raytf.runtime import networks
from tests.faulty_hosts import own, plant_in_the_network

WHY_NOT = namespaces.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")


class Remote:
    """A probe in a process of its host."""

    def __init__(self, host, environment):
        self.address = host.address
        self._process = subprocess.Popen(
            host.command([sys.executable, "-m", "tests.processes.doctor_host"]),
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *call):
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self):
        self._process.kill()
        self._process.communicate()


def measured(hosts, storage, environment) -> Measurements:
    """What `examination` asks, of probes that are no actors."""
    with contextlib.ExitStack() as stack:
        remotes = [Remote(host, environment) for host in hosts]
        for remote in remotes:
            stack.callback(remote.end)
        pool = stack.enter_context(ThreadPoolExecutor(len(remotes)))
        found = Measurements(nodes=[host.address for host in hosts], tested={"keras": ("3.14", "3.15")})
        found.facts = dict(zip(found.nodes, pool.map(lambda r: r("facts"), remotes), strict=True))
        ports = dict(zip(found.nodes, (remote("listen", remote.address) for remote in remotes), strict=True))

        def reach(one):
            return {
                (one.address, other): one("reach", other, ports[other]) for other in found.nodes if other != one.address
            }

        for links in pool.map(reach, remotes):
            found.links |= links
        for (one, other), seen in found.links.items():
            if seen["error"] is None and one == found.nodes[0]:
                rate = remotes[0]("bandwidth", other, ports[other][0])
                seen |= {"rate": rate["rate"]} if rate["error"] is None else {"stalled": rate["error"]}
        folder = f"{storage}/raytf-doctor-1"
        for i, remote in enumerate(remotes):
            if (error := remote("write", folder, f"{i}", "x")) is not None:
                found.storage[remote.address, remote.address] = error
        for remote in remotes[1:]:
            error = remote("read", folder, "0", "x")
            if error is not None:
                found.storage[found.nodes[0], remote.address] = error
        for remote in remotes:
            remote("remove", folder)
    return found


@pytest.fixture
def token():
    """A token's file in a folder that all may pass."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="raytf-"))
    folder.chmod(0o755)
    (folder / "token").write_text("t")
    (folder / "token").chmod(0o600)
    yield folder / "token"
    shutil.rmtree(folder)


def test_nothing_is_found_on_healthy_hosts(tmp_path, token):
    with namespaces.hosts(3) as hosts:
        found = measured(own(hosts, tmp_path), tmp_path, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    assert [finding.line() for finding in find_problems(found)] == []
    inside = [host.link.replace("rto", "rti") for host in hosts]
    chosen = [networks.choose_address(facts["interfaces"], None, node) for node, facts in found.facts.items()]
    assert chosen == list(zip(inside, found.nodes, strict=True))
    assert len(found.links) == 6 and all("rtt" in seen and "large" in seen for seen in found.links.values())


def test_planted_faults_are_all_found_and_no_others(tmp_path, token):
    storage, metadata, readable = tmp_path / "storage", tmp_path / "METADATA", tmp_path / "readable"
    storage.mkdir()
    readable.write_text("t")
    readable.chmod(0o644)
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 3.9.9\n")
    keras = importlib.metadata.distribution("keras")
    keras = keras.locate_file(f"keras-{keras.version}.dist-info/METADATA")
    before = {
        1: f"mount --bind {storage} {storage}; mount -o remount,bind,ro {storage}; ulimit -n 2048; "
        f"mount --bind {readable} {token}",
        2: "mount -t tmpfs -o size=100m none /dev/shm; "
        f"mkdir -p {tmp_path}/full; mount -t tmpfs -o size=200m none {tmp_path}/full; export TMPDIR={tmp_path}/full; "
        f"mount --bind {metadata} {keras}",
        3: f"mount -t tmpfs -o size=1m none {storage}; export RAY_AUTH_MODE=",
    }
    with namespaces.hosts(4) as hosts:
        plant_in_the_network(hosts)
        hosts = own(hosts, tmp_path, before, {1: "127.0.1.1 {name}", 3: ""})
        found = measured(hosts, storage, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    findings = find_problems(found)
    text = "\n".join(finding.line() for finding in findings)
    place = {host.address: i for i, host in enumerate(hosts)}
    seen = {(finding.check, tuple(place[node] for node in finding.nodes)) for finding in findings}
    planted = {("files", (1,)), ("name", (1,)), ("token", (1,)), ("storage", (1,)), ("mtu", (0, 1))}
    planted |= {("shm", (2,)), ("disk", (2,)), ("versions", (2,)), ("ports", (0, 2))}
    planted |= {("name", (3,)), ("storage", (3,)), ("token", (3,)), ("loss", (0, 3)), ("bandwidth", (0, 3))}
    assert planted <= seen, f"{sorted(planted - seen)}\n{text}"
    # of network faults those between other hosts follow; nothing else is reported of any host
    network = {"ports", "mtu", "loss", "bandwidth"}
    assert {one for one in seen if one[0] not in network} == {one for one in planted if one[0] not in network}, text
    assert all(1 in nodes or 3 in nodes for check, nodes in seen if check in ("mtu", "loss", "bandwidth")), text
    assert {nodes for check, nodes in seen if check == "mtu"} <= {(0, 1), (2, 1), (3, 1)}, text
    assert "3.9.9" in text and "not tested with this keras" in text
    assert list(storage.iterdir()) == []
