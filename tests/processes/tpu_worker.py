"""A KerasTrainer's worker with TPUs, as far as TensorFlow's TPU functions, which are replaced; prints what it did.

python -m tests.processes.tpu_worker '[{"batch_size": 16, ...}, ...]'
"""

from __future__ import annotations

import json
import os
import sys

from raytf.worker.session import Session
from tests import answers


class Noting(Session):
    """A run of one worker that keeps what it reports."""

    def __init__(self):
        super().__init__()
        self.reports = []

    def report(self, metrics, moment, keep=False):
        self.reports.append(metrics)


def build_model(config):
    import keras

    inputs = {"x": keras.Input((4,), name="x"), "ids": keras.Input((6,), dtype="int64", name="ids")}
    ids = keras.layers.Flatten()(keras.layers.Embedding(50, 2)(inputs["ids"]))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["x"], ids])))
    model.compile("sgd", "mse")
    return model


def replace_tpus() -> list:
    """Replaces TensorFlow's TPU functions in this process by notes of their calls: two CPU devices are chips.

    The resolver is TensorFlow's own; what it makes of the addresses is noted.
    """
    import tensorflow as tf

    calls = []

    def connect(resolver):
        calls.append(("connect", resolver.cluster_spec().as_dict()))

    def initialize(resolver):
        calls.append(("initialize", resolver.master()))

    def strategy(resolver):
        calls.append(("strategy", resolver.master()))
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.experimental_connect_to_cluster = connect
    tf.tpu.experimental.initialize_tpu_system = initialize
    tf.distribute.TPUStrategy = strategy
    return calls


def train(config) -> dict:
    """What a training did, or why it was refused."""
    import keras
    import numpy as np
    import pyarrow as pa

    import raytf
    from raytf.data.batch_spec import BatchSpec
    from raytf.data.sampling import Sampling
    from raytf.data.stored import StoredDataset
    from raytf.errors import ConfigError
    from raytf.runtime.settings import WorkerSetup
    from raytf.train import entry
    from raytf.worker import context, job

    class Seen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found["steps"], found["execution"] = self.params["steps"], self.model.steps_per_execution

    rng = np.random.default_rng(0)
    rows = config["rows"]
    lists = [list(range(1 + i % 6)) for i in range(rows)]
    table = pa.table(
        {"a": rng.normal(size=rows), "b": rng.normal(size=rows), "ids": pa.array(lists), "y": np.ones(rows)}
    )
    pad = {"pad": 6} if config["padded"] else {"pad": "batch"}
    seen, found, session = Seen(), {}, Noting()
    task = job.TrainJob(
        build_model=build_model,
        callbacks=lambda c: [seen],
        config={"batch_size": config["batch_size"], "epochs": 2},
        batch=BatchSpec.parsed({"x": ["a", "b", "a", "b"], "ids": raytf.Column("ids", **pad)}, "y"),
        datasets={"train": StoredDataset([table], [rows], list(table.column_names))},
        sampling=Sampling(global_batch=config["batch_size"]),
        steps_per_execution="auto",
        board=None,
    )
    with context.prepared(WorkerSetup(strategy="tpu", tpu=True)):
        try:
            entry.train(task, session)
        except ConfigError as error:
            found["error"] = str(error)
    return found | {"reports": len(session.reports)}


def main(configs):
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["10.0.0.1:20000"]}, "task": {"index": 0}})
    from raytf.compat.fast_import import import_keras

    import_keras()
    calls = replace_tpus()
    found = []
    for config in configs:
        calls.clear()
        found.append(train(config) | {"calls": list(calls)})
    answers.give(found)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
