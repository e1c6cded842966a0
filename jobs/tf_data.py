"""Train a CNN on TFRecord files through an unchanged tf.data pipeline, on several Ray workers.

python jobs/tf_data.py --num-workers 2

The images are digits.csv.gz: 1797 scans of 8x8 pixels (E. Alpaydin, C. Kaynak, 1998, UCI, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import functools
import os

from ray.train import CheckpointConfig, RunConfig, ScalingConfig

import raytf

DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.csv.gz")


def write_records(folder: str) -> None:
    """Writes the digits to TFRecord files below train/ and validation/: a fifth of the rows validate."""
    import numpy as np
    import tensorflow as tf

    pixels, labels = np.split(np.loadtxt(DIGITS, delimiter=","), [64], axis=1)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = len(order) // 5
    for name, rows in {"train": order[cut:], "validation": order[:cut]}.items():
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        for part, some in enumerate(np.array_split(rows, 4)):
            with tf.io.TFRecordWriter(f"{folder}/{name}/{part}.tfrecord") as writer:
                for row in some:
                    feature = {
                        "image": tf.train.Feature(float_list=tf.train.FloatList(value=pixels[row])),
                        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(labels[row, 0])])),
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=feature))
                    writer.write(example.SerializeToString())


def records(folder: str, training: bool, context):
    """Returns the pipeline; of `context` it uses only the batch size."""
    import tensorflow as tf

    features = {"image": tf.io.FixedLenFeature([8, 8, 1], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(record):
        example = tf.io.parse_single_example(record, features)
        return example["image"] / 16, example["label"]

    def augment(image, label):
        return tf.image.random_brightness(image, 0.1), label

    data = tf.data.Dataset.list_files(f"{folder}/*.tfrecord", shuffle=training)
    data = data.interleave(tf.data.TFRecordDataset, cycle_length=4).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    data = data.cache()
    if training:
        data = data.shuffle(2000).map(augment)
    return data.batch(context.batch).prefetch(tf.data.AUTOTUNE)


def build_model(config):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
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
    folder = f"{storage}/digits-records"
    write_records(folder)
    trainer = raytf.KerasTrainer(
        build_model,
        config={
            "batch_size": options.batch_size,
            "epochs": 1 if options.smoke else options.epochs,
            "learning_rate": options.learning_rate,
        },
        datasets={
            # batches that list_files and interleave give are known when they have been counted
            "train": raytf.TFData(functools.partial(records, f"{folder}/train", True)),
            "validation": raytf.TFData(functools.partial(records, f"{folder}/validation", False)),
        },
        scaling_config=ScalingConfig(num_workers=options.num_workers),
        run_config=RunConfig(storage_path=storage, checkpoint_config=CheckpointConfig(num_to_keep=2)),
    )
    result = trainer.fit()
    raytf.show_result(result)
    return result


if __name__ == "__main__":
    main()
