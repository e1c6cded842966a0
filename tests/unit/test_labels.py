"""Labels that a loss cannot take are refused before any worker starts, and no others."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import columns
from raytf.data.stored import StoredDataset
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
    labels.check_values(model, spec, [values], weighted)


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
    with pytest.raises(ConfigError, match="labels from 0 to 0.*Use binary_crossentropy for 0 and 1"):
        check(model_of("sparse_categorical_crossentropy", 1), [0, 1])
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
        labels.check_values(model, dataset.element_spec, [rows])
    rows["b"][1] = 0
    labels.check_values(model, dataset.element_spec, [rows])


def test_outputs_in_a_list_have_labels_in_a_tuple():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(3)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("adam", ["sparse_categorical_crossentropy", "mse"])
    rows = (np.array([0, 3]), np.array([[9.0], [9.0]]))
    dataset = tf.data.Dataset.from_tensors((np.zeros((2, 4), "float32"), rows))
    build_from_data(model, dataset)
    with pytest.raises(ConfigError, match="a label of 3"):
        labels.check_values(model, dataset.element_spec, [rows])


def spec_and_model(loss, shape, *outputs):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(int(np.prod(outputs)))])
    model.add(keras.layers.Reshape(outputs))
    model.compile("adam", loss)
    spec = spec_of(tf.int64 if "categorical" in str(loss) else tf.float32, shape)
    build_from_data(model, tf.data.Dataset.from_tensors([0]).map(lambda _: tuple(map(zeros, spec))))
    return model, spec


def zeros(spec):
    return tf.zeros([2, *spec.shape[1:]], spec.dtype)


@pytest.mark.parametrize("outputs", [2, 3, 4])
def test_labels_without_the_axis_of_the_outputs_are_refused_for_any_size(outputs):
    with pytest.raises(ConfigError, match=rf"of shape \(rows,\) and outputs of shape \(rows, {outputs}\)"):
        labels.check_shapes(*spec_and_model("mse", (), outputs))


@pytest.mark.parametrize(
    ("loss", "label", "outputs"),
    [
        ("mse", (), (1,)),
        ("mse", (2,), (2,)),
        ("mse", (1,), (2,)),  # Keras compares one label with all outputs
        ("sparse_categorical_crossentropy", (), (2,)),
        ("sparse_categorical_crossentropy", (3,), (3, 2)),
        (lambda y_true, y_pred: keras.ops.mean(y_pred), (), (2,)),
    ],
)
def test_labels_of_these_shapes_are_taken(loss, label, outputs):
    labels.check_shapes(*spec_and_model(loss, label, *outputs))


@pytest.mark.parametrize(
    ("loss", "shape", "advice"),
    [
        ("sparse_categorical_crossentropy", (3,), "Use categorical_crossentropy"),
        (keras.losses.SparseCategoricalCrossentropy(), (3,), "Use categorical_crossentropy"),
        ("categorical_crossentropy", (), "Use sparse_categorical_crossentropy"),
        (keras.losses.CategoricalCrossentropy(name="mine"), (1,), "Use sparse_categorical_crossentropy"),
        ("categorical_crossentropy", (3,), None),
        ("sparse_categorical_crossentropy", (1,), None),
        ("mse", (), None),
    ],
)
def test_the_other_loss_is_advised_where_labels_have_its_form(loss, shape, advice):
    hint = labels.hint(model_of(loss), spec_of(tf.int64, shape))
    assert hint is None if advice is None else hint.startswith(advice)


def test_all_rows_are_read_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(labels, "_MOST_ROWS", 4)
    table = pa.table({"x": np.zeros(10), "a": np.arange(10), "b": np.arange(10) * 2})
    data = StoredDataset([table], [10], ["x", "a", "b"])
    parts = list(labels.of_rows(data, columns.parse("a", "labels")))
    assert [len(part) for part in parts] == [4, 4, 2] and np.concatenate(parts).tolist() == list(range(10))
    parts = list(labels.of_rows(data, columns.parse({"p": "a", "q": "b"}, "labels")))
    assert parts[2]["q"].tolist() == [16, 18]


def test_strings_are_refused_unless_the_model_takes_them_itself():
    with pytest.raises(ConfigError, match="strings.*StringLookup"):
        labels.check_kind(model_of("sparse_categorical_crossentropy"), spec_of(tf.string))
    labels.check_kind(model_of("sparse_categorical_crossentropy"), spec_of(tf.int64))
    labels.check_kind(model_of(lambda y_true, y_pred: keras.ops.mean(y_pred)), spec_of(tf.string))
    own = type("Own", (keras.Model,), {"train_step": lambda self, data: {}, "call": lambda self, x: x})()
    own.compile("adam", "mse")
    labels.check_kind(own, spec_of(tf.string))
