"""Workers that stay between trials and calls are renewed where their memory has grown by more than is allowed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from ray import tune

import raytf
from raytf.fitting import warm
from tests.cluster import models
from tests.cluster.test_sweep import by, sweep, trainer, weights

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
LEAK = 60_000_000


@pytest.fixture(autouse=True)
def no_workers_stay():
    yield
    warm.end_group()


def leaking(config):
    """`models.mlp` in a process that keeps 60 MB more after each model."""
    import builtins

    kept = builtins.__dict__.setdefault("raytf_test_leak", [])
    kept.append(np.ones(LEAK, "uint8"))
    return models.mlp(config)


def test_a_sweep_renews_its_workers_and_trials_stay_the_same(tmp_path):
    table = tune.grid_search([0.01, 0.02, 0.03, 0.01])
    limited = raytf.TensorflowConfig(renew_worker_mb=100)
    grid = sweep(
        trainer(tmp_path, build=leaking, tensorflow_config=limited, callbacks=_note(tmp_path)),
        {"learning_rate": table},
        max_concurrent_trials=1,
    )
    assert not grid.errors
    processes = (tmp_path / "processes").read_text().split()
    assert len(set(processes)) == 2, "the third trial has grown by two leaks"
    assert processes == sorted(processes, key=processes.index), "none comes back"
    for one, other in zip(*(weights(r) for r in grid if r.config["learning_rate"] == 0.01), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    assert by(grid, "learning_rate")[0.02].error is None


def _note(folder):
    path = os.path.join(folder, "processes")

    def callbacks(config):
        import keras

        def note(logs=None):
            if models.rank() == 0:
                with open(path, "a") as file:
                    print(os.getpid(), file=file)

        return [keras.callbacks.LambdaCallback(on_train_begin=note)]

    return callbacks


def test_calls_of_fit_renew_their_workers(monkeypatch):
    import builtins

    import keras

    monkeypatch.setitem(raytf.TensorflowConfig.__init__.__kwdefaults__, "renew_worker_mb", 100.0)

    class Leaks(keras.callbacks.Callback):
        process = None

        def on_epoch_end(self, epoch, logs=None):
            self.process = os.getpid()
            builtins.__dict__.setdefault("raytf_test_leak", []).append(np.ones(LEAK, "uint8"))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    processes = []
    for _ in range(4):
        leaks = Leaks()
        raytf.fit(model, np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[leaks], num_workers=1)
        processes.append(leaks.process)
    assert len(set(processes)) == 2 and processes[0] != processes[-1]


@pytest.mark.parametrize("limit", [0, -1, 0.5])
def test_limits_below_a_megabyte_are_refused(limit):
    with pytest.raises(raytf.ConfigError, match="renew_worker_mb must be at least 1 megabyte"):
        raytf.TensorflowConfig(renew_worker_mb=limit)
