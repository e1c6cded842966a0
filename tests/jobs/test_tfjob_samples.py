"""The commands of Kubeflow's TFJob samples as they are, with scripts of our own of their options and imports."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import secrets
import subprocess
import sys

import pytest

from cluster import local
from tests.jobs.tfjobs import REPLICA, TFJOB

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = pathlib.Path(__file__).parent / "scripts" / "tfjob"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIMPLE = """
              command:
                - "python"
                - "/var/tf_mnist/mnist_with_summaries.py"
"""
WITH_SUMMARIES = f"""{SIMPLE.rstrip()}
                - "--log_dir=/train/logs"
                - "--learning_rate=0.01"
                - "--batch_size=150"
              volumeMounts: [{{mountPath: /train, name: training}}]
          volumes: [{{name: training, persistentVolumeClaim: {{claimName: tfevent-volume}}}}]
"""
# A host with the script where the image has it, and the volume where the pod mounts it.
HOST = """
set -e
mount -t tmpfs none /var
mount -t tmpfs none /train
mkdir /var/tf_mnist
cp {scripts}/mnist*.py /var/tf_mnist
"$@"
find /train -name 'events.out.tfevents.*'
"""


def raytf(job: pathlib.Path) -> list[str]:
    """The command that runs a job."""
    return [sys.executable, "-m", "raytf.cli", "run", "--tfjob", str(job)]


def done(command: list[str], environment, folder: pathlib.Path) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    return process.returncode, process.stdout, process.stderr


@pytest.fixture
def volume():
    """The folder on which the host mounts its volume; it stays empty."""
    path = pathlib.Path("/train")
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    made = not path.exists()
    path.mkdir(exist_ok=True)
    yield
    if made:
        path.rmdir()


@pytest.mark.parametrize(
    "workers, command, rate", [(1, WITH_SUMMARIES, "0.01"), (2, SIMPLE, "0.001")], ids=["with summaries", "simple"]
)
def test_the_commands_of_mnist(tmp_path, volume, workers, command, rate):
    """Nothing but the YAML is named; the events are where its volume is, if it has one."""
    (tmp_path / "job.yaml").write_text(TFJOB + REPLICA % ("Worker", workers) + command)
    host = ["unshare", "-m", "sh", "-c", HOST.format(scripts=SCRIPTS), "sh"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    code, out, err = done([*host, *raytf(tmp_path / "job.yaml")], {"RAY_ADDRESS": "local"} | token, tmp_path)
    assert code == 0, out + err[-6000:]
    assert out.count(f"learning rate {rate} fell True") == workers
    events = {path.split("/")[3] for path in out.splitlines() if path.startswith("/train")}
    assert events == ({"train", "validation"} if command == WITH_SUMMARIES else set())


@pytest.fixture(scope="module")
def cluster():
    with local.local_cluster(nodes=2, cpus=2) as found:
        yield found


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
@pytest.mark.parametrize("image", ["tf-dist-mnist-test", "sample"])
def test_the_parameter_servers_of_dist_mnist(tmp_path, cluster, image):
    """On two nodes, by the line of the page, with Keras 2 as its image; and the error of Keras 3 with another."""
    replicas = {"Chief": 1, "PS": 1, "Worker": 2}
    text = TFJOB + "".join(REPLICA % (role, count) for role, count in replicas.items())
    (tmp_path / "job.yaml").write_text(text.replace("kubeflow/sample", f"kubeflow/{image}"))
    command = [*raytf(tmp_path / "job.yaml"), "dist_mnist.py"]
    code, out, err = done(command, cluster.environment | {"RAY_ADDRESS": cluster.address}, SCRIPTS)
    if image != "sample":
        assert code == 0, out + err[-6000:]
        assert len(re.findall(r"^\[(?:ps 0|worker [01])\] +serving", out, re.MULTILINE)) == 3
        assert re.search(r"\[chief 0\] +loss fell True on /job:ps", out)
    else:
        message = "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset"
        assert code == 1 and message in err + out
        assert message in (ROOT / "docs" / "troubleshooting.md").read_text()
