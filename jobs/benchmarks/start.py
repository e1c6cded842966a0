"""Seconds from `fit()` to the end of the first training step, two workers, Ray running.

python jobs/benchmarks/start.py            # raytf against Ray's TensorflowTrainer (with tf_keras, its only way)
python jobs/benchmarks/start.py --ways raytf "raytf, verify=False"      # what comparing two workers with one costs
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time

import common
import ray_guide

ROWS, WIDTH, BATCH = 4096, 32, 128


def _mark(keras, file: str):
    """A callback that writes down when the first step of the first worker has ended."""

    class Mark(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            import ray.train

            if batch == 0 and ray.train.get_context().get_world_rank() == 0 and not os.path.exists(file):
                with open(file, "w") as out:
                    out.write(repr(time.time()))

    Mark.raytf_local_batches = True
    return Mark()


def _raytf(file: str, folder: str, verify: str | bool = "warn"):
    from ray.train import RunConfig, ScalingConfig

    import raytf

    def build_model(config):
        import keras

        return ray_guide.model(keras, WIDTH)

    def callbacks(config):
        import keras

        return [_mark(keras, file)]

    return raytf.KerasTrainer(
        build_model,
        config={"batch_size": BATCH, "epochs": 1},
        datasets={"train": common.vectors(ROWS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
        progress=False,
        verify=verify,
    )


def _ray(file: str, folder: str):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    def loop(config):
        import tensorflow as tf
        import tf_keras

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = ray_guide.model(tf_keras, WIDTH)
        dataset = ray_guide.batches(WIDTH, BATCH // 2)
        model.fit(dataset, epochs=1, callbacks=[_mark(tf_keras, file)], verbose=0)

    return TensorflowTrainer(
        loop,
        datasets={"train": common.vectors(ROWS, WIDTH)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, worker_runtime_env={"env_vars": {"TF_USE_LEGACY_KERAS": "1"}}),
    )


WAYS = {
    "raytf": _raytf,
    "raytf, verify=False": functools.partial(_raytf, verify=False),
    "Ray TensorflowTrainer": _ray,
}


def once(way: str, address: str) -> None:
    """One measurement, in a driver of its own."""
    common.connect(address)
    with tempfile.TemporaryDirectory(prefix="raytf_start_") as folder:
        file = os.path.join(folder, "first_step")
        trainer = WAYS[way](file, folder)
        began = time.time()
        trainer.fit()
        ended = time.time()
        with open(file) as seen:
            first = float(seen.read())
    common.give({"first_step": first - began, "whole": ended - began})


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is measured; the last is 1")
    options = parser.parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    found = {way: [] for way in options.ways}
    with common.ray_cluster() as address:
        for _ in range(repeats):
            for way in options.ways:
                found[way].append(common.measure(__file__, "--once", way, address))
    rows = []
    base = common.spread(f["first_step"] for f in found[options.ways[-1]])[0]
    for way, figures in found.items():
        median, least, most = common.spread(f["first_step"] for f in figures)
        whole = common.spread(f["whole"] for f in figures)[0]
        rows.append([way, median, f"{least:.1f} to {most:.1f}", median / base, whole])
    head = ["", "s to first step (median)", "spread", f"share of {options.ways[-1]}", "s of the whole run"]
    shown = common.table(f"Start: fit() to first step, 2 workers, {repeats} runs each", head, rows)
    common.finish(options, "start", shown, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:4])
    else:
        main()
