"""Trials a minute under Ray Tune, two workers a trial, one trial at a time; all ways in turn.

python jobs/benchmarks/sweep.py

"raytf" keeps its workers warm between trials; "raytf, cold" starts processes for each (`warm=False`); "Ray
TensorflowTrainer" is Ray's own (with tf_keras, its only way), fitted in each trial as in Ray's guide. The time
between two trials is that from the end of one's last epoch to the end of the next one's first step.
"""

from __future__ import annotations

import glob
import os
import sys
import tempfile
import time

import common
import ray_guide

ROWS, WIDTH, BATCHES, EPOCHS = 2048, 32, (64, 128), 2
TRIALS = {"raytf": 8, "raytf, cold": 3, "Ray TensorflowTrainer": 3}


def _model(keras, config):
    layers = keras.layers
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(64, "relu"), layers.Dense(10, "softmax")])
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "sparse_categorical_crossentropy")
    return model


def _mark(keras, folder: str):
    """A callback of the first worker that writes down when a trial's first step and its last epoch ended."""

    class Mark(keras.callbacks.Callback):
        def _write(self, name):
            import ray.train

            if ray.train.get_context().get_world_rank() == 0:
                with open(os.path.join(folder, name), "a") as file:
                    file.write(f"{time.time()}\n")

        def on_train_begin(self, logs=None):
            self.first = True

        def on_train_batch_end(self, batch, logs=None):
            if self.first:
                self._write("first")
            self.first = False

        def on_epoch_end(self, epoch, logs=None):
            if epoch == EPOCHS - 1:
                self._write("last")

    Mark.raytf_local_batches = True
    return Mark()


def _space():
    from ray import tune

    return {"learning_rate": tune.loguniform(1e-4, 1e-2), "batch_size": tune.choice(BATCHES)}


def _raytf(folder: str, trials: int, warm: bool):
    from ray.train import RunConfig, ScalingConfig

    import raytf

    def build_model(config):
        import keras

        return _model(keras, config)

    def callbacks(config):
        import keras

        return [_mark(keras, folder)]

    trainer = raytf.KerasTrainer(
        build_model,
        config={"epochs": EPOCHS},
        datasets={"train": common.vectors(ROWS, WIDTH)},
        features="x",
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    )
    return lambda: raytf.sweep(
        trainer, _space(), num_samples=trials, max_concurrent_trials=1, warm=warm, progress=False
    )


def _ray(folder: str, trials: int):
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    def loop(config):
        import ray.train
        import tensorflow as tf
        import tf_keras

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = _model(tf_keras, config)
        dataset = ray_guide.batches(WIDTH, config["batch_size"] // 2)
        history = model.fit(dataset, epochs=EPOCHS, callbacks=[_mark(tf_keras, folder)], verbose=0)
        ray.train.report({"loss": history.history["loss"][-1]})

    dataset = common.vectors(ROWS, WIDTH)

    def trial(config):
        TensorflowTrainer(
            loop,
            train_loop_config=config,
            datasets={"train": dataset},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, worker_runtime_env={"env_vars": {"TF_USE_LEGACY_KERAS": "1"}}),
        ).fit()

    tuner = tune.Tuner(
        trial,
        param_space=_space(),
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    return tuner.fit


def once(way: str, address: str, trials: str) -> None:
    """One sweep, in a driver of its own."""
    common.connect(address)
    with tempfile.TemporaryDirectory(prefix="raytf_sweep_") as folder:
        count = int(trials)
        run = _ray(folder, count) if way.startswith("Ray") else _raytf(folder, count, warm=way == "raytf")
        began = time.time()
        run()
        ended = time.time()
        first, last = (_times(os.path.join(folder, name)) for name in ("first", "last"))
    gaps = [b - a for a, b in zip(last, first[1:], strict=False)]
    each = (first[-1] - first[0]) / (len(first) - 1)  # what one more trial costs: its training and a pause
    common.give({"whole": ended - began, "first": first[0] - began, "between": gaps, "each": each})


def _times(path: str) -> list[float]:
    return [float(line) for name in glob.glob(path) for line in open(name)]


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    found = {way: [] for way in TRIALS}
    with common.ray_cluster() as address:
        for _ in range(repeats):
            for way, trials in TRIALS.items():
                trials = min(trials, 2) if options.smoke else trials
                found[way].append(common.measure(__file__, "--once", way, address, str(trials), timeout=1200))
                print(f"{way}: {found[way][-1]}", file=sys.stderr)
    rows = []
    for way, sweeps in found.items():
        gaps = [gap for sweep in sweeps for gap in sweep["between"]]
        median, least, most = common.spread(gaps)
        first = common.spread(sweep["first"] for sweep in sweeps)[0]
        each = common.spread(sweep["each"] for sweep in sweeps)[0]
        rows.append([way, median, f"{least:.1f} to {most:.1f}", 60 / each, first])
    base = rows[-1][3]
    rows = [[*row[:4], f"{row[3] / base:.1f}x", row[4]] for row in rows]
    head = ["", "s between trials (median)", "spread", "trials a minute", "against Ray's", "s to the first step"]
    shown = common.table(f"Sweep: {EPOCHS} epochs a trial, 2 workers, {repeats} sweeps each", head, rows)
    common.finish(options, "sweep", shown, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
