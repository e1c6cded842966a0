"""Labels that a loss cannot take are refused before any worker starts, and no others."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.errors import ConfigError
from raytf.worker import labels
from raytf.worker.fit import build_from_data


def model_of(loss, outputs=3, weighted=False):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(outputs, "softmax")])
    model.compile("adam", loss)
    return model


def spec_of(dtype, shape=()):
    return tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, *shape), dtype)


def check(model, values, weighted=False):
    values = np.asarray(values)
    spec = spec_of(tf.as_dtype(values.dtype), values.shape[1:])
    dataset = tf.data.Dataset.from_tensors((np.zeros((len(values), 4), "float32"), values))
    build_from_data(model, dataset)
    labels.check_values(model, spec, values, weighted)


REFUSED = {
    "class_74": ("sparse_categorical_crossentropy", [0, 74], "from 0 to 2.*a label of 74.*75 outputs"),
    "from_one": (keras.losses.SparseCategoricalCrossentropy(), [1, 2, 3], "a label of 3.*Number the classes from 0"),
    "negative": ("sparse_categorical_crossentropy", [0, -1], "a label of -1"),
    "shares": ("sparse_categorical_crossentropy", [0.0, 0.7], "whole numbers.*a label of 0.7.*mse"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_loss_cannot_take_is_refused(kind):
    loss, values, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        check(model_of(loss), values)


def test_binary_labels_are_shares_unless_rows_may_count_for_nothing():
    with pytest.raises(ConfigError, match="from 0 to 1.*a label of 2"):
        check(model_of("binary_crossentropy", 1), [[0.0], [2.0]])
    check(model_of("binary_crossentropy", 1), [[0.0], [0.5]])
    check(model_of("binary_crossentropy", 1), [[0.0], [-1.0]], weighted=True)


def test_what_fits_is_taken():
    check(model_of("sparse_categorical_crossentropy"), [0, 1, 2])
    check(model_of("sparse_categorical_crossentropy"), [0.0, 1.0, 2.0])
    check(model_of(keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)), [0, -1, 2])
    check(model_of("mse", 1), [[74.5], [-3.0]])
    check(model_of(lambda y_true, y_pred: keras.ops.mean(y_pred)), [74, -3])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-3, 6), min_size=1, max_size=8))
def test_classes_are_refused_where_tensorflow_would_fail(values):
    model = _shared[0] if _shared else model_of("sparse_categorical_crossentropy")
    _shared[:] = [model]
    outside = any(value < 0 or value >= 3 for value in values)
    try:
        check(model, values)
        refused = False
    except ConfigError:
        refused = True
    assert refused == outside


_shared: list = []


def test_several_outputs_each_have_their_own_labels():
    inputs = keras.Input((4,))
    outputs = {"a": keras.layers.Dense(3, name="a")(inputs), "b": keras.layers.Dense(2, name="b")(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("adam", {"a": "sparse_categorical_crossentropy", "b": "sparse_categorical_crossentropy"})
    rows = {"a": np.array([0, 2]), "b": np.array([1, 2])}
    dataset = tf.data.Dataset.from_tensors((np.zeros((2, 4), "float32"), rows))
    build_from_data(model, dataset)
    with pytest.raises(ConfigError, match="from 0 to 1, as the model has 2 outputs; received: a label of 2"):
        labels.check_values(model, dataset.element_spec, rows)
    rows["b"][1] = 0
    labels.check_values(model, dataset.element_spec, rows)


def test_strings_are_refused_unless_the_model_takes_them_itself():
    with pytest.raises(ConfigError, match="strings.*StringLookup"):
        labels.check_kind(model_of("sparse_categorical_crossentropy"), spec_of(tf.string))
    labels.check_kind(model_of("sparse_categorical_crossentropy"), spec_of(tf.int64))
    labels.check_kind(model_of(lambda y_true, y_pred: keras.ops.mean(y_pred)), spec_of(tf.string))
    own = type("Own", (keras.Model,), {"train_step": lambda self, data: {}, "call": lambda self, x: x})()
    own.compile("adam", "mse")
    labels.check_kind(own, spec_of(tf.string))
