"""Transfer learning on a folder of images in two phases: a new head on frozen layers, then all layers, slower.

python jobs/transfer.py --num-workers 2

The images are PNG files of digits.csv.gz, in a folder for each class. The backbone begins with random weights,
as this runs offline: pass --weights imagenet where there is a network, or the path of a file.
"""

from __future__ import annotations

import argparse
import os

import ray
from ray.train import RunConfig, ScalingConfig

import raytf

DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.csv.gz")
SIZE = (32, 32, 3)


def write_images(folder: str, count: int) -> None:
    """Writes digits as PNG files, "<digit>/<number>.png", below train/ and validation/; a fifth validates."""
    import numpy as np
    from PIL import Image

    for i, row in enumerate(np.loadtxt(DIGITS, delimiter=",", max_rows=count)):
        place = f"{folder}/{'train' if i % 5 else 'validation'}/{row[64]:.0f}"
        os.makedirs(place, exist_ok=True)
        image = Image.fromarray(np.uint8(row[:64].reshape(8, 8) * 15))
        image.resize(SIZE[:2]).save(f"{place}/{i:04d}.png")


def read_images(folder: str) -> ray.data.Dataset:
    """Returns the bytes of images, and labels from the names of their folders."""

    def label(batch):
        batch["label"] = [int(path.split("/")[-2]) for path in batch["path"]]
        return batch

    return ray.data.read_binary_files(folder, include_paths=True).map_batches(label, udf_modifying_row_count=False)


def build_model(config):
    import keras
    from keras import layers

    if config["tuned"]:  # all layers of the model of the first phase
        model = raytf.load_model(config["tuned"])
        model.trainable = True
    else:
        backbone = keras.applications.MobileNetV3Small(
            SIZE, weights=config["weights"], include_top=False, pooling="avg", include_preprocessing=True
        )
        backbone.trainable = False
        head = [layers.Dropout(0.2), layers.Dense(10, "softmax")]
        model = keras.Sequential([keras.Input(SIZE), backbone, *head])
    optimizer = keras.optimizers.Adam(config["learning_rate"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(options, data: str, tuned: str | None):
    """Trains one phase; `tuned` is the folder of the first one, or None for that."""
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate / (10 if tuned else 1),
            "weights": options.weights,
            "tuned": tuned,
        },
        datasets={name: read_images(f"{data}/{name}") for name in ("train", "validation")},
        features=raytf.Column("bytes", image=SIZE),
        labels="label",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=os.path.abspath(options.storage)),
    )
    return trainer.fit()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=3, help="of each phase")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the first phase; a tenth in the second")
    parser.add_argument("--weights", help='of the backbone: "imagenet", or the path of a file')
    parser.add_argument("--storage", default="runs", help="folder for data and results that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="few images and an epoch, to see that everything works")
    options = parser.parse_args(arguments)
    data = f"{os.path.abspath(options.storage)}/digit-files"
    write_images(data, 200 if options.smoke else 1797)
    head = train(options, data, None)
    result = train(options, data, head.checkpoint.path)
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
