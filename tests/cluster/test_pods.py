"""Pods of cluster/kubernetes/train.yaml without Kubernetes: the commands that KubeRay gives their containers.

Each pod is a network namespace with processes and a /tmp of its own. `drain.sh` runs in it as its preStop.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from cluster import namespaces
from tests.cluster import test_rayjob
from tests.cluster.test_rayjob import EVERYTHING, JOB, ROOT
from tests.waiting import until

pytestmark = test_rayjob.pytestmark


def command_of(group: dict, head: str | None = None) -> str:
    """What KubeRay 1.7 gives the container of a group: `generateRayStartCommand` of controllers/ray/common/pod.go.

    Args:
        group: The group of the file.
        head: Address of the head's pod; None for the head itself.
    """
    (container,) = group["template"]["spec"]["containers"]
    limits, units = container["resources"]["limits"], {"Gi": 2**30}
    memory = int(limits["memory"][:-2]) * units[limits["memory"][-2:]]
    given = {"metrics-export-port": 8080, "dashboard-agent-listen-port": 52365, "memory": memory}
    given |= {"num-cpus": limits["cpu"], **({"address": f"{head}:6379"} if head else {}), **group["rayStartParams"]}
    options = " ".join(f"--{name}={value}" for name, value in sorted(given.items()))
    start = f"ray start {'' if head else '--head '}--block {options}"
    return f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {start}"


class Pod:
    """A pod with the container of a group."""

    def __init__(self, group: dict, host, folder: pathlib.Path, variables: dict[str, str], head: str | None = None):
        (container,) = group["template"]["spec"]["containers"]
        own = {entry["name"]: entry["value"] for entry in container["env"]} | variables
        own |= {"RAY_ADDRESS": f"{head or '127.0.0.1'}:6379", "RAY_CLUSTER_NAME": "raytf-train-x", "RAY_PORT": "6379"}
        own |= {"RAY_NODE_TYPE_NAME": group.get("groupName", "headgroup"), "RAY_CLOUD_INSTANCE_ID": host.name}
        self.host, self.group, self.environment = host, group, os.environ | own
        # The volume /shared is at /mnt here; what follows is `/bin/bash -c -- ARGS` of the container.
        inside = f'mount --bind "{folder}" /mnt; mount -t tmpfs none /tmp; exec bash -c -- "$1"'
        isolated = ["unshare", "-m", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-ec", inside, "bash"]
        self.process = subprocess.Popen(host.command([*isolated, command_of(group, head)]), env=self.environment)

    def exec(self, *command: str) -> subprocess.Popen:
        """Starts a command in the pod, as `kubectl exec` does."""
        (first,) = until(psutil.Process(self.process.pid).children, self.process)
        inside = ["nsenter", f"--target={first.pid}", "--mount", "--pid", "--net", *command]
        return subprocess.Popen(
            inside, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def listens(self, port: int) -> bool:
        """Whether a process of the pod listens at a port, as probes of Kubernetes ask."""
        return self.exec("bash", "-c", f"exec 3<> /dev/tcp/127.0.0.1/{port}").wait() == 0

    def node(self) -> str:
        """Ray's id of its node, or "" while no raylet runs."""
        with contextlib.suppress(psutil.Error):  # the pod has ended
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended
                    words = process.cmdline()
                    if words and words[0].endswith("/raylet"):
                        return next(word.partition("=")[2] for word in words if word.startswith("--node_id="))
        return ""

    def drains(self) -> subprocess.Popen:
        """Starts the container's preStop."""
        (container,) = self.group["template"]["spec"]["containers"]
        script, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        return self.exec(str(ROOT / "cluster" / "kubernetes" / pathlib.PurePosixPath(script).name), seconds)


@pytest.fixture
def pods(tmp_path):
    """The head and three workers with a CPU each, where two train."""
    spec = next(yaml.safe_load_all((ROOT / "cluster" / "kubernetes" / "train.yaml").read_text()))["spec"]
    cluster = spec["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1"
    variables = {"WORKERS": "2", "CPUS": "1", "RUNS": "/mnt", "PYTHONPATH": str(ROOT), "HOME": "/tmp"}
    variables |= {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    variables |= {"RAY_agent_register_timeout_ms": "200000"}  # a busy machine takes its time
    with namespaces.hosts(4) as hosts, contextlib.ExitStack() as started:
        for host in hosts:  # a pod has a default route, by which Ray knows its own address
            route = ["route", "add", "default", "dev", host.link.replace("rto", "rti")]
            subprocess.run(["ip", "-n", host.name, *route], check=True)

        def start(group, host, address=None):
            pod = Pod(group, host, tmp_path, variables, address)
            started.callback(pod.process.wait)
            started.callback(pod.process.kill)
            return pod

        made = [start(head, hosts[0])]
        until(lambda: made[0].listens(6379), made[0].process)  # as the workers' init container waits
        made += [start(workers, host, hosts[0].address) for host in hosts[1:]]
        until(lambda: all(pod.node() for pod in made) and made[0].listens(8265))
        yield spec, made


def steps(folder, rank: int = 0) -> list[tuple[int, int]]:
    path = folder / f"digits_{rank}.txt"
    return [tuple(map(int, line.split()[1:3])) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_preStop_of_a_worker_keeps_its_step_and_ends_its_node(tmp_path, pods):
    """The job is submitted in the head's pod, by its own address there; the run continues on the third pod."""
    spec, (head, *workers) = pods
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    environment["env_vars"]["PYTHONPATH"] = str(ROOT)
    (tmp_path / "digits_hold").write_text("1 4")
    entrypoint = spec["entrypoint"].replace("/opt/raytf/jobs/digits.py", str(JOB))
    submit = f"ray job submit --address http://127.0.0.1:8265 --runtime-env-json {shlex.quote(json.dumps(environment))}"
    job = head.exec("bash", "-ce", "--", f"{submit} -- {entrypoint} ;")
    until(lambda: steps(tmp_path, 1)[-1:] == [(1, 4)], job)
    (node,) = {line.split()[0] for line in (tmp_path / "digits_1.txt").read_text().splitlines()}
    (drained,) = (pod for pod in workers if pod.node() == node)
    output, _ = (script := drained.drains()).communicate(timeout=120)
    assert script.returncode == 0, output
    assert not drained.node(), "its raylet has ended before the pod's time was over"
    drained.process.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0 and "trained 3 epochs" in output, output[-6000:]
    assert steps(tmp_path) == EVERYTHING
    nodes = {line.split()[0] for i in range(2) for line in (tmp_path / f"digits_{i}.txt").read_text().splitlines()}
    assert nodes == {pod.node() for pod in workers} - {""} | {node}
