"""What a RayJob of cluster/kubernetes does, without Kubernetes: its pods' commands in pods of this machine."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import time

import numpy as np
import psutil
import pytest
import yaml

from cluster import namespaces
from tests import pods

WHY_NOT = namespaces.available() or (None if shutil.which("setpriv") else "setpriv must be installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
JOB = pathlib.Path(__file__).with_name("pod_job.py")
EVERYTHING = [(epoch, batch) for epoch in range(3) for batch in range(14)]


@pytest.fixture
def folder(tmp_path):
    """A folder with one in it that the pods share, in which anybody may write."""
    shared = tmp_path / "shared"
    (shared / "runs").mkdir(parents=True)
    for path in (shared, shared / "runs"):
        path.chmod(0o777)
    return tmp_path


def cluster(folder, **options) -> pods.Cluster:
    return pods.Cluster(pods.rayjob()["rayClusterSpec"], folder, folder / "shared", JOB, **options)


def submitted(found: pods.Cluster, name: str = "digits", workers: int = 2) -> subprocess.Popen:
    """Submits the entrypoint of the RayJob, as KubeRay's submitter; what it prints is the job's output."""
    spec = pods.rayjob()
    words = spec["entrypoint"].split(" ")
    words[3] = str(workers)  # as the kustomization
    words[words.index("--name") + 1] = name
    environment = json.dumps(yaml.safe_load(spec["runtimeEnvYAML"]))
    submit = ["ray", "job", "submit", f"--address=http://{pods.SERVICE}:8265", f"--runtime-env-json={environment}"]
    return found.pods[0].popen([*submit, "--", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(job: subprocess.Popen) -> str:
    said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said[-6000:]
    return said


def steps(folder, name: str = "digits", rank: int = 0) -> list[tuple[int, int]]:
    path = folder / "shared" / "runs" / f"{name}_{rank}.txt"
    return [tuple(map(int, line.split()[1:3])) for line in path.read_text().splitlines()] if path.exists() else []


def weights(folder, name: str = "digits") -> list:
    with np.load(folder / "shared" / "runs" / f"{name}.npz") as file:
        return [file[key] for key in file]


def wait_until(reached, job: subprocess.Popen) -> None:
    deadline = time.monotonic() + 400
    while not reached():
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()[0][-6000:]
        time.sleep(0.05)


def test_a_rayjob_whose_cluster_is_killed_resumes_in_a_new_one_at_the_next_step(folder):
    """All pods are killed in the sixth step of the second epoch, of which the fifth is kept."""
    runs = folder / "shared" / "runs"
    (runs / "digits_stuck").write_text("1 5")
    with cluster(folder).up([1, 1]) as found:
        job = submitted(found)
        wait_until((runs / "digits" / "step_000000000019" / "manifest.json").exists, job)
        assert steps(folder)[-1] == steps(folder, rank=1)[-1] == (1, 4)
        found.down()
        job.communicate()
    (runs / "digits_stuck").unlink()
    with cluster(folder).up([1, 1]) as found:
        assert "trained 3 epochs on raytf-train-head-" in finished(submitted(found))
        finished(submitted(found, "undisturbed"))
    assert steps(folder) == steps(folder, rank=1) == EVERYTHING
    for mine, other in zip(weights(folder), weights(folder, "undisturbed"), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9)


def test_a_drain_that_is_cut_short_loses_what_is_not_kept_and_says_so(folder):
    """Both workers are on a node that is given 5 s, in a step that takes longer; after 2 s its raylet is killed."""
    runs = folder / "shared" / "runs"
    (runs / "fifth_stuck").write_text("1 5")
    with cluster(folder).up([2, 2]) as found:
        job = submitted(found, "fifth")
        wait_until(lambda: steps(folder, "fifth", 1)[-1:] == [(1, 4)], job)
        wait_until(lambda: list((runs / "fifth").glob("step_*/manifest.json")), job)
        (pod,) = {pod.name: pod for pod in found.pods[1:] if trains(pod)}.values()
        raylet = pod.raylet()
        line = {word.partition("=")[0].replace("_", "-"): word.partition("=")[2] for word in raylet.cmdline()}
        drain = ["ray", "drain-node", f"--address={line['--gcs-address']}", f"--node-id={line['--node-id']}"]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        pod.run([*drain, "--deadline-remaining-seconds", "5"])
        time.sleep(2)  # the node's own time
        raylet.kill()
        (runs / "fifth_stuck").unlink()
        said = finished(job)
    made = steps(folder, "fifth")
    print(said)
    assert 0, [place for i, place in enumerate(made) if place in made[:i]]


def trains(pod: pods.Pod) -> bool:
    inside = psutil.Process(pod.process.pid).children(recursive=True)
    return any("RayTrainWorker" in " ".join(process.cmdline()) for process in inside)


@pytest.mark.parametrize(
    "options",
    [{"ipv6": True}, {"user": 54321, "home": "/nonexistent"}, {"cpu": 0.5}],
    ids=["ipv6", "user", "half-a-cpu"],
)
def test_a_training_in_strict_pods(folder, options):
    """Each pod has 64 MB of /dev/shm, a read-only root, /tmp, and a name that no other pod knows."""
    with cluster(folder, **options).up([1, 1]) as found:
        doctor = found.pods[1].popen(
            ["python", "-m", "raytf.cli", "doctor", "--storage", "/shared", "--seconds", "200", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said, errors = doctor.communicate(timeout=400)
        assert doctor.returncode == 1, said + errors[-4000:]
        report = json.loads(said)
        said = finished(submitted(found))
    assert "trained 3 epochs on raytf-train-head-" in said and steps(folder) == steps(folder, rank=1) == EVERYTHING
    checks = {finding["check"]: finding for finding in report["findings"]}
    assert set(checks) == ({"shm", "cpu"} if "cpu" in options else {"shm"}), report
    assert "emptyDir: {medium: Memory, sizeLimit: 4Gi}" in checks["shm"]["fix"]
