"""Time of a step on two workers of this machine, one thread each; all ways in turn.

python jobs/benchmarks/step.py

"tf_keras" is Keras 2 under MultiWorkerMirroredStrategy, which is all that Ray's TensorflowTrainer offers; "by hand" a
`strategy.run` loop with a hand-set TF_CONFIG, on Keras 3; "raytf" is Keras 3's `fit` as raytf's workers run it. Batches
are ready in memory. Models are trained by SGD with momentum, and those with "adam" after their name by Adam. A number
after a way is its `steps_per_execution`, which is 20 for the tabular model and else 1; "grpc" is raytf with gradients
summed by TensorFlow's own collectives instead of raytf's ring of sockets, "bfloat16" the ring with 16-bit gradients,
"operations" raytf with the update by Keras' operations and not compiled, "shard" raytf with `shard_optimizer`,
"no-update" raytf with an optimizer that updates nothing, so that the rest is what an update costs,
"unpinned" raytf without `pin_cpus`, which keeps each worker to a core of its own. Two processes that do not talk, each
on a core of its own, too, are the limit of the machine.

CPU time is what all threads of a worker compute for a step, the mean of both; the wall time is that of the slower one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import common

MODELS = ("cnn", "mlp", "tabular", "cnn adam", "mlp adam")
BATCH = {"cnn": 64, "mlp": 64, "tabular": 512, "cnn adam": 64, "mlp adam": 64}
STEPS = {"cnn": 150, "mlp": 20, "tabular": 1500, "cnn adam": 150, "mlp adam": 20}
EXECUTION = {"cnn": 1, "mlp": 1, "tabular": 20, "cnn adam": 1, "mlp adam": 1}
APART = "two that do not talk"
RAYTF = ("raytf grpc", "raytf unpinned", "raytf operations", "raytf", "raytf shard", "raytf no-update")
RAYTF += ("raytf 20", "raytf bfloat16")
WAYS = ("one process", APART, "tf_keras", "tf_keras 20", "by hand", *RAYTF)


def _model(keras, kind: str):
    layers = keras.layers
    kind, _, optimizer = kind.partition(" ")
    if kind == "cnn":
        parts = common.small_cnn(keras)
    elif kind == "tabular":
        dense = [layers.Dense(64, activation="relu"), layers.Dense(64, activation="relu"), layers.Dense(2)]
        parts = [keras.Input((32,)), *dense]
    else:  # 10 million parameters
        parts = [
            keras.Input((784,)),
            layers.Dense(2560, activation="relu"),
            layers.Dense(2560, activation="relu"),
            layers.Dense(500, activation="relu"),
            layers.Dense(10),
        ]
    model = keras.Sequential(parts)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, keras.optimizers.Adam() if optimizer else keras.optimizers.SGD(0.01, momentum=0.9), loss


def _rows(kind: str, count: int):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = {"cnn": (28, 28, 1), "mlp": (784,), "tabular": (32,)}[kind.partition(" ")[0]]
    classes = 2 if kind == "tabular" else 10
    return rng.normal(size=(count, *shape)).astype("float32"), rng.integers(0, classes, count)


def once(way: str, kind: str, steps: str) -> None:
    """One way in this process, which may be one of a group; gives wall and CPU seconds of a step."""
    from raytf.runtime import cores

    if way in (APART, *RAYTF) and way != "raytf unpinned" and cores.claim_cores(1):
        cores.enforce_cores()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    steps, name, _, execution = int(steps), *way.partition(" ")
    with contextlib.ExitStack() as stack:
        if name == "raytf":
            from raytf.collectives import ring_token
            from raytf.compat.patching import patched
            from raytf.parallel import compiled_update
            from raytf.runtime.settings import TensorflowConfig, WorkerSetup
            from raytf.worker import context

            ring_token.keep_token(bytes(ring_token.TOKEN_BYTES))  # processes of this benchmark alone
            wire = execution if execution.startswith("bf") else None
            way = "ring" if execution == "grpc" else "auto"
            config = TensorflowConfig(communication=way, gradient_dtype=wire, shard_optimizer=execution == "shard")
            stack.enter_context(context.prepared(WorkerSetup(config=config)))
            if execution == "operations":
                stack.enter_context(patched(compiled_update, "enabled", False))
        many = "TF_CONFIG" in os.environ
        strategy = tf.distribute.MultiWorkerMirroredStrategy() if many else tf.distribute.get_strategy()
        common.give(_seconds(strategy, name, kind, int(steps), execution))
        cores.release_cores()


def _seconds(strategy, name: str, kind: str, steps: int, execution: str) -> tuple[float, float]:
    import tensorflow as tf

    updates, execution = execution != "no-update", int(execution) if execution.isdigit() else EXECUTION[kind]
    batch = tf.data.Dataset.from_tensors(_rows(kind, BATCH[kind])).repeat(3 * steps)
    options = tf.data.Options()
    options.autotune.enabled = False  # a thread that tunes nothing here, for whose pause the end of a `fit` may wait
    batch = batch.with_options(options)
    run = _by_hand(strategy, kind, batch) if name == "by" else _fit(name, strategy, kind, batch, execution, updates)
    run(steps)
    began, computed = time.perf_counter(), time.process_time()
    run(steps)
    found = (time.perf_counter() - began) / steps, (time.process_time() - computed) / steps
    run(steps)  # one that does not talk continues while the other is measured
    return found


def _fit(name: str, strategy, kind: str, batch, execution: int, updates: bool):
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
        if not updates:
            optimizer = type("NoUpdate", (keras.optimizers.SGD,), {"update_step": lambda *_: None})()
        model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=execution)
    if name == "raytf":
        from raytf.parallel import shards

        shards.attach(model, strategy)
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
                value = tf.reduce_sum(loss(y, model(x, training=True))) / (BATCH[kind] * replicas)
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
        # 20 is what the others of the tabular model have, too
        ways = [way for way in options.ways if not (kind == "tabular" and way.endswith(" 20"))]
        found = figures[kind] = {way: {"wall": [], "cpu": []} for way in ways}
        for _ in range(repeats):
            for way in ways:
                legacy = {"TF_USE_LEGACY_KERAS": "1"} if way.startswith("tf_keras") else {}
                variables = allocator(1) if way in RAYTF else {}
                wall, cpu = zip(
                    *common.measure_group(
                        __file__,
                        *("--once", way, kind, str(steps)),
                        workers=1 if way == "one process" else 2,
                        environment=legacy | variables,
                        together=way != APART,
                    ),
                    strict=True,
                )
                found[way]["wall"].append(max(wall))
                found[way]["cpu"].append(sum(cpu) / len(cpu))
                times = f"{1000 * max(wall):.2f} ms a step, {1000 * found[way]['cpu'][-1]:.2f} ms of CPU"
                print(f"{kind} {way}: {times}", file=sys.stderr)
        rates = {way: common.spread(1 / wall for wall in its["wall"]) for way, its in found.items()}
        best = max((rates[way][0] for way in ways if way in RAYTF and way != "raytf no-update"), default=0.0)
        for way in ways:
            median, least, most = rates[way]
            each = [f"{1000 * common.spread(found[way][which])[0]:.3g}" for which in ("wall", "cpu")]
            rows.append([kind, way, median, f"{least:.1f} to {most:.1f}", *each, f"{best / median:.2f}x"])
    sizes = ", ".join(f"{size} ({kind})" for kind, size in BATCH.items())
    title = f"Step: rows of a worker {sizes}, median of {repeats}"
    head = ["model", "way", "steps/s", "spread", "ms a step", "ms of CPU", "raytf's best against it"]
    common.finish(options, "step", common.table(title, head, rows), figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
