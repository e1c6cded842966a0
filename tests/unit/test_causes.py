"""A Python function that TensorFlow calls raises, and its own error is what is said. No Ray."""

import pytest
import tensorflow as tf

from raytf.errors import ConfigError, in_a_line
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
    assert in_a_line(caught.value) == line
    assert not is_consequence(caught.value)


def test_an_error_of_tensorflows_own_is_its_own():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.zeros(3), [2, 2])
    assert in_a_line(caught.value).startswith("InvalidArgumentError: {{function_node")
    assert in_a_line(ValueError("a\nTraceback (most recent call last):\n  File x\nKeyError: b")) == "ValueError: a"
