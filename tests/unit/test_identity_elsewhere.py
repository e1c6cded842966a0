"""What distinguishes one run from another is the same in every process; and which values of the config are part of it.

One process runs all that needs another one.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.unit import changes_of_models as changes
from tests.unit import kinds_of_models as kinds
from tests.unit.test_identity import run_of, texts
from tests.unit.test_identity_of_code import ALL

pytestmark = pytest.mark.slow
RUN = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
# It comes first: a model is tried in a fork, which must not be one of a process that has run TensorFlow.
READS = """
import json, sys
import numpy as np, pyarrow as pa
from ray import cloudpickle
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
    pickled = cloudpickle.dumps((build, config, batch, [], None))
    tried = dry_run.inspect(pickled, StoredDataset([table], [4], ["x", "y"]))
    told[build.__name__] = tried.identity["config"] if isinstance(tried, dry_run.DryRunResult) else str(tried)
print(json.dumps(told))
"""
CONFIG = {"alpha": 2.5, "patience": 5}
EXPECTED = {
    "by_key": {"alpha": 2.5},
    "later": {"alpha": 2.5},
    "in_step": {"alpha": 2.5},
    "whole": CONFIG,
    "spread": CONFIG,
    "default": {"which": 1},
    "unread": {},
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Returns the output of each program: READS, and the two modules of models, one from a copy in another place."""
    folder = tmp_path_factory.mktemp("moved")
    reads, copy = folder / "reads.py", folder / "moved_and_renamed.py"
    reads.write_text(READS)
    text = pathlib.Path(kinds.__file__).read_text()
    copy.write_text("# lines have moved\n\n\n\n" + text.replace("  # a comment", "\n        # another comment"))
    command = [sys.executable, "-c", RUN, reads, changes.__file__, copy]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    answers = map(json.loads, run.stdout.splitlines()[-3:])
    return dict(zip(("reads", "changes", "kinds"), answers, strict=True))


@pytest.mark.parametrize("build", kinds.KINDS, ids=lambda build: build.__name__)
def test_a_model_is_the_same_in_every_process(elsewhere, build):
    local = kinds.told(build)
    assert local == elsewhere["kinds"][build.__name__]
    text = json.dumps(local)
    assert " at 0x" not in text and "unit" not in json.dumps(local["model"]["class"]) and len(text) < 30_000


@pytest.mark.parametrize("case", ALL)
def test_its_code_is_the_same_in_every_process(elsewhere, case):
    source, one = ALL[case][:2]
    assert texts(run_of(changes.told(source, one)), run_of(elsewhere["changes"][case])) == []


@pytest.mark.parametrize("build", EXPECTED)
def test_what_build_model_reads_counts(elsewhere, build):
    assert elsewhere["reads"][build] == EXPECTED[build]
