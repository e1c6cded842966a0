"""Predict a folder of images with the best checkpoint of a run: one model for each actor, any number of images.

python jobs/batch_predict.py --num-actors 2
ray job submit --working-dir . -- python jobs/batch_predict.py --run /shared/runs/digits --storage /shared/runs

Without --run the CNN of jobs/digits.py is trained first. The images are PNG files of digits.csv.gz.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import ray
from ray.train import CheckpointConfig, RunConfig, ScalingConfig

import raytf
from jobs import digits


def write_images(folder: str, count: int) -> None:
    """Writes digits as PNG files, "<number>_<digit>.png", into a folder that all hosts see."""
    import numpy as np
    from PIL import Image

    os.makedirs(folder, exist_ok=True)
    for i, row in enumerate(np.loadtxt(digits.DIGITS, delimiter=",", max_rows=count)):
        image = Image.fromarray(np.uint8(row[:64].reshape(8, 8) * 15))
        image.save(f"{folder}/{i:04d}_{row[64]:.0f}.png")


def train(storage: str, epochs: int, num_workers: int):
    """Trains the CNN that predicts; returns a `ray.train.Result`."""
    data = f"{storage}/digits-data"
    digits.write_parquet(data)
    trainer = raytf.KerasTrainer(
        digits.build_model,
        config={"batch_size": 128, "epochs": epochs, "learning_rate": 2e-3},
        datasets={name: ray.data.read_parquet(f"{data}/{name}") for name in ("train", "validation")},
        features="image",
        labels="label",
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=storage, checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    return trainer.fit()


def as_trained(batch):
    """Makes images what the model was trained on: one channel, 0 to 16."""
    batch["image"] = (batch["image"] / 15).astype("float32")[..., None]
    return batch


def most_likely(batch):
    """Reduces ten probabilities to a digit, and finds the true one in the file's name."""
    true = [int(os.path.basename(path).split("_")[1][0]) for path in batch["path"]]
    return {"path": batch["path"], "digit": batch["predictions"].argmax(axis=1), "true": true}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="folder or URI of a run of jobs/digits.py; trained first if it is left out")
    parser.add_argument("--num-actors", type=int, default=2, help="processes that predict, each with its model")
    parser.add_argument("--batch-size", type=int, default=64, help="images that an actor predicts at once")
    parser.add_argument("--images", type=int, default=1797, help="of the folder")
    parser.add_argument("--storage", default="runs", help="folder for data and results; one that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="few images and epochs, to see that everything works")
    options = parser.parse_args(arguments)
    storage = os.path.abspath(options.storage)
    images, predictions = f"{storage}/digits-images", f"{storage}/digits-predictions"

    ray.init(logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    write_images(images, 200 if options.smoke else options.images)
    run = options.run or train(storage, 2 if options.smoke else 15, options.num_actors)
    found = (
        ray.data.read_images(images, mode="L", include_paths=True)
        .map_batches(as_trained)
        .map_batches(
            raytf.Predictor,
            fn_constructor_args=(run,),
            fn_constructor_kwargs={"which": "best", "keep": ["path"]},
            batch_size=options.batch_size,
            compute=ray.data.ActorPoolStrategy(size=options.num_actors),
        )
        .map_batches(most_likely)
        .materialize()
    )
    found.write_parquet(predictions, mode="overwrite")
    right = found.map_batches(lambda batch: {"right": batch["digit"] == batch["true"]}).mean("right")
    print(f"{found.count()} images, {right:.1%} right; predictions in {predictions}")
    return found


if __name__ == "__main__":
    main()
