"""Search batch size and learning rate for the CNN of jobs/digits.py, trials of two workers each.

python jobs/sweep_digits.py --num-samples 12
ray job submit --working-dir . -- python jobs/sweep_digits.py --storage /shared/runs
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig

import raytf
from jobs import digits


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2, help="of each trial")
    parser.add_argument("--num-samples", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=8, help="of a trial that is not stopped before")
    parser.add_argument("--scheduler", default="asha")
    parser.add_argument(
        "--storage", default="runs", help="folder or URI for data and results; one that all hosts of a cluster share"
    )
    parser.add_argument("--smoke", action="store_true", help="three short trials, to see that everything works")
    options = parser.parse_args(arguments)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)

    ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    data = f"{storage}/digits-data"
    digits.write_parquet(data)
    trainer = raytf.KerasTrainer(
        digits.build_model,
        config={"epochs": 2 if options.smoke else options.epochs},
        datasets={name: ray.data.read_parquet(f"{data}/{name}") for name in ("train", "validation")},
        features="image",
        labels="label",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=storage),
    )
    return raytf.sweep(
        trainer,
        {"batch_size": tune.choice([64, 128, 256]), "learning_rate": tune.loguniform(1e-4, 1e-1)},
        num_samples=3 if options.smoke else options.num_samples,
        metric="val_accuracy",
        mode="max",
        scheduler=options.scheduler,
    )


if __name__ == "__main__":
    main()
