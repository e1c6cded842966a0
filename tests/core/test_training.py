"""What a training comes to: the same weights with any number of workers, and through what clusters do to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import ray

import raytf
from raytf.testing import FaultPlan, Kill
from tests.cluster import models
from tests.cluster.test_trainer import assert_equal, trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]
# 97 rows in batches of 25: four steps an epoch, twelve in all; neither two workers nor the batch divide them.
STEPS = 12


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tmp_path_factory):
    """Two workers to which nothing happens."""
    return trainer(tmp_path_factory.mktemp("undisturbed")).fit()


def test_two_workers_equal_one(undisturbed, tmp_path):
    one = trainer(tmp_path, 1).fit()
    assert_equal(undisturbed, one)
    assert list(one.metrics_dataframe["epoch"]) == [1, 2, 3]


def test_restart_after_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    plan = FaultPlan([Kill(rank=0, step=6)])

    def callbacks(config):
        return [plan.callback(tmp_path / "faults", workers=2)]

    result = trainer(tmp_path, callbacks=callbacks, failures=1).fit()
    assert plan.happened(tmp_path / "faults") == list(plan.faults)
    assert_equal(result, undisturbed, 0)
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3]


def test_recovery_of_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    plan = FaultPlan([Kill(rank=1, step=6)])

    def callbacks(config):
        return [plan.callback(tmp_path / "faults", workers=2)]

    result = trainer(tmp_path, callbacks=callbacks, failures=3, tensorflow={"heal": True}).fit()
    assert plan.happened(tmp_path / "faults") == list(plan.faults)
    assert_equal(result, undisturbed, 0)
    assert list(result.metrics_dataframe["epoch"]) == [1, 2, 3]


def held(folder):
    """Callbacks that end step 6 when the run is told to end, and hold nothing in the run that resumes."""

    def callbacks(config):
        import keras

        from raytf.worker import ending

        def begin(epoch, logs=None):
            waiting.epoch = epoch

        def hold(batch, logs=None):
            if batch == 1 and waiting.epoch == 1 and not (folder / "stopped").exists():
                (folder / "reached").touch()
                until(lambda: ending.gate.why is not None)

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
trainer(folder, callbacks=held(folder)).fit()
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
    resumed = trainer(tmp_path, callbacks=held(tmp_path)).fit()
    assert_equal(resumed, undisturbed, 0)
    assert int(raytf.load_model(resumed).optimizer.iterations) == STEPS


def until(reached, seconds=300.0):
    """Returns when something is so; a bound for what never comes, not a measurement."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.02)


def test_the_error_of_a_worker_names_its_rank(tmp_path):
    def callbacks(config):
        import keras

        def fail(batch, logs):
            if models.rank() == 1 and batch == 2:
                raise KeyError("broken on purpose")

        return [keras.callbacks.LambdaCallback(on_train_batch_begin=fail)]

    with pytest.raises(raytf.TrainingError, match="KeyError: 'broken on purpose'") as caught:
        trainer(tmp_path, callbacks=callbacks).fit()
    assert caught.value.rank == 1


def test_a_finished_run_is_not_trained_again_and_another_one_is_refused(undisturbed):
    folder = os.path.dirname(undisturbed.path)
    again = trainer(folder).fit()
    assert again.metrics == undisturbed.metrics and again.path == undisturbed.path
    with pytest.raises(raytf.ConfigError, match=r"learning_rate"):
        trainer(folder, config={"learning_rate": 0.5, "epochs": 9}).fit()
