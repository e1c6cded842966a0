"""cluster/local.py starts several nodes on this machine and ends exactly those."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from cluster import local
from raytf.errors import ConfigError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# A driver of its own process, as this one may already be connected to another cluster.
TASK_ON_EACH_NODE = """
import json, subprocess, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=2)
def visit():
    # Leaves an orphan in a session of its own, the kind of process that is hardest to find again.
    command = ["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"]
    orphan = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, check=True)
    return ray.get_runtime_context().get_node_id(), int(orphan.stdout)

ray.init(address=sys.argv[1], log_to_driver=False)
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
pinned = [visit.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
print(json.dumps({"nodes": nodes, "visits": ray.get([task.remote() for task in pinned], timeout=120)}))
"""


@pytest.fixture
def sleeper():
    """A process that bears the mark of the cluster "its own", and is no part of any other."""
    environment = {**os.environ, local.MARK: "its own"}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"started\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"started\n"  # only now its environment can be read for sure
        yield process
        process.kill()


def processes_of(cluster):
    """The processes of a cluster, found without the code under test."""
    nodes = [psutil.Process(node) for node in cluster.nodes]
    return nodes + [child for node in nodes for child in node.children(recursive=True)]


def alive(processes):
    """Returns those that still run; the process that adopted an orphan may be slow to reap it."""
    running = psutil.wait_procs(processes, timeout=0)[1]
    return [process for process in running if process.status() != psutil.STATUS_ZOMBIE]


def run_script(*arguments, timeout):
    command = [sys.executable, str(REPOSITORY / "cluster" / "local.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_two_nodes_run_tasks_and_end_without_touching_another_cluster(tmp_path):
    with local.local_cluster(nodes=1) as other:
        try:
            started = run_script("up", "--nodes", "2", "--cpus", "2", "--folder", str(tmp_path), timeout=200)
            assert started.returncode == 0, started.stderr
            cluster = local.load(tmp_path)
            assert cluster.address in started.stdout and f"--address {cluster.dashboard}" in started.stdout
            assert local.ask(cluster, 2, deadline=float("inf"))["alive"] == 2
            with pytest.raises(ConfigError, match="A folder holds one cluster"):
                local.up(folder=tmp_path)

            driver = subprocess.run(
                [sys.executable, "-c", TASK_ON_EACH_NODE, cluster.address],
                env=os.environ | cluster.environment,
                stdout=subprocess.PIPE,
                timeout=150,
                check=True,
            )
            seen = json.loads(driver.stdout)
            assert len(seen["nodes"]) == 2
            assert sorted(node for node, _ in seen["visits"]) == sorted(seen["nodes"])

            orphans = [psutil.Process(pid) for _, pid in seen["visits"]]
            own, others = processes_of(cluster) + orphans, processes_of(other)
            assert alive(own) and alive(others)
        finally:
            if (tmp_path / local.STATE).exists():
                local.down(tmp_path)
        assert not alive(own)
        assert not local.members(cluster)
        assert not os.listdir(tmp_path)
        assert not os.path.exists(cluster.ray_folder)
        # Ray ends an idle worker now and then by itself; the nodes and their services must be there.
        assert len(alive(others)) > len(other.nodes)
        assert local.ask(other, 1, deadline=float("inf"))["alive"] == 1
    assert not alive(others)
    assert not os.path.exists(other.folder)


def test_a_start_that_takes_too_long_leaves_nothing(tmp_path, monkeypatch):
    made, mkdtemp = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: made.append(mkdtemp(**options)) or made[-1])
    monkeypatch.setattr(local, "START_SECONDS", 0)
    with pytest.raises(local.LocalClusterError, match="All nodes must be alive within 0 s"):
        local.up(nodes=1, folder=tmp_path)
    assert not os.listdir(tmp_path)
    assert made and not any(os.path.exists(folder) for folder in made)


def down_of(folder, mark, node):
    """Ends the cluster of one node that a state file describes."""
    (folder / "ray").mkdir()
    cluster = local.Cluster(folder=str(folder), ray_folder=str(folder / "ray"), mark=mark, cpus=1, nodes=(node,))
    (folder / local.STATE).write_text(json.dumps(dataclasses.asdict(cluster)))
    local.down(folder)
    assert not os.listdir(folder)


def test_a_later_process_of_the_same_id_is_left_alone(tmp_path, sleeper):
    """After a reboot, too: the mark distinguishes a node from the process that has its id now."""
    down_of(tmp_path, "another", sleeper.pid)
    assert sleeper.poll() is None


def test_a_node_is_ended_by_another_process_than_its_parent(tmp_path, sleeper):
    down_of(tmp_path, "its own", sleeper.pid)
    assert sleeper.wait(30) == -signal.SIGTERM


def test_wait_for_nodes_names_a_node_that_has_gone(tmp_path, sleeper):
    cluster = local.Cluster(
        folder=str(tmp_path), ray_folder=str(tmp_path), mark="its own", cpus=1, nodes=(sleeper.pid,)
    )
    cluster.log(0).write_text("first\nlast")
    assert local._wait(lambda: "ready", cluster, 0) == "ready"
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie: it has the id, and no life
    with pytest.raises(local.LocalClusterError, match=r"Node 0 must run until `down`(.|\n)*last"):
        local._wait(lambda: False, cluster, float("inf"))


@pytest.mark.parametrize("arguments", [{"nodes": 0}, {"nodes": 1.5}, {"cpus": 0}, {"cpus": True}])
def test_wrong_numbers_are_refused_before_anything_starts(tmp_path, arguments):
    with pytest.raises(ConfigError, match=r"must be an integer of at least 1; received: .*Ask for 1 or more"):
        local.up(**arguments, folder=tmp_path)
    assert not os.listdir(tmp_path)


def test_a_long_temporary_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "long" * 8)
    with pytest.raises(ConfigError, match=r"path must be short.*longlong.*TMPDIR"):
        local.up(folder=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--nodes", "0"], "nodes must be an integer of at least 1; received: 0."),
        (["down"], "A cluster must be up in the folder"),
        (["status"], "A cluster must be up in the folder"),
    ],
)
def test_command_line_reports_an_error_in_a_sentence(tmp_path, arguments, sentence):
    run = run_script(*arguments, "--folder", str(tmp_path), timeout=60)
    assert run.returncode == 1
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr


CONNECTS = """
import ray
from raytf.runtime import connection

connection.connect([{"CPU": 1}], log_to_driver=False, include_dashboard=False)
print(ray.cluster_resources()["CPU"] >= 1)
"""


def test_a_cluster_that_has_ended_is_not_waited_for():
    """Ray notes its last cluster of a machine in a file, and a cluster that was killed leaves that."""
    with tempfile.TemporaryDirectory(prefix="raytf-tests-", ignore_cleanup_errors=True) as folder:
        os.mkdir(os.path.join(folder, "ray"))
        with open(os.path.join(folder, "ray", "ray_current_cluster"), "w") as note:
            note.write("127.0.0.1:1")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_TMPDIR": folder, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-c", CONNECTS], env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.stdout == "True\n", done.stderr[-3000:]
    assert re.search(r"raytf: the last Ray of this machine, \S+:1, has ended; another one is started", done.stderr)
