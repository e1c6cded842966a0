"""A module beside the scripts, which they import: handwritten digits as `tf.data`."""

import tensorflow as tf
from sklearn.datasets import load_digits


def dataset(batch_size, rows=1536):
    digits = load_digits()
    images, labels = (digits.images / 16).astype("float32")[..., None], digits.target
    train = tf.data.Dataset.from_tensor_slices((images[:rows], labels[:rows])).shuffle(rows).batch(batch_size)
    validation = tf.data.Dataset.from_tensor_slices((images[rows:], labels[rows:])).batch(batch_size)
    return train, validation
