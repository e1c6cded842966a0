"""The RayJob of cluster/kubernetes without Kubernetes: its entrypoint on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import time

import numpy as np
import psutil
import pytest
import yaml

import raytf
from cluster import local, namespaces
from raytf.events import Kind
from tests.waiting import until

WHY_NOT = namespaces.available()
ROOT = pathlib.Path(__file__).parents[2]
JOB = pathlib.Path(__file__).with_name("rayjob_job.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
EVERYTHING = [(epoch, batch) for epoch in range(3) for batch in range(14)]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a cluster as KubeRay does: a head of the file's parameters, and worker nodes with so many CPUs.

    Its processes have the variables of the head's container, with the numbers of this test as kustomize sets them.
    """
    spec = next(yaml.safe_load_all((ROOT / "cluster" / "kubernetes" / "train.yaml").read_text()))["spec"]

    @contextlib.contextmanager
    def start(cpus: list[int], of_each: str):
        (container,) = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        for name, value in {"WORKERS": "2", "CPUS": of_each, "RUNS": str(tmp_path)}.items():
            assert name in [variable["name"] for variable in container["env"]]
            monkeypatch.setenv(name, value)
        head = spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
        options = [[f"--{name}={value}" for name, value in head.items()], *([f"--num-cpus={n}"] for n in cpus)]
        with (
            namespaces.hosts(1 + len(cpus)) as hosts,
            local.local_cluster(nodes=1 + len(cpus), options=options, hosts=hosts) as cluster,
        ):
            yield RayJob(spec, hosts, cluster)

    return start


class RayJob:
    """The job of the file: its command, with the test's script."""

    def __init__(self, spec: dict, hosts, cluster):
        self.spec, self.host, self.cluster = spec, hosts[0], cluster

    def popen(self, command: list[str]) -> subprocess.Popen:
        environment = os.environ | self.cluster.environment | {"PYTHONPATH": str(ROOT)}
        for name in ("WORKERS", "CPUS", "RUNS"):  # of the head's container alone
            del environment[name]
        return subprocess.Popen(
            self.host.command(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def submit(self, name: str) -> subprocess.Popen:
        """Submits it, as KubeRay's submitter does, by a line of bash; what that prints is the job's output."""
        entrypoint = self.spec["entrypoint"]
        for old, new in {"/opt/raytf/jobs/digits.py": JOB, "--name digits": f"--name {name}"}.items():
            assert old in entrypoint
            entrypoint = entrypoint.replace(old, str(new))
        environment = yaml.safe_load(self.spec["runtimeEnvYAML"])
        environment["env_vars"]["PYTHONPATH"] = str(ROOT)
        options = f"--address {self.cluster.dashboard} --runtime-env-json {shlex.quote(json.dumps(environment))}"
        return self.popen(["bash", "-ce", "--", f"{local._ray()} job submit {options} -- {entrypoint} ;"])

    def logs(self) -> list[pathlib.Path]:
        return [self.cluster.log(node) for node in range(len(self.cluster.nodes))]

    def kill(self) -> None:
        """Ends all of the cluster's processes at once."""
        for process in local.members(self.cluster):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def finished(job: subprocess.Popen) -> str:
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output[-6000:]
    return output


def steps(folder, name: str, rank: int = 0) -> list[tuple[int, int]]:
    path = folder / f"{name}_{rank}.txt"
    return [tuple(map(int, line.split()[1:3])) for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder, name: str) -> list:
    with np.load(folder / f"{name}.npz") as file:
        return [file[key] for key in file]


def test_a_job_whose_cluster_is_killed_resumes_in_a_new_one_at_the_next_step(tmp_path, started):
    """It is killed in the sixth step of the second epoch, of which the fifth is kept."""
    (tmp_path / "digits_stuck").write_text("1 5")
    with started([4, 4], "4") as rayjob:
        job = rayjob.submit("digits")
        until((tmp_path / "digits" / "step_000000000019" / "manifest.json").exists, job)
        assert steps(tmp_path, "digits")[-1] == steps(tmp_path, "digits", 1)[-1] == (1, 4)
        nodes = {(tmp_path / f"digits_{rank}.txt").read_text().split()[0] for rank in range(2)}
        assert len(nodes) == 2, "each pod has a worker, with all of its CPUs"
        rayjob.kill()
        job.communicate()
    (tmp_path / "digits_stuck").unlink()
    with started([4, 4], "4") as rayjob:
        assert "trained 3 epochs" in finished(rayjob.submit("digits"))
        finished(rayjob.submit("undisturbed"))
    assert steps(tmp_path, "digits") == steps(tmp_path, "digits", 1) == EVERYTHING
    for left, right in zip(weights(tmp_path, "digits"), weights(tmp_path, "undisturbed"), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-9)


def test_a_drain_that_is_cut_short_loses_the_steps_that_are_not_kept(tmp_path, started):
    """Both workers are on a node that is given 5 s, in a step that takes longer; after 2 s its raylet is killed.

    They end with it, and do not make the step.
    """
    (tmp_path / "fifth_stuck").write_text("1 5")
    with started([2, 2], "1") as rayjob:
        job = rayjob.submit("fifth")
        until(lambda: steps(tmp_path, "fifth", 1)[-1:] == [(1, 4)], job)
        until(lambda: list((tmp_path / "fifth").glob("step_*/manifest.json")), job)
        (node,) = {line.split()[0] for line in (tmp_path / "fifth_0.txt").read_text().splitlines()}
        seen = psutil.process_iter(["name", "cmdline"])
        (raylet,) = [
            one for one in seen if one.info["name"] == "raylet" and f"--node_id={node}" in (one.info["cmdline"] or ())
        ]
        workers = raylet.children(recursive=True)
        drain = [str(local._ray()), "drain-node", f"--address={rayjob.cluster.address}", f"--node-id={node}"]
        drain += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test", "--deadline-remaining-seconds=5"]
        drained = rayjob.popen(drain)
        assert drained.wait(60) == 0, drained.communicate()
        time.sleep(2)  # the node's own time
        raylet.kill()
        psutil.wait_procs(workers, 60)
        # as its node logs: the signal has ended it, which did not leave by itself before
        until(lambda: any("raylet [exit code=-9]" in log.read_text() for log in rayjob.logs()), job)
        (tmp_path / "fifth_stuck").unlink()
        output = finished(job)
    made = steps(tmp_path, "fifth")
    again = [place for i, place in enumerate(made) if place in made[:i]]
    # of the second epoch's steps those that no checkpoint has
    assert 0 < len(again) < 5 and again == [(1, batch) for batch in range(5 - len(again), 5)]
    assert sorted(set(made)) == EVERYTHING
    said_of = [event.steps for event in raytf.run_events(tmp_path / "fifth") if event.kind == Kind.STEPS_REPEATED]
    assert said_of == [len(again)] and f"at least {len(again)} step(s) made since are repeated" in output
