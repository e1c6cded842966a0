"""The time that steps wait for their input is counted, and nothing else is."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from raytf.worker import input_wait

STEPS, PAUSE = 8, 0.1


def fit(pause, steps_per_execution):
    """Eight steps whose input takes `pause` seconds each."""

    def rows():
        for _ in range(STEPS):
            if pause:
                time.sleep(pause)
            yield np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    spec = (tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1)))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec)
    with input_wait.measure_input_wait() as waited:
        model.fit(dataset.apply(tf.data.experimental.assert_cardinality(STEPS)), verbose=0)
        return waited()


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_slow_input_is_seen(steps_per_execution):
    before = OwnedIterator._next_internal
    slow, quick = fit(PAUSE, steps_per_execution), fit(0, steps_per_execution)
    assert slow > 0.8 * STEPS * PAUSE and quick < slow / 2
    assert OwnedIterator._next_internal is before
