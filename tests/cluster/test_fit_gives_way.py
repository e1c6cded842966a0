"""Idle workers of `raytf.fit` are released for any pending request for resources."""

import keras
import numpy as np
import pytest

import raytf
from raytf.fitting import warm

pytestmark = pytest.mark.usefixtures("ray_cluster")
X = np.arange(24, dtype="float32").reshape(8, 3)
ARGUMENTS = {"batch_size": 4, "epochs": 1, "verbose": 0}


def make():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def idle():
    """Two workers that hold two of the four CPUs."""
    raytf.fit(make(), X, X[:, :1], num_workers=2, **ARGUMENTS)
    assert warm.has_group()
    yield
    warm.end_group()


def test_a_placement_group(idle):
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 2}, {"CPU": 1}], strategy="PACK")
    assert group.wait(60)
    assert not warm.has_group()
    remove_placement_group(group)


def test_raytf_fit_in_a_trainable_of_tune(idle, tmp_path):
    """One of another process, with workers of its own; the trial itself takes a CPU."""
    import ray
    from ray import tune

    def trainable(config):
        history = raytf.fit(make(), X, X[:, :1], num_workers=2, **ARGUMENTS)
        tune.report({"loss": history.history["loss"][-1]})

    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
    found = tune.Tuner(
        tune.with_resources(trainable, {"CPU": 1}),
        tune_config=tune.TuneConfig(num_samples=2, max_concurrent_trials=1, metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not found.errors
    assert [np.isfinite(one.metrics["loss"]) for one in found] == [True, True]
