"""`raytf.TFData` on a real Ray: a tf.data function trains alike on any number of workers, resumes, and is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")
CONFIG = {"batch_size": 25, "epochs": 3, "dropout": 0.2}


def pairs(rows, seed):
    """A pipeline as users write it: cached, shuffled, augmented, batched, prefetched."""

    def make(context):
        import tensorflow as tf

        random = np.random.default_rng(seed)
        x, y = random.normal(size=(rows, 3)).astype("float32"), random.integers(0, 3, rows)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shard(context.num_shards, context.index)
        data = data.cache().shuffle(40).map(lambda x, y: (x + 0.01 * tf.random.normal([3]), y))
        return data.batch(context.batch).prefetch(tf.data.AUTOTUNE)

    return make


def build(config):
    import keras

    keras.config.set_floatx("float64")
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(config["dropout"]),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def trainer(tmp_path, workers, name, callbacks=None, failures=0, **options):
    source = options.pop("source", {})
    config = CONFIG | options.pop("config", {})
    return raytf.KerasTrainer(
        options.pop("build", build),
        datasets=options.pop("datasets", None)
        or {"train": raytf.TFData(pairs(97, 0), **source), "validation": raytf.TFData(pairs(41, 1), **source)},
        config=config,
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)
        ),
        verify=options.pop("verify", False),
        **options,
    )


def assert_equal(one, other):
    for mine, its in zip(*(raytf.load_model(result).get_weights() for result in (one, other)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-9)
    for column in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(one.metrics_dataframe[column], other.metrics_dataframe[column], atol=1e-9)


def test_two_workers_one_of_which_dies_train_as_one_does(tmp_path, capsys):
    alone = trainer(tmp_path, 1, "one").fit()
    assert "goes on at any step" in capsys.readouterr().out

    def kill(config):
        return [models.kill_once(str(tmp_path / "killed"), 1, 1, 2)]

    together = trainer(tmp_path, 2, "two", callbacks=kill, failures=1).fit()
    assert_equal(alone, together)
