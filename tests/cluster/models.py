"""Models, data and callbacks of the cluster tests; workers import this module."""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import os
import signal
import time

import numpy as np

FEATURES = [f"x{i}" for i in range(6)]


def rows(count=97, seed=0):
    """`count` rows of six numbers and a class that depends on them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6))
    label = (x[:, 0] > 0).astype(int) + 2 * (x[:, 1] > 0.3).astype(int)
    return {
        **{f"x{i}": x[:, i].astype("float32") for i in range(6)},
        "label": label,
        "weight": rng.uniform(0, 2, count),
    }


def dataset(count=97, seed=0, blocks=5):
    import pyarrow as pa
    import ray

    table = pa.table(rows(count, seed))
    edges = [count * i // blocks for i in range(blocks + 1)]
    return ray.data.from_arrow([table.slice(a, b - a) for a, b in zip(edges, edges[1:], strict=False)])


def mlp(config):
    """Returns a float64 classifier, which distinguishes a wrong gradient from rounding."""
    import keras
    from keras import layers

    keras.config.set_floatx("float64")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu"),
            *([layers.BatchNormalization()] if config.get("normalized") else []),
            layers.Dropout(config.get("dropout", 0.0)),
            layers.Dense(4, "softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(config.get("learning_rate", 0.01))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def rank():
    import ray.train

    return ray.train.get_context().get_world_rank()


def kill_once(marker, rank_, epoch, batch, sig=signal.SIGKILL, behind=None, told=False):
    """A callback that kills worker `rank_` in the middle of an epoch, the first time that it gets there.

    Before a batch, or when it is `told` that this one has ended. Not before a file is there that matches the pattern
    `behind`.
    """
    import keras

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, e, logs=None):
            self.epoch = e

        def on_train_batch_begin(self, b, logs=None):
            self.die(b, False)

        def on_train_batch_end(self, b, logs=None):
            self.die(b, True)

        def die(self, b, ended):
            reached = (rank(), self.epoch, b, ended) == (rank_, epoch, batch, told)
            if reached and not os.path.exists(marker):
                _die(marker, behind, sig)

    return Kill()


def _die(marker, behind, sig=signal.SIGKILL):
    """Notes this process and ends it, once a file is there that matches the pattern `behind`, if there is one."""
    until = time.monotonic() + 60.0
    while behind is not None and not glob.glob(behind) and time.monotonic() < until:
        time.sleep(0.01)
    with open(marker, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getpid(), sig)


def kill_between_steps_once(marker, rank_, epoch, behind):
    """A callback that kills worker `rank_` at the end of an epoch, once a file is there that matches `behind`."""
    import keras

    class Kill(keras.callbacks.Callback):
        def on_epoch_end(self, e, logs=None):
            if rank() == rank_ and e == epoch and not os.path.exists(marker):
                _die(marker, behind)

    return Kill()


def note_steps(folder, fail=None):
    """A callback that notes each worker's batches, as (process, epoch, batch), and fails at [epoch, batch]."""
    import keras

    class Note(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            with open(os.path.join(folder, f"{rank()}.json"), "a") as file:
                file.write(json.dumps([os.getpid(), self.epoch, batch]) + "\n")
            if [self.epoch, batch] == fail:
                raise KeyError("on purpose")

    return Note()


def tell_of_cluster(folder):
    """A callback that writes at the end what there is of TensorFlow's cluster in each of several workers."""
    import keras
    import tensorflow as tf
    from tensorflow.python.eager import context

    from raytf.runtime import ports

    class Tell(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            place = context.context()
            task = json.loads(os.environ["TF_CONFIG"])
            status = {
                "servers": [repr(place.get_server_def()), repr(place._collective_ops_server_def)],
                "coordination": repr(place.coordination_service),
                "listens": ports.is_listening(task["cluster"]["worker"][task["task"]["index"]]),
                "devices": sorted({device.name.split("/replica")[0] for device in tf.config.list_logical_devices()}),
                "replicas": self.model.distribute_strategy.num_replicas_in_sync,
            }
            with open(os.path.join(folder, f"cluster_{rank()}_of_{status['replicas']}"), "w") as file:
                json.dump(status, file)

    return Tell()


def tell_cores(folder):
    """A callback that notes, at the fourth epoch, where a worker computes, and where its writer of checkpoints does."""
    import keras

    from raytf.runtime import cores
    from raytf.storage.snapshots import SnapshotWriter

    class Tell(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch != 3:
                return
            writers = [one.pid for one in gc.get_objects() if isinstance(one, SnapshotWriter) and one.pid]
            before = sorted(cores.cores_before() or os.sched_getaffinity(0))
            status = {
                "own": sorted(cores.own_cores()),
                "before": before,
                "claimed": sorted(cores.claimed_cores(before)),
                "threads": [sorted(os.sched_getaffinity(int(name))) for name in os.listdir("/proc/self/task")],
                "writers": [sorted(os.sched_getaffinity(pid)) for pid in writers],
            }
            with open(os.path.join(folder, f"cores_{rank()}.json"), "w") as file:
                json.dump(status, file)

    return Tell()


def mlp_killed_writing(config):
    """`mlp`, of which the chief dies once, when it hands over the checkpoint after the last epoch."""
    model = mlp(config)
    get_config = model.optimizer.get_config

    def killed():
        epochs_made = int(model.optimizer.iterations) // 4
        if epochs_made == config["epochs"] and not os.path.exists(config["kill_writing"]):
            with open(config["kill_writing"], "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return get_config()

    model.optimizer.get_config = killed
    return model


def full_disk(path):
    """A callback that fills a disk with a file at the end of the first epoch, until a step of the third; on rank 0."""
    import keras

    class Fill(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank() == 0 and epoch == 0:
                with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if rank() == 0 and self.epoch == 2 and os.path.exists(path):
                os.remove(path)

    return Fill()


def kill_server_once(marker, epoch, batch):
    """A callback that kills what reads the streams of its cluster, the first time that rank 0 gets there."""
    import keras
    import psutil

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, e, logs=None):
            self.epoch = e

        def on_train_batch_begin(self, b, logs=None):
            if rank() == 0 and (self.epoch, b) == (epoch, batch) and not os.path.exists(marker):
                logs = os.path.dirname(os.readlink("/proc/self/fd/1"))
                found = psutil.process_iter(["cmdline"])
                # Ray adds the method that runs
                found = [p for p in found if (p.info["cmdline"] or [""])[0].startswith("ray::StreamServer")]
                servers = [p for p in found if any(f.path.startswith(logs) for f in p.open_files())]
                with open(marker, "w") as file:
                    file.write(str([p.pid for p in servers]))
                for process in servers:
                    process.kill()

    return Kill()


def death(marker, rank_, step):
    """A function that kills worker `rank_` at its call number `step` in a process, from 1, the first time of all."""
    # the model is tried outside of workers, too
    index = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index")
    calls = []

    def die():
        calls.append(None)
        if index == rank_ and len(calls) == step and not os.path.exists(marker):
            with open(marker, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def accumulating(config):
    """A classifier whose optimizer accumulates gradients; a worker dies inside a step, the first time that it is there.

    `config["inside"]`: arguments of `death`.
    """
    import keras
    import tensorflow as tf
    from keras import layers

    die = death(**config["inside"])

    class Dying(keras.Model):
        def train_step(self, data):
            tf.py_function(die, [], [])
            return super().train_step(data)

    keras.config.set_floatx("float64")
    inputs = keras.Input((6,))
    x = layers.Dropout(0.2)(layers.Dense(16, "relu")(inputs))
    model = Dying(inputs, layers.Dense(4, "softmax")(x))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=3)
    return model


def tables(config):
    """A float64 model of two tables; each of its inputs is an id from 0 to 19."""
    import keras
    from keras import layers

    keras.config.set_floatx("float64")
    ids = keras.Input((5,), dtype="int64")
    parts = [layers.Flatten()(layers.Embedding(20, width)(ids)) for width in (4, 3)]
    model = keras.Model(ids, layers.Dense(4)(layers.concatenate(parts)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), loss)
    return model
