"""The job of test_rayjob.py, with the options of jobs/digits.py. It notes steps as `ended_job`.

It keeps each step, or with a NAME that starts with "fifth" each fifth one. NAME_stuck of the storage names a step
("1 5") that the last worker does not make before the file is gone, whatever it is asked.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import ended_job, models


def callbacks(config):
    import keras

    class Stuck(keras.callbacks.Callback):
        raytf_local_batches = True

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            stuck = pathlib.Path(f"{config['place']}_stuck")
            reached = (
                models.rank() == config["workers"] - 1
                and stuck.exists()
                and stuck.read_text() == f"{self.epoch} {batch}"
            )
            while reached and stuck.exists():
                time.sleep(0.05)

    return [*ended_job.noting(config), Stuck()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int)
    parser.add_argument("--cpus-per-worker", type=float)
    parser.add_argument("--storage")
    parser.add_argument("--name")
    parser.add_argument("--max-failures", type=int)
    options = parser.parse_args()
    ray.init(log_to_driver=False)
    result = raytf.KerasTrainer(
        models.mlp,
        config={
            "batch_size": 7,
            "epochs": 3,
            "dropout": 0.2,
            "place": f"{options.storage}/{options.name}",
            "workers": options.num_workers,
        },
        datasets={"train": models.dataset()},
        features=models.FEATURES,
        labels="label",
        callbacks=callbacks,
        scaling_config=ScalingConfig(
            num_workers=options.num_workers, resources_per_worker={"CPU": options.cpus_per_worker}
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
        checkpoint_every="5 steps" if options.name.startswith("fifth") else "1 step",
    ).fit()
    print("trained", len(result.metrics_dataframe), "epochs on", os.uname().nodename)


if __name__ == "__main__":
    main()
