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


def test_what_changes_in_the_model_after_a_pull_is_pushed():
    model = built(OPTIMIZERS["an argument"])
    remote = RemoteModel(model, tf.distribute.get_strategy(), lambda shape, dtype: [2])
    remote.pull()
    kernel = model.trainable_variables[0]
    expected = np.array(kernel) + 1
    kernel.assign_add(np.ones_like(expected))
    model.optimizer.learning_rate = 0.25
    remote.push()
    kernel.assign(np.zeros_like(expected))
    model.optimizer.learning_rate = 0.5
    remote.pull()
    np.testing.assert_array_equal(kernel, expected)
    assert float(model.optimizer.learning_rate) == 0.25


class Words(keras.Model):
    """Its output may use the table of its input."""

    def __init__(self, tied):
        super().__init__()
        self.tied, self.embed, self.dense = tied, keras.layers.Embedding(6, 4), keras.layers.Dense(6)
        self.embed.build()

    def call(self, ids):
        inside = keras.ops.tanh(self.embed(ids))
        return keras.ops.matmul(inside, keras.ops.transpose(self.embed.embeddings)) if self.tied else self.dense(inside)


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", [None, lambda shape, dtype: [2]], ids=["whole", "in parts"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_the_output_uses_has_current_values_and_its_whole_gradient(tied, partitioner, monkeypatch):
    """Others are only looked up: a step does not transfer them as a whole."""
    ids, read = np.array([[0, 1], [1, 4]]), []
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        models.append(Words(tied))
        models[-1].compile(
            keras.optimizers.SGD(0.5, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        models[-1].evaluate(ids, ids, verbose=0)
    model, other = models
    remote = RemoteModel(model, tf.distribute.get_strategy(), partitioner)
    read_whole = remote._read
    monkeypatch.setattr(remote, "_read", lambda variable: read.append(variable) or read_whole(variable))
    totals = [tf.convert_to_tensor(v) for v in model.metrics_variables]
    step = tf.function(lambda: remote.train_step((ids, ids), tf.constant(0, tf.int64), totals))
    for _ in range(3):
        step()
        other.train_on_batch(ids, ids)
    assert any(variable is model.embed.embeddings for variable in read) is tied
    remote.pull()
    for left, right in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)
