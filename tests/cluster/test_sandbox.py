"""A training in a container as Kubernetes may have it: 64 MB of /dev/shm, a read-only root, a user without a home.

Namespaces and dropped rights replace the container. Files are read by the capability DAC_READ_SEARCH, as this
machine's Python may be in the home of root.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import subprocess
import sys

import pytest

from tests.waiting import until

CPU_GROUPS = pathlib.Path("/sys/fs/cgroup/cpu")
ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="mounts and users need root"),
]
SCRIPT = """
import os

import keras
import numpy as np
import ray
import raytf
from ray.train import RunConfig, ScalingConfig
from raytf.doctor import probe


def build_model(config):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


for folder in ("/", os.path.expanduser("~")):
    assert not os.access(folder, os.W_OK), folder
rows = ray.data.from_items([{"a": a, "b": b, "y": a + b} for a, b in np.random.default_rng(0).random((200, 2))])
result = raytf.KerasTrainer(
    build_model,
    datasets={"train": rows},
    features=["a", "b"],
    labels="y",
    config={"batch_size": 20, "epochs": 2},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=RunConfig(name="sandboxed", storage_path="/tmp/runs"),
).fit()
print("CPUs:", probe.cgroup_limits()["cpus"])
print("trained", len(result.metrics_dataframe), os.getuid(), os.statvfs("/dev/shm").f_blocks * 4096 >> 20)
"""
SANDBOX = """
set -e
[ ! "$CPU_GROUP" ] || echo 0 > "$CPU_GROUP/cgroup.procs"
mount -t tmpfs -o size=64m none /dev/shm
mount --bind {folder} /mnt
mount -t tmpfs -o mode=1777 none /tmp
mount -o remount,bind,ro /
cd /tmp
exec setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps=-all,+dac_read_search \
    --ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search "$@"
"""


@pytest.fixture
def half_a_cpu():
    """A control group whose processes have half a CPU together."""
    if not os.access(CPU_GROUPS / "cpu.cfs_quota_us", os.R_OK):
        pytest.skip("needs the controller cpu of control groups, version 1")
    group = CPU_GROUPS / f"raytf-{secrets.token_hex(4)}"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text("50000")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.timeout(900)
def test_a_training_in_a_sandbox_with_half_a_cpu(tmp_path, half_a_cpu):
    assert "CPUs: 0.5" in trained(tmp_path, CPU_GROUP=str(half_a_cpu))


@pytest.mark.timeout(600)
def test_a_training_in_a_sandbox(tmp_path):
    trained(tmp_path)


def trained(tmp_path, **variables: str) -> str:
    """What the training prints in the sandbox."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    environment |= {"CPU_GROUP": ""} | variables
    environment |= {"HOME": "/nonexistent", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "TMPDIR": "/tmp"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # as KubeRay gives pods
    command = ["unshare", "-m", "bash", "-c", SANDBOX.format(folder=tmp_path), "bash", sys.executable, "/mnt/train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "trained 2 54321 64" in done.stdout
    return done.stdout
