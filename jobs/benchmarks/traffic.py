"""Steps a second of two workers on two hosts whose network is slow: what 16-bit gradients and local steps bring.

sudo python jobs/benchmarks/traffic.py               # needs root: the hosts are network namespaces of this machine

"tensorflow" sums gradients by its own ring over gRPC; the others are raytf's. "sync_every 8" averages parameters every
eight steps instead of gradients in each. What a way costs is in the loss after the same number of steps, on
the same rows: the last column.
"""

from __future__ import annotations

import pathlib
import sys
import time

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for `cluster`, which is not installed

BATCH, ROWS, WIDTH = 64, 4096, 256
RATES = ("1gbit", "100mbit")
WAYS = {
    "tensorflow": {"communication": "ring"},
    "raytf": {},
    "raytf bfloat16": {"gradient_dtype": "bfloat16"},
    "raytf sync_every 8": {"sync_every": 8},
}
STEPS = 32


def once(way: str, steps: str) -> None:
    """One way in this process, which is one of two; gives steps a second, bytes a step and the loss."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    import keras
    import numpy as np

    from raytf.collectives import gradient_ring, ring_token
    from raytf.data import worker_part
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.worker import context

    steps = int(steps)
    ring_token.keep_token(bytes(ring_token.TOKEN_BYTES))  # processes of this benchmark alone
    with context.prepared(WorkerSetup(config=TensorflowConfig(**WAYS[way]))):
        distribution = tf.distribute.MultiWorkerMirroredStrategy()
        keras.utils.set_random_seed(0)
        with distribution.scope():
            layers = keras.layers
            model = keras.Sequential(
                [keras.Input((WIDTH,)), layers.Dense(1536, "relu"), layers.Dense(512, "relu"), layers.Dense(10)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        y = np.argmax(x @ rng.normal(size=(WIDTH, 10)), 1)
        rank = distribution.cluster_resolver.task_id
        data = tf.data.Dataset.from_tensor_slices((x[rank::2], y[rank::2])).repeat().batch(BATCH, drop_remainder=True)
        data = worker_part.mark_worker_part(data)
        model.fit(data, steps_per_epoch=8, epochs=1, verbose=0)
        ring = gradient_ring.ring_of(distribution)
        noting = _noting(keras, ring)
        history = model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[noting])
        sent = noting.sent / steps if ring else None
        seconds = noting.seconds
        common.give({"rate": steps / seconds, "sent": sent, "loss": history.history["loss"][-1]})


def _noting(keras, ring):
    """Returns a callback that counts from the first step to the last, without exchanges before and after them."""

    class Noting(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self._began = time.perf_counter(), self._sent()

        def on_train_batch_end(self, batch, logs=None):
            began, sent = self._began
            self.seconds, self.sent = time.perf_counter() - began, self._sent() - sent

        def _sent(self):
            return ring.ring.sent if ring else 0

    return Noting()


def measure(hosts, way: str, steps: int) -> dict:
    """What the first of two processes on two hosts gives."""
    from raytf.runtime.allocator import allocator
    from raytf.runtime.topology import tf_config

    addresses = [f"{host.address}:25000" for host in hosts]
    commands = [host.command([sys.executable, __file__, "--once", way, str(steps)]) for host in hosts]
    environments = [
        {"TF_CONFIG": tf_config({"worker": addresses}, "worker", rank), **allocator(1)} for rank in range(len(hosts))
    ]
    return common.run_together(commands, environments, 600)[0]


def main(arguments=None):
    from cluster.namespaces import hosts

    options = common.parser(__doc__).parse_args(arguments)
    repeats, steps = (1, 16) if options.smoke else (options.repeats, STEPS)
    found: dict = {}
    for rate in RATES[-1:] if options.smoke else RATES:
        with hosts(2, rate) as two:
            for _ in range(repeats):
                for way in WAYS:
                    found.setdefault(rate, {}).setdefault(way, []).append(measure(two, way, steps))
                    print(f"{rate} {way}: {found[rate][way][-1]}", file=sys.stderr)
    rows = []
    for rate, ways in found.items():
        base = common.spread(one["rate"] for one in ways["tensorflow"])[0]
        for way, answers in ways.items():
            median, least, most = common.spread(one["rate"] for one in answers)
            sent = answers[0]["sent"]
            shown = "" if sent is None else f"{sent / 2**20:.2f}"
            loss = f"{answers[0]['loss']:.4f}"
            rows.append([rate, way, median, f"{least:.1f} to {most:.1f}", f"{median / base:.1f}x", shown, loss])
    head = ["link", "way", "steps/s", "spread", "TensorFlow's", "MiB sent a step", "loss"]
    title = f"Traffic: MLP of 1.2 M parameters, two hosts, median of {repeats}"
    common.finish(options, "traffic", common.table(title, head, rows), found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:4])
    else:
        main()
