"""A script that starts no Ray itself, with more workers than this machine has cores: they share these."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os

import ray
import raytf
from ray import tune
from ray.train import RunConfig, ScalingConfig


def build_model(config):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(config["learning_rate"]), "mse")
    return model


workers = WORKERS
trainer = raytf.KerasTrainer(
    build_model,
    config={"batch_size": 4 * workers, "learning_rate": 0.01},
    datasets={"train": ray.data.from_items([{"x": i / 64, "y": i / 32} for i in range(64)])},
    features=["x"],
    labels="y",
    scaling_config=ScalingConfig(num_workers=workers),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
)
print("fit", sorted(trainer.fit().metrics))
grid = raytf.sweep(trainer, {"learning_rate": tune.grid_search([0.01, 0.02])}, metric="loss")
print("sweep", len(grid), grid.errors)
"""


@pytest.mark.slow
def test_they_share_the_cores(tmp_path):
    cores = os.cpu_count() or 1
    (tmp_path / "script.py").write_text(SCRIPT.replace("WORKERS", str(cores + 1)))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert done.stderr.count(f"raytf: {cores + 1} processes share the {cores} core(s) of this machine") == 1
    assert any(line.startswith("fit ['epoch', 'loss'") for line in lines) and "sweep 2 []" in lines
