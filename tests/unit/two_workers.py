"""Two workers of a ring in forks of this process: prints what a function of this module makes of each.

python -m tests.unit.two_workers FILE FUNCTION WORKERS
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

ROWS = 16


def _model(eagerly=False):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
    return model


def _fitted(rank, size, nan, bad_row=None, callbacks=(), epochs=2):
    """Trains on 4 steps of 4 rows in each epoch; returns {"events", "epochs"}: events as their lines."""
    import keras
    import numpy as np
    import tensorflow as tf

    from raytf.data import worker_part
    from raytf.runtime.topology import shard_of_rank
    from raytf.worker import context
    from raytf.worker.epoch_checks import EpochChecks
    from raytf.worker.session import Session

    strategy = context.get_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _model()
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    if bad_row is not None:
        x[bad_row] = np.nan
    parts = []
    for start in range(0, ROWS, 4):
        low, high = shard_of_rank(4, size, rank)
        parts.append((x[start + low : start + high], x[start + low : start + high, :2]))
    spec = tuple(tf.TensorSpec((None, n), tf.float32) for n in (3, 2))
    dataset = tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(parts)))
    dataset = worker_part.mark_worker_part(dataset) if size > 1 else dataset
    made = [one(rank) for one in callbacks]
    session, sent = Session(rank, size), []
    session.emit = sent.append
    checks = EpochChecks(nan, made, session)
    history = model.fit(dataset, epochs=epochs, verbose=0, callbacks=[*made, checks], shuffle=False)
    return {"events": [str(event) for event in sent], "epochs": len(history.epoch)}


def nan_of_one_row(rank, size):
    """Row 6 is in the second step, and of two workers the second one has it."""
    return _fitted(rank, size, "warn", bad_row=6)


def nan_that_stops(rank, size):
    return _fitted(rank, size, "stop", bad_row=6)


def nan_that_is_ignored(rank, size):
    return _fitted(rank, size, "ignore", bad_row=6)


def nan_that_ends_it(rank, size):
    """Also where raytf itself is to ignore it."""
    import keras

    return _fitted(rank, size, "ignore", bad_row=6, callbacks=[lambda rank: keras.callbacks.TerminateOnNaN()])


def all_well(rank, size):
    return _fitted(rank, size, "warn")


def weights_that_drift(rank, size):
    """A callback that draws a number on each worker for itself, and writes with TensorFlow, past Keras' variables."""
    import keras

    class Drift(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def on_epoch_end(self, epoch, logs=None):
            from raytf.parallel import own_state

            bias = self.model.trainable_variables[1]
            own_state.put_each(self.model.distribute_strategy, [(bias, [0.1 * self.rank, 0.2])])

    return _fitted(rank, size, "warn", callbacks=[Drift])


def _as_worker(function, rank, addresses, token):
    from raytf.collectives import ring_token
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.runtime.topology import tf_config
    from raytf.worker import context

    if len(addresses) > 1:
        os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
        ring_token.keep_token(token)
    with context.prepared(WorkerSetup(config=TensorflowConfig(seed=1, timeout_s=60))):
        return function(rank, len(addresses))


def main(path: str, name: str, workers: int) -> None:
    from raytf.collectives import ring_token
    from raytf.train import entry, verify

    entry.import_raytf()
    with verify.local_addresses(workers) as addresses:
        token = ring_token.new_token()
        runs = [
            verify.start_run(lambda rank=rank: _as_worker(globals()[name], rank, addresses, token))
            for rank in range(workers)
        ]
        for run in runs:
            os.waitpid(run.pid, 0)
    pathlib.Path(path).write_text(json.dumps([verify.read_memory(run.memory) for run in runs]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
