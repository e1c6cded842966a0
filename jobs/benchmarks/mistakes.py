"""Seconds until a mistake is reported, from the start of the command, where no Ray runs.

python jobs/benchmarks/mistakes.py            # `raytf train` against a script with Ray's TensorflowTrainer (tf_keras)
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import common

MODULE = """
def build_model(config):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", config["loss"])
    return model
"""
# Arguments of both ways, and those of each mistake, which replace them.
RIGHT = {"data": "data", "features": "a,b", "loss": "mse"}
MISTAKES = {
    "a folder that is not there": {"data": "dtaa"},
    "a column that is not there": {"features": "a,c"},
    "a loss that Keras does not have": {"loss": "msee"},
}
_LONGEST_SECONDS = 600


def _raytf(values: dict[str, str]) -> list[str]:
    options = ["--data", values["data"], "--features", values["features"], "--set", f"loss={values['loss']}"]
    command = [sys.executable, "-m", "raytf.cli", "train", "mymodels:build_model", "--labels", "y"]
    return [*command, "--num-workers", "2", "--storage", os.path.abspath("runs"), *options]


def _ray(values: dict[str, str]) -> list[str]:
    return [sys.executable, str(pathlib.Path(__file__).resolve()), "--ray", *(values[name] for name in RIGHT)]


WAYS = {"raytf train": _raytf, "Ray TensorflowTrainer": _ray}


def train_with_ray(data: str, features: str, loss: str) -> None:
    """What a script for Ray's own trainer does, as its guide has it."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    def loop(config):
        import ray.train
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", config["loss"])
        rows = ray.train.get_dataset_shard("train").to_tf(config["features"], "y", batch_size=16)
        model.fit(rows.map(lambda x, y: (tf.stack([tf.cast(v, tf.float32) for v in x.values()], 1), y)), verbose=0)

    legacy = {"env_vars": {"TF_USE_LEGACY_KERAS": "1"}}
    TensorflowTrainer(
        loop,
        train_loop_config={"features": features.split(","), "loss": loss},
        datasets={"train": ray.data.read_parquet(os.path.abspath(data))},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("runs"), worker_runtime_env=legacy),
    ).fit()


def once(way: str, mistake: str) -> dict:
    """Seconds until the command of a way has ended with an error, and the lines that it printed."""
    with tempfile.TemporaryDirectory(prefix="raytf_mistakes_") as folder:
        _prepare(pathlib.Path(folder))
        paths = (str(pathlib.Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))
        variables = {"CUDA_VISIBLE_DEVICES": "-1", "RAY_ADDRESS": "local"}
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        began = time.monotonic()
        done = subprocess.run(
            WAYS[way](RIGHT | MISTAKES[mistake]),
            cwd=folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
        )
        seconds = time.monotonic() - began
    if not done.returncode:
        raise RuntimeError(f"{way} took {mistake} for right:\n{done.stdout[-2000:]}")
    return {"seconds": seconds, "lines": len((done.stdout + done.stderr).splitlines())}


def _prepare(folder: pathlib.Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "mymodels.py").write_text(MODULE)
    (folder / "data").mkdir()
    values = [float(i) for i in range(64)]
    pq.write_table(pa.table({"a": values, "b": values, "y": values}), folder / "data" / "part.parquet")


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    repeats = 1 if options.smoke else options.repeats
    mistakes = list(MISTAKES)[:1] if options.smoke else list(MISTAKES)
    found = {mistake: {way: [] for way in WAYS} for mistake in mistakes}
    for _ in range(repeats):
        for mistake, ways in found.items():
            for way, figures in ways.items():
                figures.append(once(way, mistake))
    rows = []
    for mistake, ways in found.items():
        base = common.spread(f["seconds"] for f in ways["Ray TensorflowTrainer"])[0]
        for way, figures in ways.items():
            median, least, most = common.spread(f["seconds"] for f in figures)
            lines = common.spread(f["lines"] for f in figures)[0]
            rows.append([mistake, way, median, f"{least:.2g} to {most:.2g}", base / median, lines])
    head = ["", "", "s to the error (median)", "spread", "times as fast as Ray's", "lines printed"]
    shown = common.table(
        f"Mistakes: start of the command to its error, no Ray running, {repeats} runs each", head, rows
    )
    common.finish(options, "mistakes", shown, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ray"]:
        train_with_ray(*sys.argv[2:5])
    else:
        main()
