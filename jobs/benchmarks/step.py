"""Steps a second on two workers of this machine, one thread each; all ways in turn.

python jobs/benchmarks/step.py

"tf_keras" is Keras 2 under MultiWorkerMirroredStrategy, which is all that Ray's TensorflowTrainer offers; "by hand" a
`strategy.run` loop with a hand-set TF_CONFIG, on Keras 3; "raytf" is Keras 3's `fit` as raytf's workers run it. Batches
lie ready in memory. A number behind a way is its `steps_per_execution`; "grpc" is raytf with gradients summed by
TensorFlow's own collectives instead of raytf's ring of sockets, "bfloat16" the ring with 16-bit gradients.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import common

BATCH = 64
MODELS = ("cnn", "mlp")
STEPS = {"cnn": 150, "mlp": 20}
WAYS = ("one process", "tf_keras", "tf_keras 20", "by hand", "raytf grpc", "raytf", "raytf 20", "raytf bfloat16")


def _model(keras, kind: str):
    parts = common.small_cnn(keras)
    if kind == "mlp":  # 10 million parameters
        layers = keras.layers
        parts = [
            keras.Input((784,)),
            layers.Dense(2560, activation="relu"),
            layers.Dense(2560, activation="relu"),
            layers.Dense(500, activation="relu"),
            layers.Dense(10),
        ]
    model = keras.Sequential(parts)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, keras.optimizers.SGD(0.01, momentum=0.9), loss


def _rows(kind: str, count: int):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (28, 28, 1) if kind == "cnn" else (784,)
    return rng.normal(size=(count, *shape)).astype("float32"), rng.integers(0, 10, count)


def once(way: str, kind: str, steps: str) -> None:
    """One way in this process, which may be one of a group; gives steps a second."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    steps, name, _, execution = int(steps), *way.partition(" ")
    with contextlib.ExitStack() as stack:
        if name == "raytf":
            from raytf.collectives import ring
            from raytf.runtime.settings import TensorflowConfig, WorkerSetup
            from raytf.worker import context

            ring.keep_token(bytes(ring.TOKEN_BYTES))  # processes of this benchmark alone
            wire = execution if execution.startswith("bf") else None
            way = "ring" if execution == "grpc" else "auto"
            config = TensorflowConfig(communication=way, gradient_dtype=wire)
            stack.enter_context(context.prepared(WorkerSetup(config=config)))
        many = "TF_CONFIG" in os.environ
        strategy = tf.distribute.MultiWorkerMirroredStrategy() if many else tf.distribute.get_strategy()
        common.give(_rate(strategy, name, kind, int(steps), execution))


def _rate(strategy, name: str, kind: str, steps: int, execution: str) -> float:
    import tensorflow as tf

    execution = int(execution) if execution.isdigit() else 1
    batch = tf.data.Dataset.from_tensors(_rows(kind, BATCH)).repeat(2 * steps)
    run = _by_hand(strategy, kind, batch) if name == "by" else _fit(name, strategy, kind, batch, execution)
    run(steps)
    began = time.perf_counter()
    run(steps)
    return steps / (time.perf_counter() - began)


def _fit(name: str, strategy, kind: str, batch, execution: int):
    """`fit` of Keras 2 or 3; the first call traces, the second is measured."""
    if name == "tf_keras":
        import tf_keras as keras
    else:
        import keras
    if name == "raytf":
        from raytf.data import worker_part

        batch = worker_part.mark_worker_part(batch)
    with strategy.scope():
        model, optimizer, loss = _model(keras, kind)
        model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=execution)
    if name == "tf_keras":
        local = batch
        batch = strategy.distribute_datasets_from_function(lambda context: local)
    return lambda steps: model.fit(batch, steps_per_epoch=steps, epochs=1, verbose=0)


def _by_hand(strategy, kind: str, batch):
    import keras
    import tensorflow as tf

    with strategy.scope():
        model, optimizer, loss = _model(keras, kind)
        optimizer.build(model.trainable_variables)
    loss.reduction = "none"
    replicas = strategy.num_replicas_in_sync

    @tf.function
    def step(iterator):
        def replica(x, y):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(loss(y, model(x, training=True))) / (BATCH * replicas)
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return value

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=next(iterator)), axis=None)

    distributed = iter(strategy.distribute_datasets_from_function(lambda context: batch))

    def run(steps):
        for _ in range(steps):
            step(distributed)

    return run


def main(arguments=None):
    from raytf.runtime.allocator import allocator

    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    figures, rows = {}, []
    for kind in options.models:
        steps = STEPS[kind] // (6 if options.smoke else 1)
        found = figures[kind] = {way: [] for way in options.ways}
        for _ in range(repeats):
            for way in options.ways:
                legacy = {"TF_USE_LEGACY_KERAS": "1"} if way.startswith("tf_keras") else {}
                ours = allocator(1) if way.startswith("raytf") else {}
                rate = common.measure_group(
                    __file__,
                    *("--once", way, kind, str(steps)),
                    workers=1 if way == "one process" else 2,
                    environment=legacy | ours,
                )
                print(f"{kind} {way}: {rate:.1f} steps/s", file=sys.stderr)
                found[way].append(rate)
        middle = {way: common.spread(rates)[0] for way, rates in found.items()}
        best = max((rate for way, rate in middle.items() if way.startswith("raytf")), default=0.0)
        for way in options.ways:
            median, least, most = common.spread(found[way])
            rows.append([kind, way, median, f"{least:.1f} to {most:.1f}", f"{best / median:.2f}x"])
    title = f"Step: steps/s, batch {BATCH} a worker, median of {repeats}"
    shown = common.table(title, ["model", "way", "steps/s", "spread", "raytf's best against it"], rows)
    common.finish(options, "step", shown, figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
