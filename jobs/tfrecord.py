"""Train a CNN on TFRecord files of encoded images, on several Ray workers.

python jobs/tfrecord.py --num-workers 2

The images are digits.csv.gz: 1797 scans of 8x8 pixels (E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import os

from ray.train import RunConfig, ScalingConfig

import raytf

DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.csv.gz")


def write_records(folder: str) -> None:
    """Writes the digits as PNG files to compressed records below train/ and validation/: a fifth validates."""
    import numpy as np
    import tensorflow as tf

    pixels, labels = np.split(np.loadtxt(DIGITS, delimiter=","), [64], axis=1)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = len(order) // 5
    for name, rows in {"train": order[cut:], "validation": order[:cut]}.items():
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        for part, some in enumerate(np.array_split(rows, 4)):
            with tf.io.TFRecordWriter(f"{folder}/{name}/{part}.tfrecord.gz", "GZIP") as writer:
                for row in some:
                    png = tf.io.encode_png((pixels[row].reshape(8, 8, 1) * 15).astype("uint8")).numpy()
                    feature = {
                        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
                        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(labels[row, 0])])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=feature))
                    writer.write(example.SerializeToString())


def build_model(config):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 240),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(config["learning_rate"]), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="rows of the global batch")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--storage", default="runs", help="folder for data and results that all hosts share")
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that everything works")
    options = parser.parse_args(arguments)
    storage = os.path.abspath(options.storage)
    folder = f"{storage}/digits-images"
    write_records(folder)
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
        },
        datasets={name: raytf.read_tfrecords(f"{folder}/{name}/*.gz") for name in ("train", "validation")},
        features=raytf.Column("image", image=(8, 8, 1)),
        labels="label",
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=storage),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
