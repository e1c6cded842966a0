"""Bad input is refused with one sentence before a worker starts."""

from __future__ import annotations

import threading

import numpy as np
import pandas as pd
import pytest
import ray
from ray import tune
from ray.train import CheckpointConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")


def fit(tmp_path, checkpoint_config=None, **changes):
    return trainer(tmp_path, checkpoint_config, **changes).fit()


def trainer(tmp_path, checkpoint_config=None, **changes):
    arguments = {
        "build_model": models.mlp,
        "config": {"batch_size": 8},
        "datasets": {"train": models.dataset(16, blocks=1)},
        "features": models.FEATURES,
        "labels": "label",
        "scaling_config": ScalingConfig(num_workers=1),
        "run_config": RunConfig(storage_path=str(tmp_path), name="refused", checkpoint_config=checkpoint_config),
        "progress": False,
    } | changes
    return raytf.KerasTrainer(**arguments)


def not_compiled(config):
    import keras

    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])


def returns_nothing(config):
    models.mlp(config)


def needs_a_key(config):
    return models.mlp({"learning_rate": config["lr"]})


def takes_positive_rates(config):
    assert config["lr"] > 0
    return models.mlp({"learning_rate": config["lr"]})


def takes_images(config):
    import keras

    model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(4, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def follows_a_schedule(config):
    import keras

    model = models.mlp(config)
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)), model.loss)
    return model


LOCK = threading.Lock()


def does_not_pickle():
    lock = threading.Lock()

    def build(config):
        with lock:
            return models.mlp(config)

    return build


# Tried as elsewhere, in a process that starts sooner.
LOCAL = {"scaling_config": ScalingConfig(num_workers=0)}

CASES = {
    "servers without their strategy": (lambda: {"num_ps": 2}, "num_ps=2 with strategy='auto'"),
    "no servers": (lambda: {"strategy": "parameter_server"}, "strategy 'parameter_server' needs a parameter server"),
    "servers that do not fit": (
        lambda: {"strategy": "parameter_server", "num_ps": 9},
        "The cluster must be able to hold 11 tasks .11 CPU",
    ),
    "an evaluator without rows": (lambda: {"evaluator": True}, "evaluator=True needs rows to evaluate"),
    "not pickled": (lambda: {"build_model": does_not_pickle()}, "build_model must be a function that pickles"),
    "not a function": (lambda: {"build_model": 3}, "build_model must be a function of config; received: 3"),
    "not compiled": (lambda: {"build_model": not_compiled}, "not compiled with an optimizer"),
    "no model": (
        lambda: {"build_model": returns_nothing, **LOCAL},
        "must return a compiled keras.Model; received: builtins.None",
    ),
    "an error in build_model": (
        lambda: {"build_model": needs_a_key, **LOCAL},
        r"KeyError: 'lr' \(test_refused.py, line \d+\)",
    ),
    "no such column": (lambda: {"features": ["x0", "x9"]}, "features must name columns .* received: 'x9'"),
    "no such label": (lambda: {"labels": "lable"}, "labels must name columns .* received: 'lable'"),
    "wrong shape": (lambda: {"build_model": takes_images, **LOCAL}, r"fit the model's inputs .* float32\(None, 6\)"),
    "strings": (lambda: {"datasets": words(), "features": "text", **LOCAL}, "Features must be numbers .* string"),
    "empty": (lambda: {"datasets": {"train": models.dataset(16).filter(lambda r: False)}}, "'train' is empty"),
    "small batch": (
        lambda: {"config": {"batch_size": 1}, "scaling_config": ScalingConfig(num_workers=2)},
        "at least one row for each replica; received: batch_size=1",
    ),
    "no batch": (lambda: {"config": {"batch_size": 0}}, r"config\['batch_size'\] must be an integer of at least 1"),
    "half an epoch": (lambda: {"config": {"epochs": 0.5}}, r"config\['epochs'\] must be an integer"),
    "too many workers": (
        lambda: {"scaling_config": ScalingConfig(num_workers=64), "config": {"batch_size": 64}},
        r"num_workers=64 on 1 node\(s\) with 4 CPU, room for 4",
    ),
    "unknown strategy": (lambda: {"strategy": "miror"}, "strategy must be one of .* received: 'miror'"),
    "NaN": (lambda: {"config": {"learning_rate": np.nan}}, r"config\['learning_rate'\] must be a finite number"),
    "negative rate": (lambda: {"config": {"learning_rate": -1.0}}, "must be a finite number above 0; received: -1.0"),
    "no training data": (lambda: {"datasets": {"test": models.dataset(16)}}, "datasets must hold 'train'"),
    "no dataset": (
        lambda: {"datasets": {"train": [1, 2]}},
        "must be a ray.data.Dataset; received: 'train' of type list",
    ),
    "labels of the validation": (
        lambda: {
            "datasets": {
                "train": models.dataset(16, blocks=1),
                "validation": ray.data.from_pandas(models.dataset(16).to_pandas().assign(label=7)),
            },
            **LOCAL,
        },
        "In the dataset 'validation' sparse_categorical_crossentropy takes labels from 0 to 3, .* a label of 7",
    ),
    "a misspelt score": (
        lambda: {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="los"), **LOCAL},
        "checkpoint_score_attribute must be a metric that the run reports; received: 'los' of loss.* mean 'loss'",
    ),
    "nulls": (
        lambda: {"datasets": nulls(), "features": "x", **LOCAL},
        r"must hold no nulls, .* received: 1 null\(s\) of 'x'",
    ),
    "seed": (lambda: {"seed": -1}, "seed must be an integer from 0"),
    "shuffle": (lambda: {"shuffle": "some"}, "shuffle must be one of auto, full, window, none"),
    "materialize": (
        lambda: {"materialize": {"train": "disk"}},
        "materialize must be True, False or \"auto\"; received: 'disk'",
    ),
    "materialize of another dataset": (
        lambda: {"materialize": {"trian": False}},
        "materialize must name the run's datasets .*train.*; received: {'trian': False}",
    ),
    "window": (lambda: {"window": 0}, "window must be an integer of at least 1"),
    "map": (lambda: {"map": 3}, "map must be a function of batches"),
    "workers": (lambda: {"scaling_config": ScalingConfig(num_workers=(0, 2))}, "num_workers must be at least 1"),
    "a schedule whose batch is to follow the workers": (
        lambda: {
            "build_model": follows_a_schedule,
            "scaling_config": ScalingConfig(num_workers=(1, 2)),
            "elastic_batch": "scale",
        },
        'elastic_batch="scale" multiplies the learning rate, .* received: a schedule',
    ),
    "local, with an evaluator": (
        lambda: {
            "scaling_config": ScalingConfig(num_workers=0),
            "evaluator": True,
            "datasets": {"train": models.dataset(16), "validation": models.dataset(16)},
        },
        "received: evaluator=True with num_workers=0",
    ),
    "a dataset for each worker": (
        lambda: {"dataset_config": ray.train.DataConfig(datasets_to_split=[])},
        r"shares the rows of each batch .* received: DataConfig\(datasets_to_split=\[\]\)",
    ),
    "no ValidationConfig": (lambda: {"validation_config": 3}, "validation_config must be a ray.train.ValidationConfig"),
}


def words():
    return {"train": ray.data.from_pandas(pd.DataFrame({"text": ["a", "b"] * 8, "label": [0, 1] * 8}))}


def nulls():
    import pyarrow as pa

    return {"train": ray.data.from_arrow(pa.table({"x": [1.0, None] * 1 + [2.0] * 14, "label": [0, 1] * 8}))}


@pytest.mark.parametrize("case", CASES)
def test_refused(tmp_path, case):
    changes, message = CASES[case]
    with pytest.raises(raytf.ConfigError, match=message) as caught:
        fit(tmp_path, **changes())
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).count(". ") <= 4
    assert not (tmp_path / "refused").exists(), "a run was started"


def test_a_sweep_is_refused_with_the_config_that_was_tried(tmp_path):
    space = {"lr": tune.grid_search([-1.0, 0.1])}
    with pytest.raises(raytf.ConfigError, match="return a compiled keras.Model; .*, tried with lr=-1.0. Correct"):
        raytf.sweep(trainer(tmp_path, build_model=takes_positive_rates), space, progress=False)
