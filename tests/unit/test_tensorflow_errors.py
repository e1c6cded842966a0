"""A Python function that TensorFlow calls raises, and its own error is reported. No Ray."""

import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.errors import ConfigError, one_line
from raytf.parallel import trainer
from raytf.runtime.failures import is_consequence

RULE = ConfigError("A column must hold no nulls", "1 null(s) of 'y', double", "Use raytf.Column('y', fill=...)")


def generated():
    yield 1.0
    try:
        raise KeyError("within")
    except KeyError:
        raise RULE from None


def from_generator():
    return tf.data.Dataset.from_generator(generated, output_signature=tf.TensorSpec((), "float32"))


def fails(*_):
    raise KeyError("nope")


def in_a_graph(dataset):
    @tf.function
    def sum_of(iterator):
        return next(iterator) + next(iterator)

    return sum_of(iter(dataset))


CALLS = {
    "eagerly": (lambda: list(from_generator()), f"ConfigError: {RULE}"),
    "ahead": (lambda: list(from_generator().map(tf.negative).prefetch(2)), f"ConfigError: {RULE}"),
    "in a graph": (lambda: in_a_graph(from_generator()), f"ConfigError: {RULE}"),
    "py_function": (lambda: tf.py_function(fails, [1], tf.float32), "KeyError: 'nope'"),
    "numpy_function in a map": (
        lambda: list(tf.data.Dataset.range(3).map(lambda x: tf.numpy_function(fails, [x], tf.float32))),
        "KeyError: 'nope'",
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_the_cause_is_pythons_own(how):
    call, line = CALLS[how]
    with pytest.raises(tf.errors.OpError) as caught:
        call()
    found, place, number = one_line(caught.value).rpartition(" (test_tensorflow_errors.py, line ")
    assert found == line and place and int(number.removesuffix(")")) < 32, (found, number)
    assert not is_consequence(caught.value)


def test_an_error_of_tensorflows_own_is_its_own():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.zeros(3), [2, 2])
    line = one_line(caught.value)
    assert line.startswith("InvalidArgumentError: Input to reshape is a tensor with 3 values") and "Reshape" in line
    assert one_line(ValueError("a\nTraceback (most recent call last):\n  File x\nKeyError: b")) == "ValueError: a"


class _Cubed(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x / 0.0, "cubes of zero")


# Each with what the error of a step must say, at its begin.
STEPS = {
    "label": ((), 74, "Received a label value of 74 which is outside the valid range of [0, 3)"),
    "layer": ((_Cubed(name="cubed"),), 0, "cubes of zero : Tensor had NaN values"),
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_an_error_of_a_step_begins_with_its_cause(kind, eagerly):
    """Operation and step with it; the whole text follows, and what it was pickles."""
    trainer.install()
    between, label, message = STEPS[kind]
    model = keras.Sequential([keras.Input((6,)), *between, keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", run_eagerly=eagerly)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit(np.zeros((8, 6), "float32"), np.full(8, label), batch_size=4, verbose=0)
    line = one_line(caught.value)
    assert line.startswith(f"InvalidArgumentError: {message}") and ", in step " in line and "(operation " in line
    assert "CheckNumerics" in line if kind == "layer" else "SparseSoftmaxCrossEntropyWithLogits" in line
    again = pickle.loads(pickle.dumps(caught.value))
    assert one_line(again) == line and "The whole text of TensorFlow: " in str(again)
    assert not is_consequence(caught.value)


def test_python_error_in_a_step_contains_its_own_type_and_the_step():
    trainer.install()

    def fails(x):
        raise KeyError("nope")

    rows = tf.data.Dataset.range(4).batch(2)
    rows = rows.map(lambda x: (tf.numpy_function(fails, [x], tf.float32), tf.zeros([2])))
    rows = rows.map(lambda x, y: (tf.ensure_shape(x, [2, 6]), y))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(rows, verbose=0)
    assert one_line(caught.value).startswith("KeyError: 'nope' (test_tensorflow_errors.py, line ")
    assert ", in step " in one_line(caught.value)
