"""The other ways in: a loop of one's own, a sweep, `raytf.fit`, parameter servers, scripts, commands, streamed rows."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.fitting import warm
from tests.cluster import models, test_fit, test_parameter_server, test_sweep, test_tensorflow_trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def no_workers_stay():
    """Idle workers of `raytf.fit` hold CPUs until something else wants them."""
    yield
    warm.end()


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


def test_a_trial_of_a_sweep_equals_the_run_alone(tmp_path):
    made = test_sweep.trainer(tmp_path, verify=False)
    grid = test_sweep.sweep(made, {"learning_rate": tune.grid_search([0.05, 0.01])}, max_concurrent_trials=1)
    assert not grid.errors
    second = test_sweep.by(grid, "learning_rate")[0.01]
    alone = test_sweep.trainer(tmp_path / "alone", config={"learning_rate": 0.01}, verify=False).fit()
    for trial, run in zip(test_sweep.weights(second), test_sweep.weights(alone), strict=True):
        np.testing.assert_allclose(trial, run, rtol=0, atol=1e-9)
    assert second.metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], abs=1e-9)


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


def test_parameter_servers_with_one_worker_equal_one_process(tmp_path):
    made = test_parameter_server.trainer
    alone = made(tmp_path, "alone", workers=0, verify=False).fit()
    served = made(
        tmp_path,
        "served",
        workers=1,
        strategy="parameter_server",
        num_ps=2,
        verify=False,
        variable_partitioner=test_parameter_server.thirds,
    ).fit()
    one, other = raytf.load_model(alone), raytf.load_model(served)
    for expected, found in zip(one.variables, other.variables, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9, err_msg=expected.path)


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


def test_the_exit_code_of_a_script_is_that_of_the_worker_that_failed():
    printed = command("-m", "raytf.cli", "run", "--num-workers", 2, "one_fails.py", cwd=SCRIPTS, code=1)
    assert "worker 1 failed first" in printed and "batch is too large on this worker" in printed


def test_the_example_job_trains_and_its_model_is_loaded(tmp_path):
    command(ROOT / "jobs" / "digits.py", "--smoke", "--storage", tmp_path, cwd=tmp_path)
    (run,) = (path for path in tmp_path.iterdir() if (path / "tensorboard").exists())
    assert raytf.load_model(str(run)).input_shape == (None, 8, 8, 1)


def test_rows_of_a_stream_are_those_of_the_table_for_any_number_of_workers(tmp_path):
    models_rows = models.dataset()
    models_rows.write_parquet(str(tmp_path / "rows"))
    found = []
    for materialize, workers in ((True, 1), (False, 2)):
        result = raytf.KerasTrainer(
            models.mlp,
            config={"batch_size": 25, "epochs": 2},
            datasets={"train": ray.data.read_parquet(str(tmp_path / "rows"))},
            features=models.FEATURES,
            labels="label",
            shuffle="window",
            materialize=materialize,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=str(tmp_path), name=f"workers_{workers}"),
            progress=False,
            verify=False,
        ).fit()
        found.append(test_sweep.weights(result))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-9)


def test_what_cannot_train_is_refused_before_a_run_begins(tmp_path):
    from tests.cluster import test_refused

    for case in ("no such column", "too many workers", "small batch", "an error in build_model"):
        test_refused.test_refused(tmp_path, case)
