"""What a training comes to: the same weights with any number of workers, and through what clusters do to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import ray
from ray import tune

import raytf
from raytf.events import Kind
from raytf.testing import FaultPlan, Kill
from tests.cluster import models
from tests.cluster.test_in_place_recovery import outcomes
from tests.cluster.test_trainer import assert_equal, trainer
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]
# 97 rows in batches of 25: four steps an epoch, twelve in all; neither two workers nor the batch divide them.
STEPS = 12


def test_one_worker_that_reads_a_stream_equals_two_with_a_table(undisturbed, tmp_path):
    datasets = {"train": models.dataset(), "validation": models.dataset(41, 1)}
    for name, rows in datasets.items():
        rows.write_parquet(str(tmp_path / name))
        datasets[name] = ray.data.read_parquet(str(tmp_path / name))
    one = trainer(tmp_path, 1, datasets=datasets, shuffle="window", materialize=False).fit()
    assert_equal(undisturbed, one)
    assert list(one.metrics_dataframe["epoch"]) == [1, 2, 3]


def test_a_trial_of_a_sweep_equals_the_run_alone(undisturbed, tmp_path):
    space = {"learning_rate": tune.grid_search([0.05, 0.01])}
    made = trainer(tmp_path, name=None, shuffle="window")
    grid = raytf.sweep(made, space, metric="val_loss", max_concurrent_trials=1, progress=False)
    assert not grid.errors
    (second,) = (result for result in grid if result.config["learning_rate"] == 0.01)
    assert_equal(second, undisturbed)


def test_recovery_of_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    plan = FaultPlan([Kill(rank=1, step=6)])

    def callbacks(config):
        return [plan.callback(tmp_path / "faults", workers=2)]

    result = trainer(tmp_path, shuffle="window", callbacks=callbacks, failures=3, tensorflow={"heal": True}).fit()
    assert plan.happened(tmp_path / "faults") == list(plan.faults)
    assert_equal(result, undisturbed, 0)
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3]
    assert outcomes(result) == [(Kind.WORKERS_STARTED, ()), (Kind.WORKER_REPLACED, (1,))]


def held(folder):
    """Callbacks that end step 6 when the run is stopped, and hold nothing in the run that resumes."""

    def callbacks(config):
        import keras

        from raytf.worker import stop

        def begin(epoch, logs=None):
            waiting.epoch = epoch

        def hold(batch, logs=None):
            if batch == 1 and waiting.epoch == 1 and not (folder / "stopped").exists():
                (folder / "reached").touch()
                until(lambda: stop.stop_barrier.why is not None)

        waiting = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=hold)
        return [waiting]

    return callbacks


DRIVER = """
import pathlib
import sys

import ray

from tests.cluster.test_trainer import trainer
from tests.core.test_training import held

folder = pathlib.Path(sys.argv[1])
ray.init(log_to_driver=False)
trainer(folder, shuffle="window", callbacks=held(folder)).fit()
"""


def test_sigterm_ends_after_a_step_and_the_same_run_resumes(undisturbed, tmp_path):
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    started = subprocess.Popen([sys.executable, "-c", DRIVER, tmp_path], env=environment)
    with contextlib.ExitStack() as stack:
        stack.callback(started.kill)
        until(lambda: (tmp_path / "reached").exists() or started.poll() is not None)
        started.send_signal(signal.SIGTERM)
        assert started.wait(300) == 143
    (tmp_path / "stopped").touch()
    resumed = trainer(tmp_path, shuffle="window", callbacks=held(tmp_path)).fit()
    assert_equal(resumed, undisturbed, 0)
    assert int(raytf.load_model(resumed).optimizer.iterations) == STEPS


def test_a_finished_run_is_not_trained_again(undisturbed):
    again = trainer(os.path.dirname(undisturbed.path), shuffle="window").fit()
    assert again.metrics == undisturbed.metrics and again.path == undisturbed.path
