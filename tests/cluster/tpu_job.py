"""A driver on a cluster of two hosts that say that they have TPUs; TensorFlow's TPU functions are replaced.

python -m tests.cluster.tpu_job FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pyarrow as pa
import ray
import ray.data
from ray.train import RunConfig, ScalingConfig

import raytf
from tests import answers


def prepare() -> None:
    """Replaces TensorFlow's TPU functions in this process, once."""
    from tests.processes import tpu_worker

    if not hasattr(tpu_worker, "calls"):
        tpu_worker.calls = tpu_worker.replace_tpus()


class Chips:
    """Calls `prepare` in each process that gets a copy: in workers that is before they do anything."""

    def __reduce__(self):
        return prepare, ()


def build_model(config):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def callbacks(config):
    import keras

    from tests.processes import tpu_worker

    class Seen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found = {"calls": tpu_worker.calls, "steps": self.params["steps"]}
            pathlib.Path(config["folder"], f"{os.getpid()}.json").write_text(json.dumps(found))

    return [Seen()]


def main(folder: str) -> None:
    ray.init(log_to_driver=False)
    rows = 100
    table = pa.table({"a": [float(i % 7) for i in range(rows)], "b": [1.0] * rows, "y": [0.5] * rows})
    result = raytf.KerasTrainer(
        build_model,
        config={"batch_size": 16, "epochs": 3, "folder": folder, "chips": Chips()},
        datasets={"train": ray.data.from_arrow(table)},
        features=["a", "b"],
        labels="y",
        callbacks=callbacks,
        scaling_config=ScalingConfig(
            num_workers=2,
            use_tpu=True,
            topology="2x2x2",
            accelerator_type="TPU-V4",
            resources_per_worker={"TPU": 4, "CPU": 1},
        ),
        run_config=RunConfig(storage_path=folder),
        progress=False,
    ).fit()
    seen = [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")]
    weights = [w.tolist() for w in raytf.load_model(result).get_weights()]
    answers.give({"seen": seen, "epochs": len(result.metrics_dataframe), "weights": weights})


if __name__ == "__main__":
    main(sys.argv[1])
