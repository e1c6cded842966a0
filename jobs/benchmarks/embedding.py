"""Time of a step with large tables: Keras' updates, and `sparse_updates="lazy"`. One thread each, all ways in turn.

python jobs/benchmarks/embedding.py

"table N" is a table of N rows of 32 numbers, of which a worker's batch uses 10,000, with a dense layer. "wide and deep"
has 26 columns, each with a table of 100,000 rows for the wide and one for the deep part, and 13 numbers. All are
trained by Adam.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import common

MODELS = ("table 200000", "table 2000000", "wide and deep")
WAYS = ("keras", "lazy")
STEPS = 20
COLUMNS, NUMBERS, CATEGORIES = 26, 13, 100_000
ROWS, IDS = 1000, 10


def _model(keras, kind: str):
    layers = keras.layers
    if kind.startswith("table"):
        ids = keras.Input((IDS,), dtype="int32")
        outputs = layers.Dense(1)(layers.Flatten()(layers.Embedding(int(kind.split()[1]), 32)(ids)))
        return keras.Model(ids, outputs)
    ids, numbers = keras.Input((COLUMNS,), dtype="int32"), keras.Input((NUMBERS,))
    columns = [ids[:, i] for i in range(COLUMNS)]
    wide = [layers.Embedding(CATEGORIES, 1)(column) for column in columns]
    deep = layers.concatenate([numbers, *(layers.Embedding(CATEGORIES, 16)(column) for column in columns)])
    for units in (256, 128):
        deep = layers.Dense(units, activation="relu")(deep)
    return keras.Model([ids, numbers], layers.add([*wide, layers.Dense(1)(deep)]))


def _batches(tf, kind: str):
    """Batches of which each uses other rows."""
    import numpy as np

    draw = np.random.default_rng(0)
    size, width = (int(kind.split()[1]), IDS) if kind.startswith("table") else (CATEGORIES, COLUMNS)
    ids = draw.integers(0, size, (STEPS, ROWS, width), np.int32)
    x = ids if kind.startswith("table") else (ids, draw.normal(size=(STEPS, ROWS, NUMBERS)).astype("float32"))
    return tf.data.Dataset.from_tensor_slices((x, draw.normal(size=(STEPS, ROWS, 1)).astype("float32")))


def once(way: str, kind: str) -> None:
    """One way in this process, which may be one of a group; gives wall and CPU seconds of a step."""
    from raytf.collectives import ring_token
    from raytf.runtime.settings import TensorflowConfig, WorkerSetup
    from raytf.worker import context

    ring_token.keep_token(bytes(ring_token.TOKEN_BYTES))  # processes of this benchmark alone
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    config = TensorflowConfig(sparse_updates="lazy" if way == "lazy" else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(context.prepared(WorkerSetup(config=config)))
        import keras

        from raytf.data import worker_part

        many = "TF_CONFIG" in os.environ
        strategy = tf.distribute.MultiWorkerMirroredStrategy() if many else tf.distribute.get_strategy()
        with strategy.scope():
            model = _model(keras, kind)
            model.compile(keras.optimizers.Adam(), "mse")
        data = _batches(tf, kind)
        data = worker_part.mark_worker_part(data) if many else data
        model.fit(data, epochs=1, verbose=0)
        began, computed = time.perf_counter(), time.process_time()
        model.fit(data, epochs=1, verbose=0)
        common.give(((time.perf_counter() - began) / STEPS, (time.process_time() - computed) / STEPS))


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args(arguments)
    models = [model for model in options.models if not options.smoke or model == MODELS[0]]
    figures, rows = {}, []
    for workers in options.workers:
        for kind in models:
            found = {way: [] for way in WAYS}
            for _ in range(1 if options.smoke else options.repeats):
                for way in WAYS:
                    answers = common.measure_group(__file__, "--once", way, kind, workers=workers)
                    found[way].append([max(wall for wall, _ in answers), sum(cpu for _, cpu in answers) / workers])
            figures[f"{kind}, {workers}"] = found
            for way in WAYS:
                wall, cpu = ([1000 * its[i] for its in found[way]] for i in (0, 1))
                median, least, most = common.spread(wall)
                rows.append([kind, workers, way, median, f"{least:.3g} to {most:.3g}", common.spread(cpu)[0]])
    head = ["model", "workers", "way", "ms a step", "spread", "ms of CPU"]
    common.finish(options, "embedding", common.table("Tables: Adam, 1000 rows a worker", head, rows), figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:4])
    else:
        main()
