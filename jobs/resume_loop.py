"""A train loop of your own that is killed within an epoch, restarted, and resumes with the next batch.

python jobs/resume_loop.py --num-workers 2
ray job submit --working-dir . -- python jobs/resume_loop.py --num-workers 2 --storage /shared/runs

Rank 0 kills itself in the second epoch, once. The marked lines make the loop resume.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import tempfile

import numpy as np
import ray
import ray.train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

import raytf


def train_loop(config):
    import keras
    import tensorflow as tf

    strategy = raytf.get_strategy()
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    rows = raytf.get_dataset("train", batch_size=config["batch_size"], features=["a", "b", "c", "d"], labels="y")
    position = raytf.Position(rows)  # resumes 1
    saved = tf.train.Checkpoint(model=model, optimizer=optimizer, position=position)  # resumes 2
    if last := ray.train.get_checkpoint():  # resumes 3
        with last.as_directory() as folder:  # resumes 4
            saved.read(os.path.join(folder, "state")).assert_existing_objects_matched()  # resumes 5
    rank = ray.train.get_context().get_world_rank()
    began = f"step {position.step} of epoch {position.epoch}"

    @tf.function
    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                error = tf.reduce_sum(tf.square(model(x, training=True)[:, 0] - tf.cast(y, tf.float32)))
                loss = error / config["batch_size"]
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    for batches in position.epochs(config["epochs"]):  # resumes 6
        for x, y in batches:
            loss = float(step(x, y))
            done = position.epoch * position.steps + position.step
            if done % config["every"] and position.step < position.steps:
                continue
            with tempfile.TemporaryDirectory() as folder:  # resumes 7
                saved.write(os.path.join(folder, "state"))  # resumes 8
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None  # resumes 9
                ray.train.report({"loss": loss, "step": done}, checkpoint=checkpoint)  # resumes 10
            if rank == 0 and done > position.steps + config["every"] and not os.path.exists(config["killed"]):
                open(config["killed"], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
    return done, began, [w.tolist() for w in model.get_weights()]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--storage", default="runs", help="folder for results; one that all hosts of a cluster share")
    parser.add_argument("--smoke", action="store_true", help="two short epochs, to see that everything works")
    options = parser.parse_args(arguments)

    ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    storage = os.path.abspath(options.storage)
    os.makedirs(storage, exist_ok=True)
    random = np.random.default_rng(0)
    count = 1_030 if options.smoke else 20_030
    table = {name: random.normal(size=count).astype("float32") for name in "abcd"}
    rows = ray.data.from_numpy(np.stack(list(table.values()), 1)).map_batches(
        lambda batch: {**{n: batch["data"][:, i] for i, n in enumerate("abcd")}, "y": batch["data"].sum(1)}
    )

    def run(killed):
        return raytf.TensorflowTrainer(
            train_loop,
            train_loop_config={"batch_size": 64, "epochs": 2 if options.smoke else 3, "every": 5, "killed": killed},
            datasets={"train": rows},
            scaling_config=ScalingConfig(num_workers=options.num_workers),
            run_config=RunConfig(
                storage_path=storage,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()

    with tempfile.TemporaryDirectory(dir=storage) as folder:  # rank 0 may be on another host
        quiet = run(killed=folder)
        broken = run(killed=os.path.join(folder, "killed"))
    same = all(np.array_equal(a, b) for a, b in zip(quiet.return_value[2], broken.return_value[2], strict=True))
    done, began, _ = broken.return_value
    print(f"{done} steps, at last from {began} on; the weights of a quiet run to the bit: {same}")


if __name__ == "__main__":
    main()
