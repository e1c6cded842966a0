"""Train loops as people write them for Ray's own TensorflowTrainer, with only the import changed."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig

import raytf
from raytf import TensorflowTrainer
from raytf.data import sampling
from tests.cluster import models

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def build():
    import tensorflow as tf

    return tf.keras.Sequential(
        [tf.keras.layers.Input((1,)), tf.keras.layers.Dense(10, "relu"), tf.keras.layers.Dense(1)]
    )


def loop_with_fit(config):
    """After Ray's guide "Get Started with Distributed Training using TensorFlow and Keras"."""
    import tensorflow as tf
    from ray.train.tensorflow.keras import ReportCheckpointCallback

    task = json.loads(os.environ["TF_CONFIG"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = build()
        model.compile(tf.keras.optimizers.SGD(config["lr"]), "mse", metrics=["mse"])
    dataset = ray.train.get_dataset_shard("train")
    history = []
    for _ in range(config["epochs"]):
        batches = dataset.to_tf(feature_columns="x", label_columns="y", batch_size=config["batch_size"])
        history += model.fit(batches, verbose=0, callbacks=[ReportCheckpointCallback()]).history["loss"]
    assert strategy.num_replicas_in_sync == 2 and len(task["cluster"]["worker"]) == 2
    return {"history": history, "steps": int(model.optimizer.iterations)}


def line(count=200):
    return ray.data.from_items([{"x": np.float32(i / count), "y": np.float32(3 * i / count + 1)} for i in range(count)])


def test_the_guide_of_ray(tmp_path, capfd):
    trainer = TensorflowTrainer(
        train_loop_per_worker=loop_with_fit,
        train_loop_config={"lr": 0.1, "batch_size": 20, "epochs": 4},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": line()},
    )
    result = trainer.fit()
    out = capfd.readouterr().out
    assert f"run     {result.path}\n" in out and "result  " in out and f"saved   {result.checkpoint.path}\n" in out, out
    history = result.return_value["history"]
    assert history[-1] < 0.5 * history[0]
    assert result.return_value["steps"] == 4 * 200 // 20, "batch_size is the global batch, and no row is lost"
    assert result.checkpoint is not None and "loss" in result.metrics
    with result.checkpoint.as_directory() as folder:
        model = raytf.load_model(os.path.join(folder, "model.keras"))
    assert abs(float(model.predict(np.ones((1, 1)), verbose=0)[0, 0]) - 4) < 1


def loop_by_hand(config):
    """A loop after TensorFlow's guide "Custom training loop with Keras and MultiWorkerMirroredStrategy"."""
    import tempfile

    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    global_batch = config["batch_size"] * strategy.num_replicas_in_sync

    def batches(context):
        x = np.linspace(0, 1, 160, dtype="float32")[:, None]
        data = tf.data.Dataset.from_tensor_slices((x, 2 * x + 1))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.batch(context.get_per_replica_batch_size(global_batch))

    with strategy.scope():
        tf.keras.utils.set_random_seed(1)
        model = build()
        optimizer = tf.keras.optimizers.Adam(0.05)
        accuracy = tf.keras.metrics.MeanSquaredError()
    distributed = strategy.distribute_datasets_from_function(batches)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            per_row = tf.reduce_mean(tf.square(y - predicted), axis=-1)
            loss = tf.nn.compute_average_loss(per_row, global_batch_size=global_batch)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        accuracy.update_state(y, predicted)
        return loss

    @tf.function
    def epoch(iterator):
        total = 0.0
        for _ in tf.range(160 // global_batch):
            losses = strategy.run(step, args=(next(iterator),))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return total

    for _ in range(config["epochs"]):
        loss = float(epoch(iter(distributed)))
        with tempfile.TemporaryDirectory() as folder:
            model.save_weights(os.path.join(folder, "model.weights.h5"))
            checkpoint = Checkpoint.from_directory(folder) if models.rank() == 0 else None
            ray.train.report({"loss": loss, "mse": float(accuracy.result())}, checkpoint=checkpoint)
        accuracy.reset_state()
    return [w.tolist() for w in model.get_weights()]


def test_a_loop_by_hand(tmp_path):
    trainer = TensorflowTrainer(
        loop_by_hand,
        train_loop_config={"batch_size": 8, "epochs": 20},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert result.metrics["loss"] < 0.1 and result.metrics["mse"] < 0.02


def loop_with_raytf(config):
    import keras

    strategy = raytf.get_strategy()
    assert strategy is raytf.get_strategy() and strategy.num_replicas_in_sync == 2
    data = raytf.get_dataset("train", batch_size=30, features=models.FEATURES, labels="label", seed=3)
    seen = [np.concatenate([x.numpy()[:, 0] for x, _ in data]).tolist() for _ in range(2)]
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = models.mlp({})
    model.fit(data, epochs=2, verbose=0, callbacks=[raytf.ReportCallback()])
    refused = []
    wrong = {"name": "trian"}, {"seed": -1}, {"batch_size": 98, "drop_remainder": True}
    for one in wrong:
        try:
            raytf.get_dataset(**{"name": "train", "batch_size": 4, "features": "x0", **one})
        except raytf.ConfigError as error:
            refused.append(str(error))
    threads = [os.environ[f"TF_NUM_{name}_THREADS"] for name in ("INTRAOP", "INTEROP")]
    everyone = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    return {"seen": seen, "threads": threads, "workers": everyone, "refused": refused}


def test_the_part_of_a_worker(tmp_path):
    """`raytf.get_dataset` gives the chief its part of each global batch, in the order of `raytf.data.sampling`."""
    trainer = TensorflowTrainer(
        loop_with_raytf,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": models.dataset()},
    )
    result = trainer.fit()
    assert "loss" in result.metrics and result.checkpoint is not None
    returned = result.return_value
    values = models.rows()["x0"]
    for epoch, seen in enumerate(returned["seen"]):
        expected = values[
            sampling.worker_part(sampling.shuffled(97, 3, epoch).elements_at(np.arange(97)), 30, 0, 2, slice(0, 4))
        ]
        np.testing.assert_array_equal(np.float32(seen), expected)
    assert returned["threads"] == ["1", "2"]
    ports = [int(address.rsplit(":", 1)[1]) for address in returned["workers"]]
    assert len(set(ports)) == 2 and all(20_000 <= port < 32_000 for port in ports)
    name, seed, batch = returned["refused"]
    assert "one that the trainer was given ('train'); received: 'trian'" in name
    assert "seed must be an integer from 0 to 2**63 - 1; received: -1" in seed
    assert "With drop_remainder an epoch needs one whole batch; received: batch_size=98 for the 97 rows" in batch


def test_wrong_calls_are_refused_with_the_reason():
    with pytest.raises(raytf.ConfigError, match="inside a train loop"):
        raytf.get_dataset("train", batch_size=4, features="x")
    with pytest.raises(raytf.ConfigError, match="inside a train loop"):
        raytf.get_strategy()
    with pytest.raises(raytf.ConfigError, match="must be a raytf.TensorflowConfig"):
        TensorflowTrainer(loop_with_raytf, tensorflow_config=3)
    with pytest.raises(raytf.ConfigError, match="must be one of"):
        TensorflowTrainer(loop_with_raytf, strategy="mirorred")
