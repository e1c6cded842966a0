"""A module next to the scripts, which they import: handwritten digits as `tf.data`."""

import pathlib

import numpy as np
import tensorflow as tf

DIGITS = pathlib.Path(__file__).parents[3] / "jobs" / "digits.csv.gz"


def arrays():
    pixels, labels = np.split(np.loadtxt(DIGITS, delimiter=","), [64], axis=1)
    return (pixels / 16).astype("float32"), labels[:, 0].astype("int64")


def dataset(batch_size, rows=1536):
    pixels, labels = arrays()
    images = pixels.reshape(-1, 8, 8, 1)
    train = tf.data.Dataset.from_tensor_slices((images[:rows], labels[:rows])).shuffle(rows).batch(batch_size)
    validation = tf.data.Dataset.from_tensor_slices((images[rows:], labels[rows:])).batch(batch_size)
    return train, validation
