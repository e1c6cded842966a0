"""Which values of the config are part of a run's identity: those that build_model reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: a model is tried in a fork, which must not be one of a process that has run TensorFlow.
PROGRAM = """
import json, sys
import cloudpickle, numpy as np, pyarrow as pa
from raytf.compat.fast_import import import_keras
from raytf.data.batch_spec import BatchSpec
from raytf.data.stored import StoredDataset
from raytf.train import dry_run

import_keras()  # as in a worker's process: what is forked has it

def keras_model(loss="mse"):
    import keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model

def by_key(config):
    alpha = config["alpha"]
    return keras_model(lambda y, p: alpha * (y - p) ** 2)

def later(config):
    return keras_model(lambda y, p: config["alpha"] * (y - p) ** 2)

def in_step(config):
    import keras
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)
        def call(self, x):
            return self.inner(x)
        def train_step(self, data):
            return {"loss": config.get("alpha", 1)}
    net = Net()
    net.compile("sgd", "mse")
    return net

def whole(config):
    return keras_model() if dict(config) else None

def spread(config):
    return (lambda alpha, **others: keras_model())(**config)

def default(config):
    return keras_model(["mse", "mae"][config.get("which", 1)])

def unread(config):
    return keras_model()

config = {"alpha": 2.5, "patience": 5, "epochs": 3, "batch_size": 8}
table = pa.table({"x": np.arange(4.0), "y": np.arange(4.0)})
batch = BatchSpec.parsed(["x"], "y")
told = {}
for build in (by_key, later, in_step, whole, spread, default, unread):
    tried = dry_run.inspect(cloudpickle.dumps((build, config, batch)), StoredDataset([table], [4], ["x", "y"]))
    told[build.__name__] = tried.identity["config"] if isinstance(tried, dry_run.Tried) else str(tried)
print(json.dumps(told))
"""
ALL = {"alpha": 2.5, "patience": 5}
EXPECTED = {
    "by_key": {"alpha": 2.5},
    "later": {"alpha": 2.5},
    "in_step": {"alpha": 2.5},
    "whole": ALL,
    "spread": ALL,
    "default": {"which": 1},
    "unread": {},
}


@pytest.fixture(scope="module")
def told():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("build", EXPECTED)
def test_what_build_model_reads_counts(told, build):
    assert told[build] == EXPECTED[build]
