"""What users do, small, with the versions that are installed: `python -m tests.compat.smoke trainer FOLDER`."""

from __future__ import annotations

import argparse
import math
import pathlib

EPOCHS = 2
ROWS = 512
# As a user writes it, for `raytf run`.
SCRIPT = """\
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(8), tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x.sum(1), batch_size=32, epochs=2, verbose=0)
print("weights", round(sum(float(tf.reduce_sum(w)) for w in model.weights), 5))
"""


def build_model(config):
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(config["learning_rate"]), "mse", metrics=["mae"])
    return model


def write_rows(folder: str) -> str:
    """Writes a Parquet file of several row groups, and gives its path."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    path = str(pathlib.Path(folder) / "rows.parquet")
    pq.write_table(pa.table({**{f"x{i}": x[:, i] for i in range(4)}, "y": x.sum(1)}), path, row_group_size=100)
    return path


def trainer(folder: str, materialize):
    """A KerasTrainer of two workers on a file of `write_rows`."""
    import ray
    from ray.train import RunConfig, ScalingConfig

    import raytf

    return raytf.KerasTrainer(
        build_model,
        config={"batch_size": 64, "epochs": EPOCHS, "learning_rate": 1e-2},
        datasets={"train": ray.data.read_parquet(write_rows(folder))},
        features=[f"x{i}" for i in range(4)],
        labels="y",
        materialize=materialize,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="smoke", storage_path=folder),
    )


def check_fit(folder: str, materialize) -> None:
    import numpy as np

    import raytf

    made = trainer(folder, materialize)
    result = made.fit()
    assert result.metrics["epoch"] == EPOCHS and math.isfinite(result.metrics["loss"]), result.metrics
    assert len(result.metrics_dataframe) == EPOCHS
    assert raytf.load_model(result).predict(np.zeros((1, 4)), verbose=0).shape == (1, 1)


def check_sweep(folder: str) -> None:
    from ray import tune

    import raytf

    space = {"learning_rate": tune.grid_search([1e-3, 1e-2])}
    grid = raytf.sweep(trainer(folder, True), space, metric="loss", mode="min")
    losses = [result.metrics["loss"] for result in grid]
    assert len(losses) == 2 and all(map(math.isfinite, losses)), losses


def check_run(folder: str) -> None:
    from click.testing import CliRunner

    from raytf.cli import main

    script = pathlib.Path(folder) / "script.py"
    script.write_text(SCRIPT)
    ran = CliRunner().invoke(main, ["run", "--num-workers", "2", str(script)])
    assert ran.exit_code == 0, ran.output
    weights = [line.split("weights", 1)[1] for line in ran.output.splitlines() if "weights" in line]
    assert len(weights) == 2 and len(set(weights)) == 1, ran.output


CHECKS = {
    "trainer": lambda folder: check_fit(folder, True),
    "stream": lambda folder: check_fit(folder, False),
    "sweep": check_sweep,
    "run": check_run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("folder")
    options = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False)
    CHECKS[options.check](options.folder)
    print("ok")


if __name__ == "__main__":
    main()
