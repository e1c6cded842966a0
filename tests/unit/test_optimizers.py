"""SGD's update in one operation is Keras' own, to the bit."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.parallel.optimizers import sgd_update_step

KERAS = getattr(keras.optimizers.SGD.update_step, "__wrapped__", keras.optimizers.SGD.update_step)
in_one = functools.partial(sgd_update_step, KERAS)


def updated(update, dtype, weights, gradients, graph, **options):
    """Weights and momenta after the gradients, and the operations of the graph."""
    optimizer = keras.optimizers.SGD(0.017, **options)
    variable = keras.Variable(weights, dtype=dtype)
    optimizer.build([variable])

    def step(gradient):
        update(optimizer, gradient, variable.value, optimizer.learning_rate)

    run, found = step, set()
    if graph:
        run = tf.function(step, autograph=False).get_concrete_function(gradients[0])
        found = {operation.type for operation in run.graph.get_operations()}
    for gradient in gradients:
        run(gradient)
    return [np.asarray(v.value).view(np.uint8) for v in (variable, *optimizer.variables[2:])], found


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    st.integers(1, 70),
    st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.3, "nesterov": True}]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_same_bits(dtype, size, options, graph, seed):
    rng = np.random.default_rng(seed)
    drawn = [tf.cast(rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size), dtype) for _ in range(4)]
    weights, *gradients = (tf.where(tf.math.is_finite(d), d, tf.ones_like(d)) for d in drawn)
    expected, _ = updated(KERAS, dtype, weights, gradients, graph, **options)
    found, operations = updated(in_one, dtype, weights, gradients, graph, **options)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)
    if graph:
        assert operations & {"ResourceApplyKerasMomentum", "ResourceApplyGradientDescent"}
        assert not operations & {"AssignAddVariableOp", "AssignSubVariableOp"}


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_gradients_of_some_rows_are_keras_own(options):
    some = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 2]), tf.constant([4, 3]))
    weights = tf.reshape(tf.range(12.0), [4, 3])
    expected, _ = updated(KERAS, "float32", weights, [some], False, **options)
    found, _ = updated(in_one, "float32", weights, [some], False, **options)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)
