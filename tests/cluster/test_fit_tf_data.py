"""`raytf.fit` of a shuffled `tf.data.Dataset` that drops its remainder makes the steps that Keras makes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import raytf

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_remainder_is_dropped_in_each_epoch():
    x = np.arange(26, dtype="float32").reshape(13, 2)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(20).batch(4, drop_remainder=True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    history = raytf.fit(model, dataset, epochs=2, num_workers=2, steps_per_epoch=3, verbose=0)
    assert len(history.history["loss"]) == 2
    assert int(model.optimizer.iterations) == 2 * 3
