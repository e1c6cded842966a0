"""Trainings in a container as Kubernetes may have it, with one restriction each, and with all of them.

Namespaces and dropped rights replace the container. Its /tmp is a mount, as an emptyDir.
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

GROUPS = pathlib.Path("/sys/fs/cgroup")
ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="mounts and users need root"),
]
SCRIPT = """
import os

{proofs}
import keras
import numpy as np
import ray
import raytf
from ray.train import RunConfig, ScalingConfig


def build_model(config):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


rows = ray.data.from_items([{{"a": a, "b": b, "y": a + b}} for a, b in np.random.default_rng(0).random((200, 2))])
result = raytf.KerasTrainer(
    build_model,
    datasets={{"train": rows}},
    features=["a", "b"],
    labels="y",
    config={{"batch_size": 20, "epochs": 2}},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={{"CPU": 0.5}}),
    run_config=RunConfig(name="sandboxed", storage_path="/tmp/runs"),
).fit()
print("trained", len(result.metrics_dataframe))
"""
# By name: lines as root before the training, options of setpriv, and the proof that the restriction holds in it.
RESTRICTIONS = {
    "a /dev/shm of 64 MB": (
        "mount -t tmpfs -o size=64m none /dev/shm",
        "",
        "shm = os.statvfs('/dev/shm'); assert shm.f_blocks * shm.f_frsize == 64 * 2**20",
    ),
    "a read-only root": ("mount -o remount,bind,ro /", "", "assert os.statvfs('/').f_flag & os.ST_RDONLY"),
    "a user without a home": (
        "",
        "--reuid 54321 --regid 54321 --clear-groups",
        "assert os.getuid() == 54321 and not os.path.exists(os.path.expanduser('~'))",
    ),
    "no capabilities": (
        "",
        "--no-new-privs --inh-caps=-all --ambient-caps=-all --bounding-set=-all",
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "assert all(int(status[name], 16) == 0 for name in ('CapEff', 'CapPrm', 'CapBnd', 'CapAmb'))",
    ),
}
HALF = "from raytf.doctor import probe; assert probe.cgroup_limits()['cpus'] == 0.5, probe.cgroup_limits()"


def opened() -> list[str]:
    """Lines of a shell that give any user a way to this Python and the clone, where a folder on it is closed.

    Such a folder, as the home of root, is another one in the sandbox, with these folders alone.
    """
    needed: dict[pathlib.Path, set[pathlib.Path]] = {}
    for path in {pathlib.Path(folder).resolve() for folder in (sys.base_prefix, sys.prefix, ROOT)}:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                needed.setdefault(folder, set()).add(path)
                break
    lines = []
    for folder, paths in needed.items():
        places = {path: f"/mnt/{secrets.token_hex(4)}" for path in paths}
        lines += [f"mkdir {place}; mount --bind '{path}' {place}" for path, place in places.items()]
        lines += [f"mount -t tmpfs -o mode=755 none '{folder}'"]
        lines += [f"mkdir -p '{path}'; mount --bind {place} '{path}'" for path, place in places.items()]
    return lines


def train(tmp_path, names: list[str], group: pathlib.Path | None = None) -> None:
    """Trains with some restrictions, in a control group if there is one."""
    befores, options, proofs = zip(*(RESTRICTIONS[name] for name in names), strict=True)
    (tmp_path / "train.py").write_text(SCRIPT.format(proofs="\n".join([*proofs, *([HALF] if group else [])])))
    lines = [f"echo 0 > {group}/cgroup.procs"] if group else []
    lines += ["mount -t tmpfs none /mnt", *opened(), f"mkdir /mnt/folder; mount --bind '{tmp_path}' /mnt/folder"]
    lines += ["chmod 755 /mnt/folder; mount -t tmpfs -o mode=1777 none /tmp", *befores, "cd /tmp"]
    lines += [f'exec setpriv {" ".join(options)} "$@"']
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    home = "/nonexistent" if "a user without a home" in names else "/tmp"  # root would make it
    environment |= {"HOME": home, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "TMPDIR": "/tmp"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # as KubeRay gives pods
    command = ["unshare", "-m", "bash", "-ec", "\n".join(lines), "bash", sys.executable, "/mnt/folder/train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "trained 2" in done.stdout


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_a_training_with_a_restriction(tmp_path, name):
    train(tmp_path, [name])


def test_a_training_with_all_restrictions(tmp_path):
    train(tmp_path, [*RESTRICTIONS])


@pytest.fixture
def half_a_cpu():
    """A control group, of version 1 or 2, whose processes have half a CPU together."""
    name = f"raytf-{secrets.token_hex(4)}"
    if os.access(GROUPS / "cpu" / "cpu.cfs_quota_us", os.R_OK):
        group, limit = GROUPS / "cpu" / name, ("cpu.cfs_quota_us", "50000")
    elif (GROUPS / "cgroup.controllers").exists():
        group, limit = GROUPS / name, ("cpu.max", "50000 100000")
    else:
        pytest.skip("needs control groups")
    try:
        if limit[0] == "cpu.max":
            (GROUPS / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        (group / limit[0]).write_text(limit[1])
    except OSError as error:  # as in a container whose groups are its host's
        pytest.skip(f"control groups cannot be changed here: {error}")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_training_with_all_restrictions_and_half_a_cpu(tmp_path, half_a_cpu):
    train(tmp_path, [*RESTRICTIONS], half_a_cpu)
