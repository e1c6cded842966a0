"""A driver whose run is held in the memory of two hosts, of which that of the chief is to vanish.

python -m tests.cluster.memory_job FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import numpy as np
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests import answers
from tests.cluster import models


def callbacks(config):
    import keras

    folder, run = pathlib.Path(config["folder"]), config["run"]

    class Cut(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if run is None or models.rank() != 0:
                return
            names = sorted(name for name in os.listdir(run) if name.startswith("step_"))
            if not (folder / "victim").exists():
                if (self.epoch, batch) == (1, 5):
                    (folder / "kept").write_text(json.dumps(names))
                    (folder / "victim.new").write_text(ray.util.get_node_ip_address())
                    (folder / "victim.new").rename(folder / "victim")
                    deadline = time.monotonic() + 60
                    while not (folder / "cut").exists() and time.monotonic() < deadline:
                        time.sleep(0.05)
            elif not (folder / "there").exists():
                (folder / "there").write_text(json.dumps(names))
                (folder / "goes_on").write_text(json.dumps([self.epoch, batch]))

    return [Cut()]


def train(folder: str, name: str, breaks: bool):
    return raytf.KerasTrainer(
        models.mlp,
        config={"batch_size": 8, "epochs": 3, "folder": folder, "run": f"{folder}/{name}" if breaks else None},
        datasets={"train": models.dataset(96)},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "place": 1}),
        run_config=RunConfig(storage_path=folder, name=name, failure_config=FailureConfig(max_failures=1)),
        steps_per_execution=1,
        checkpoint_every="epoch",
        memory_every="1 step",
        tensorflow_config=raytf.TensorflowConfig(heal=False),  # a loss takes what is held
        progress=False,
    ).fit()


def main(folder: str) -> None:
    ray.init(log_to_driver=False)
    quiet, broken = (train(folder, name, name == "broken") for name in ("quiet", "broken"))
    left, right = (raytf.load_model(result) for result in (quiet, broken))
    results = {name: json.loads(pathlib.Path(folder, name).read_text()) for name in ("kept", "there", "goes_on")}
    pairs = zip(
        [*left.variables, *left.optimizer.variables], [*right.variables, *right.optimizer.variables], strict=True
    )
    equal = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    answers.give({**results, "equal": equal, "epochs": list(broken.metrics_dataframe["epoch"])})


if __name__ == "__main__":
    main(sys.argv[1])
