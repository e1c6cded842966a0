"""Keras 2 in the workers of a TensorflowTrainer, as Ray's own examples ask for it, and the error without it."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf import ReportCallback
from raytf.compat import legacy_keras
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROWS, BATCH, EPOCHS = 97, 30, 2
PATCHES = {f"raytf.parallel.{name}" for name in ("trainer", "optimizers", "losses", "metrics", "callbacks", "step")}


def build(tf):
    model = tf.keras.Sequential(
        [tf.keras.Input((6,)), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(4, "softmax")]
    )
    model.compile(
        tf.keras.optimizers.legacy.SGD(lr=0.1),
        "sparse_categorical_crossentropy",
        metrics=[tf.keras.losses.sparse_categorical_crossentropy],  # none of these is Keras 3's
    )
    return model


def loop(config):
    import sys

    import tensorflow as tf

    strategy = raytf.get_strategy()
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = build(tf)
    data = raytf.get_dataset("train", batch_size=BATCH, features=models.FEATURES, labels="label")
    rows = [len(labels) for _, labels in data]
    # imported by the driver, where `tf.keras` is Keras 3
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[ReportCallback()])
    iterations = int(model.optimizer.iterations.numpy())
    shard = raytf.prepare_dataset_shard(ray.train.get_dataset_shard("train").to_tf("x0", "label", batch_size=8))
    taken = sum(len(x) for x, _ in shard)
    shards = ray.train.get_dataset_shard("train").to_tf(models.FEATURES, "label", batch_size=8)
    shards = shards.map(lambda x, y: (tf.stack([x[name] for name in models.FEATURES], 1), y))
    model.fit(shards, verbose=0, callbacks=[raytf.ReportCheckpointCallback()])
    return {
        "keras": tf.keras.Model.__module__,
        "patches": sorted(PATCHES & set(sys.modules)),
        "replicas": strategy.num_replicas_in_sync,
        "kind": type(strategy).__name__,
        "rows": rows,
        "steps": iterations,
        "taken": taken,
        "weights": [w.tolist() for w in model.get_weights()],
    }


def trainer(tmp_path, function=loop, **options):
    return raytf.TensorflowTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": models.dataset(ROWS)},
        **options,
    )


def test_keras_2(tmp_path):
    result = trainer(tmp_path, tensorflow_config=raytf.TensorflowConfig(legacy_keras=True)).fit()
    found = result.return_value
    assert found["keras"].startswith("tf_keras.") and found["patches"] == []
    assert found["replicas"] == 2 and found["kind"] == "CollectiveAllReduceStrategy"
    assert found["rows"] == [15, 15, 15, 4], "the chief's part of each global batch"
    assert found["steps"] == EPOCHS * 4, "a step for each global batch"
    assert 0 < found["taken"] < ROWS
    assert {"loss", "sparse_categorical_crossentropy"} <= result.metrics.keys()
    model = raytf.load_model(result, legacy_keras=True)
    assert type(model).__module__.startswith("tf_keras")
    for left, right in zip(model.get_weights(), found["weights"], strict=True):
        np.testing.assert_array_equal(left, np.float32(right))


def uses_an_old_name():
    import tensorflow as tf

    return tf.keras.losses.mean_absolute_error


def test_error_without_legacy_keras_names_the_missing_name(tmp_path):
    with pytest.raises(raytf.TrainingError) as caught:
        trainer(tmp_path, uses_an_old_name).fit()
    cause = caught.value.cause
    assert "has no attribute 'mean_absolute_error'; tf.keras.losses.mean_absolute_error is Keras 2's" in cause
    assert "pass tensorflow_config=raytf.TensorflowConfig(legacy_keras=True)" in cause


def test_the_variable_is_handed_on(tmp_path, monkeypatch):
    monkeypatch.setenv(legacy_keras.VARIABLE, "1")
    environment = trainer(tmp_path).run_config.worker_runtime_env["env_vars"]
    assert environment[legacy_keras.VARIABLE] == "1"
    with pytest.raises(raytf.ConfigError, match="trains models of Keras 3 only; received: TF_USE_LEGACY_KERAS=1"):
        keras_trainer()


def test_a_keras_trainer_refuses_it():
    with pytest.raises(raytf.ConfigError, match="trains models of Keras 3 only; received: legacy_keras=True"):
        keras_trainer(tensorflow_config=raytf.TensorflowConfig(legacy_keras=True))
    with pytest.raises(raytf.ConfigError, match="trains models of Keras 3 only; received: TF_USE_LEGACY_KERAS=true"):
        keras_trainer(run_config=RunConfig(worker_runtime_env={"env_vars": {legacy_keras.VARIABLE: "true"}}))


def keras_trainer(**options):
    return raytf.KerasTrainer(
        models.mlp, datasets={"train": models.dataset(8)}, features=models.FEATURES, labels="label", **options
    )


def test_raytf_has_what_ray_exports():
    import ray.train.tensorflow
    import ray.train.tensorflow.keras

    for name in ray.train.tensorflow.__all__:
        assert getattr(raytf, name)
    assert raytf.ReportCheckpointCallback is ray.train.tensorflow.keras.ReportCheckpointCallback
    assert raytf.prepare_dataset_shard is ray.train.tensorflow.prepare_dataset_shard
