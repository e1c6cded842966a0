"""A driver with parameter servers on several hosts, of which one is to vanish.

python -m tests.cluster.host_job FOLDER
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import ray
from ray.train import RunConfig, ScalingConfig

import raytf
from tests import answers
from tests.cluster import models


def callbacks(config):
    import keras

    from raytf.worker import context

    folder = pathlib.Path(config["folder"])

    class Cut(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch != 1:
                return
            cluster = context.servers().cluster
            hosts = {role: [address.split(":")[0] for address in cluster[role]] for role in cluster}
            alone = [host for host in hosts["worker"] if host not in hosts["chief"] + hosts["ps"]]
            assert alone, hosts
            victim = alone[0]
            (folder / "victim.new").write_text(victim)
            (folder / "victim.new").rename(folder / "victim")
            deadline = time.monotonic() + 60
            while not (folder / "cut").exists() and time.monotonic() < deadline:
                time.sleep(0.05)

        def on_train_end(self, logs=None):
            (folder / "workers").write_text(json.dumps(context.servers().cluster["worker"]))

    return [Cut()]


def main(folder: str) -> None:
    ray.init(log_to_driver=False)
    result = raytf.KerasTrainer(
        models.mlp,
        config={"batch_size": 4, "epochs": 3, "folder": folder},
        datasets={"train": models.dataset(96)},
        features=models.FEATURES,
        labels="label",
        strategy="parameter_server",
        num_ps=1,
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "place": 1}),
        run_config=RunConfig(storage_path=folder),
        progress=False,
    ).fit()
    steps = int(raytf.load_model(result).optimizer.iterations)
    workers = json.loads(pathlib.Path(folder, "workers").read_text())
    answers.give({"steps": steps, "epochs": len(result.metrics_dataframe), "workers": workers})


if __name__ == "__main__":
    main(sys.argv[1])
