"""A training as Ray's guide for TensorFlow writes it, the baseline of raytf's benchmarks; workers import this file.

A checkpoint at the end of each epoch, and `ray.train.get_checkpoint()`, with tf_keras, which is its only way.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable

import common


def model(keras, width: int):
    """The network that all ways of a benchmark train.

    Args:
        keras: `keras` or `tf_keras`.
        width: numbers in a row.
    """
    layers = keras.layers
    made = keras.Sequential([keras.Input((width,)), layers.Dense(64, "relu"), layers.Dense(10, "softmax")])
    made.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def batches(width: int, rows: int):
    """A worker's part of the dataset "train", in batches of so many rows of `width` numbers."""
    import ray.train
    import tensorflow as tf

    # Ray finds none for pyarrow's own tensors
    features, labels = tf.TensorSpec((None, width), tf.float32), tf.TensorSpec((None,), tf.int64)
    shard = ray.train.get_dataset_shard("train")
    return shard.to_tf("x", "y", batch_size=rows, drop_last=True, feature_type_spec=features, label_type_spec=labels)


def fit(
    folder: str, rows: int, width: int, epochs: int, steps: int, workers: int, batch: int, watch: Callable, **run
) -> None:
    """Trains.

    Args:
        folder: storage.
        rows: of the data, each with `width` numbers.
        epochs, steps: how many epochs of how many steps.
        workers: how many.
        batch: rows of a worker's step.
        watch: watch(tf_keras, rank) -> a worker's callback.
        run: further arguments of the `RunConfig`.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    def loop(config):
        import ray.train
        import tensorflow as tf
        import tf_keras

        rank = ray.train.get_context().get_world_rank()
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        checkpoint, begin = ray.train.get_checkpoint(), 0
        with strategy.scope():
            if checkpoint:
                with checkpoint.as_directory() as saved:
                    trained = tf_keras.models.load_model(os.path.join(saved, "model.keras"))
                    with open(os.path.join(saved, "checkpoint.json")) as file:
                        begin = json.load(file)["epoch"] + 1
            else:
                trained = model(tf_keras, width)
        dataset = batches(width, batch)
        callback = watch(tf_keras, rank)
        for epoch in range(begin, epochs):
            history = trained.fit(
                dataset.repeat(),
                steps_per_epoch=steps,
                initial_epoch=epoch,
                epochs=epoch + 1,
                callbacks=[callback],
                verbose=0,
            )
            with tempfile.TemporaryDirectory() as saved:
                trained.save(os.path.join(saved, "model.keras"))
                with open(os.path.join(saved, "checkpoint.json"), "w") as file:
                    json.dump({"epoch": epoch}, file)
                reported = ray.train.Checkpoint.from_directory(saved) if rank == 0 else None
                ray.train.report({"loss": history.history["loss"][0]}, checkpoint=reported)

    TensorflowTrainer(
        loop,
        datasets={"train": common.vectors(rows, width)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run", storage_path=folder, worker_runtime_env={"env_vars": {"TF_USE_LEGACY_KERAS": "1"}}, **run
        ),
    ).fit()
