"""`verify` and `nan` of a KerasTrainer and of raytf.fit, on real workers; errors of a step carry their cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.data.stored import FIRST_ROWS
from raytf.runtime.processes import Process
from raytf.train import verify

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROWS = 64


def rows(count=ROWS):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 4)).astype("float32"), random.integers(0, 3, count)


def build(config):
    import keras

    class Counter(keras.layers.Layer):
        """Counts rows in a variable without a declared aggregation."""

        def build(self, shape):
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, x, training=False):
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            return x

    between = [Counter()] if config.get("counts") else []
    model = keras.Sequential([keras.Input((4,)), *between, keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


def dataset(x, y):
    return ray.data.from_items([{"x": a, "y": int(b)} for a, b in zip(x, y, strict=True)], override_num_blocks=2)


def trainer(tmp_path, config, data=None, **more):
    return raytf.KerasTrainer(
        build,
        config={"batch_size": 16, "epochs": 1} | config,
        datasets={"train": dataset(*(data or rows()))},
        features="x",
        labels="y",
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        shuffle="none",
        progress=False,
        **more,
    )


@pytest.mark.timeout(300)
def test_a_model_that_two_workers_train_otherwise_is_refused(tmp_path):
    with pytest.raises(raytf.ConfigError, match="counter/seen.*12 on one device, 6 on two workers.*aggregation='sum'"):
        trainer(tmp_path, {"counts": True}, verify="error").fit()


@pytest.mark.timeout(300)
def test_raytf_fit_refuses_it_too():
    x, y = rows()
    model = build({"counts": True})
    with pytest.raises(raytf.ConfigError, match="counter/seen.*12 on one device, 6 on two workers"):
        raytf.fit(model, x, y, batch_size=16, num_workers=2, verify="error", verbose=0)


@pytest.mark.timeout(300)
def test_error_of_a_step_contains_its_cause(tmp_path):
    """The dry run has not seen the label, of the last row."""
    x, y = rows(3 * FIRST_ROWS)
    y[-1] = 74
    with pytest.raises(raytf.TrainingError) as caught:
        trainer(tmp_path, {"batch_size": 512}, (x, y), verify=False).fit()
    assert "Received a label value of 74 which is outside the valid range of [0, 3)" in caught.value.cause
    assert re.search(r"in (step|one of the steps) \d", caught.value.cause) and "operation " in caught.value.cause
    assert caught.value.rank == 1


def _held_comparison():
    """One that waits for a pipe into which nobody writes."""
    reader, _ = os.pipe()
    return verify.start_comparison(lambda: os.read(reader, 1))


@pytest.mark.parametrize("dies", [False, True])
def test_training_that_ends_before_the_comparison_reports_it(set_timeouts, capsys, dies):
    set_timeouts(verify_end=0.1)
    process = ray.remote(Process).options(num_cpus=0).remote()
    running = ray.get(process.execute.remote(_held_comparison))
    if dies:
        ray.kill(process)
    pool = types.SimpleNamespace(answered=process, end_answered=lambda: ray.kill(process))
    with verify.ComparisonReporter(running, pool):
        pass
    assert "is not known: the training has ended first" in capsys.readouterr().err


SHORT = """
import dataclasses, sys
import ray, raytf
from raytf import timeouts
from raytf.fitting import call
from tests.cluster import test_verify

call._COMPARISON_INTERVAL = 0.0
timeouts.set_current(dataclasses.replace(timeouts.get(), verify_end=float(sys.argv[1])))
ray.init(log_to_driver=False)
x, y = test_verify.rows()
raytf.fit(test_verify.build({"counts": True}), x, y, batch_size=16, num_workers=2, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0, "is not known: the training has ended first"), (120, "12 on one device, 6 on two workers")],
)
def test_script_that_ends_before_the_comparison_waits_and_then_reports_it(seconds, message):
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", SHORT, str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert message in done.stderr


SHUT_DOWN = """
import threading
import numpy as np
import keras
import ray
import raytf

ray.init("local", num_cpus=4, include_dashboard=False)
for units in (1, 2):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    raytf.fit(model, np.ones((8, 4)), np.ones((8, units)), batch_size=4, num_workers=2, verbose=0)
ray.shutdown()
for thread in threading.enumerate():
    if thread.name == "raytf_verify":
        thread.join(120)
        assert not thread.is_alive(), "it waits for a Ray that has ended"
assert not ray.is_initialized(), "a comparison has started another Ray"
print("ended")
"""


@pytest.mark.timeout(300)
def test_comparisons_start_no_ray_after_it_is_shut_down():
    """One of them runs then, and the other waits for its turn."""
    done = subprocess.run([sys.executable, "-c", SHUT_DOWN], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.endswith("ended\n"), done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr
