"""What a model on parameter servers trains with is the user's own optimizer, with all its arguments."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.parameter_server.remote_model import RemoteModel

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 1)).astype("float32")


class Halving(keras.optimizers.SGD):
    """Has an argument that its config lacks."""

    def __init__(self, learning_rate, part=1.0, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.part = part

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.part, variable, learning_rate)


def left_out(**what):
    def make(model):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(**{name: get(model) for name, get in what.items()})
        return optimizer

    return make


def renamed(model):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.nesterov = True
    return optimizer


OPTIMIZERS = {
    "names": left_out(var_names=lambda model: ["bias", "kernel$", "^out"]),
    "variables": left_out(var_list=lambda model: model.trainable_variables[:1]),
    "an argument": lambda model: Halving(0.1, part=0.5),
    "an attribute": renamed,
}


def built(make):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(make(model), "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", [None, lambda shape, dtype: [2]], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_one_process(name, partitioner):
    model, other = built(OPTIMIZERS[name]), built(OPTIMIZERS[name])
    remote = RemoteModel(model, tf.distribute.get_strategy(), partitioner)
    totals = [tf.convert_to_tensor(v) for v in model.metrics_variables]
    step = tf.function(lambda: remote.train_step((X, Y), tf.constant(0, tf.int64), totals))
    for _ in range(3):
        step()
        other.train_on_batch(X, Y)
    remote.pull()
    for left, right in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
