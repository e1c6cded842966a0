"""A process that trains again: what the training before it has set in Keras does not hold for the next one."""

import threading

import keras

from raytf.worker import clearing


def test_settings_are_those_of_before_and_noting_them_settles_no_dtype():
    """As a model's own `set_floatx` sets it, each time, in a training's own thread."""
    found = []

    def train():
        clearing.record_settings()
        before = keras.config.floatx()
        keras.config.set_floatx("float64")
        found.append((before, keras.config.dtype_policy().name, keras.layers.Dense(1).name))

    for _ in range(2):
        training = threading.Thread(target=train)
        training.start()
        training.join()
        clearing.clear_training()
    assert found == [("float32", "float64", "dense")] * 2 and keras.config.floatx() == "float32"
