"""NaN of a training is seen at the driver, also where Ray sends it no lines of other processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import raytf
from raytf.events import Kind

ROOT = pathlib.Path(__file__).parents[2]
# A row of the second step has NaN, and worker 1 gets it.
DRIVER = """
import sys

import keras
import numpy as np
import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig

import raytf

ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
x = np.random.default_rng(0).random((64, 2))
x[30] = np.nan


def build(config):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


model = build({})
common = {"batch_size": 16, "num_workers": 2, "verify": False, "verbose": 0, "shuffle": False}
history = raytf.fit(model, x, x.sum(1), epochs=3, nan="stop", **common)
assert len(history.epoch) == 1, history.epoch
print("fit:", [str(event) for event in history.events])
good = np.ones((16, 2))
history = raytf.fit(build({}), good, good.sum(1), epochs=2, validation_data=(x, x.sum(1)), **common)
print("validation:", [str(event) for event in history.events])
raytf.evaluate(build({}), x, x.sum(1), batch_size=16, num_workers=2, verbose=0)
rows = [{"x": row, "y": row.sum()} for row in x]
trainer = raytf.KerasTrainer(
    build, config={"batch_size": 16, "epochs": 3}, datasets={"train": ray.data.from_items(rows)},
    features="x", labels="y", scaling_config=ScalingConfig(num_workers=2), shuffle="none", verify=False, progress=False,
    run_config=RunConfig(name="first", storage_path=sys.argv[1]), nan="stop",
)
assert trainer.fit().metrics["epoch"] == 1
kept = tune.RunConfig(name="sweep", storage_path=sys.argv[1])
raytf.sweep(trainer, {"units": tune.grid_search([8])}, run_config=kept, progress=False)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nan_is_an_event_at_the_driver(tmp_path):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-W", "ignore", "-c", DRIVER, str(tmp_path)]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-5000:]
    line = "The loss is NaN or infinite since step 2 of epoch 1, with the rows of worker 1. The training stops because"
    of_validation = "val_loss: NaN or infinite in the validation of epoch 1"
    assert done.stderr.count(line) == 3, done.stderr
    assert done.stderr.count("trial with units=8") == 1, done.stderr
    assert done.stderr.count(of_validation) == done.stderr.count("loss: NaN or infinite in the evaluation") == 1
    assert f"fit: ['{line}" in done.stdout.replace('"', "'") and f"validation: ['{of_validation}" in done.stdout
    found = [event for event in raytf.run_events(tmp_path / "first") if event.kind is Kind.LOSS_NOT_FINITE]
    assert [(event.ranks, event.step, event.epoch) for event in found] == [((1,), 2, 1)]
