"""What both scripts of this folder share, next to them as in the images of Kubeflow's samples: rows and a model."""

import numpy as np
import tensorflow as tf


def rows(count):
    """Images of one bright column each, which is their label."""
    labels = np.random.default_rng(0).integers(0, 10, count)
    images = np.zeros((count, 10, 10, 1), "float32")
    images[np.arange(count), :, labels] = 1
    return tf.data.Dataset.from_tensor_slices((images, labels))


def build_model(learning_rate, dropout):
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(10, 10, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(1 - dropout),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(learning_rate=learning_rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
