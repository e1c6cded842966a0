"""The other ways in: a loop of one's own, `raytf.fit`, scripts, commands."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.fitting import warm
from tests.cluster import test_fit, test_tensorflow_trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def no_workers_stay():
    """Idle workers of `raytf.fit` hold CPUs until something else wants them."""
    yield
    warm.end_group()


def test_a_loop_of_rays_guide(tmp_path):
    result = raytf.TensorflowTrainer(
        train_loop_per_worker=test_tensorflow_trainer.loop_with_fit,
        train_loop_config={"lr": 0.1, "batch_size": 20, "epochs": 4},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": test_tensorflow_trainer.line()},
    ).fit()
    history = result.return_value["history"]
    assert history[-1] < 0.5 * history[0] and result.return_value["steps"] == 4 * 200 // 20
    with result.checkpoint.as_directory() as folder:
        model = raytf.load_model(os.path.join(folder, "model.keras"))
    assert abs(float(model.predict(np.ones((1, 1)), verbose=0)[0, 0]) - 4) < 1


def test_fit_evaluate_and_predict_equal_keras(tmp_path):
    import keras

    test_fit.use(keras, "float64")
    try:
        model, plain = test_fit.make(), test_fit.make()
        history = raytf.fit(model, test_fit.X, test_fit.Y, epochs=2, num_workers=2, **test_fit.ARGUMENTS)
        expected = plain.fit(test_fit.X, test_fit.Y, epochs=2, **test_fit.ARGUMENTS)
        test_fit.assert_same(model, plain)
        test_fit.assert_same_history(history, expected)
        scores = raytf.evaluate(model, test_fit.X, test_fit.Y, batch_size=10, num_workers=2)
        np.testing.assert_allclose(scores, plain.evaluate(test_fit.X, test_fit.Y, batch_size=10, verbose=0), atol=1e-9)
        predicted = raytf.predict(model, test_fit.X, batch_size=10, num_workers=2)
        for name, values in plain.predict(test_fit.X, verbose=0).items():
            np.testing.assert_allclose(predicted[name], values, atol=1e-9)
    finally:
        test_fit.use(keras, "float32")


def command(*arguments, cwd, code=0):
    """Runs a program on the tests' Ray, from scratch; gives what it printed."""
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


SCRIPTS = ROOT / "tests" / "jobs" / "scripts"


def test_a_script_trains_the_same_weights_on_two_workers(tmp_path):
    script = ("multi_worker_cnn.py", "--epochs", 2, "--output", tmp_path)
    printed = command("-m", "raytf.cli", "run", "--num-workers", 2, *script, cwd=SCRIPTS)
    ends = [line.split("]", 1)[1].split() for line in printed.splitlines() if "weights:" in line]
    assert len(ends) == 2 and ends[0] == ends[1]
    assert (tmp_path / "best.keras").exists()


ONE_FAILS = """
import json, os, signal

if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    raise ValueError("batch is too large on this worker")
signal.pause()
"""


def test_the_exit_code_of_a_script_is_that_of_the_worker_that_failed(tmp_path):
    (tmp_path / "script.py").write_text(ONE_FAILS)
    printed = command("-m", "raytf.cli", "run", "--num-workers", 2, "script.py", cwd=tmp_path, code=1)
    assert "worker 1 failed first" in printed and "batch is too large on this worker" in printed


def test_the_example_job_trains_and_its_model_is_loaded(tmp_path):
    command(ROOT / "jobs" / "digits.py", "--smoke", "--storage", tmp_path, cwd=tmp_path)
    (run,) = (path for path in tmp_path.iterdir() if (path / "tensorboard").exists())
    assert raytf.load_model(str(run)).input_shape == (None, 8, 8, 1)


def test_what_cannot_train_is_refused_before_a_run_begins(tmp_path):
    from tests.cluster import test_refused

    for case in ("no such column", "an error in build_model"):
        test_refused.test_refused(tmp_path, case)
