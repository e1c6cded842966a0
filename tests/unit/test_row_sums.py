"""Losses within a `train_step` that are plainly no mean over rows are warned of, with the step's line."""

from __future__ import annotations

import warnings

import keras
import pytest
import tensorflow as tf

from raytf.parallel import observed
from raytf.parallel import step as step_module
from raytf.parallel.row_sums import RowSums


def each(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p)


def rows(values):
    return tf.cast(tf.shape(values)[0], tf.float32)


def halves(values):
    half = tf.shape(values)[0] // 2
    return tf.reduce_sum(values[:half]) + tf.reduce_sum(values[half:])


SUMS = {
    "by a constant": lambda step, y, p: tf.reduce_sum(each(y, p)) / 16,
    "of halves": lambda step, y, p: halves(each(y, p)) / 16,
    "and a mean": lambda step, y, p: tf.reduce_mean(p) - 0.01 * tf.reduce_sum(tf.square(p)),
}
PARTS = {
    "first rows": lambda step, y, p: tf.reduce_mean(each(y, p)[:8]),
    "a row": lambda step, y, p: each(y, p)[0],
    "every other one": lambda step, y, p: tf.reduce_mean(each(y, p)[::2]),
    "labels of two passes": lambda step, y, p: tf.reduce_mean(each(y[:8], p[:8])) + tf.reduce_mean(each(y[8:], p[8:])),
    "split": lambda step, y, p: tf.reduce_mean(tf.split(tf.abs(p), 2)[0]),
}
MEANS = {
    "mean": lambda step, y, p: tf.reduce_mean(each(y, p)),
    "sum by rows": lambda step, y, p: tf.reduce_sum(each(y, p)) / rows(y),
    "sum of shares": lambda step, y, p: tf.reduce_sum(each(y, p) / rows(y)),
    "columns": lambda step, y, p: tf.reduce_mean(p[:, 0]) + tf.reduce_mean(p[..., 1]),
    "sum over places": lambda step, y, p: tf.reduce_mean(tf.reduce_sum(tf.square(p), -1)),
    "of what counts": lambda step, y, p: tf.reduce_sum(each(y, p) * tf.sign(p[:, 0])) / tf.reduce_sum(p[:, 0]),
    "scaled by raytf": lambda step, y, p: tf.reduce_sum(each(y, p)) * step.upscale(tf.float32),
    "of weights": lambda step, y, p: tf.reduce_mean(each(y, p)) + tf.reduce_sum(tf.eye(4) ** 2),
    "for the tape to sum": lambda step, y, p: each(y, p),
}


class Model(keras.Model):
    def train_step(self, data):
        raise NotImplementedError


def warned(loss_of) -> list[str]:
    """Warnings of two traces of a step."""
    model = Model()

    def step(y, p):
        one = step_module.Step(tf.shape(y)[0], partial=True)
        one._global_rows.append(tf.constant(16.0, tf.float64))
        with step_module.override_state(step=one):
            RowSums.create(model, (y, p)).check(loss_of(one, y, p))
        return p

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            specs = tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, 4), tf.float32)
            tf.function(step, autograph=False).get_concrete_function(*specs)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", [*SUMS, *PARTS])
def test_what_is_no_mean_over_rows_is_named_once(name):
    (text,) = warned((SUMS | PARTS)[name])
    assert "train_step (test_row_sums.py, line " in text
    assert ("is a sum over rows" if name in SUMS else "takes rows by their position") in text


NUMBERS = {
    "steps": lambda y, p: 1.0,
    "mean": lambda y, p: keras.losses.MeanSquaredError()(y, p),
    "norm": lambda y, p: tf.linalg.global_norm([tf.reduce_mean(p, 0)]),
}
SUMMABLE = {
    "sum": lambda y, p: keras.ops.sum(p) * 0.5,
    "rows": lambda y, p: tf.cast(tf.shape(p)[0], tf.float32),
    "values of rows": lambda y, p: p[:, 0],
}


@pytest.mark.parametrize("name", [*NUMBERS, *SUMMABLE])
def test_a_number_that_each_worker_adds_to_a_metric_is_warned_of_once(name, monkeypatch):
    value_of = (NUMBERS | SUMMABLE)[name]

    class Counting(Model):
        def __init__(self):
            super().__init__()
            self.counted = keras.metrics.Sum(name="counted")

        def train_step(self, data):
            self.counted.update_state(value_of(*data))
            return {}

    model = Counting()
    monkeypatch.setattr(observed, "many_replicas", lambda strategy: True)
    observed_step = observed.step_of(model, model.train_step, training=True)

    def step(y, p):
        with step_module.override_state(step=step_module.Step(tf.shape(y)[0], partial=False)):
            observed_step((y, p))
        return p

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            specs = tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None, 4), tf.float32)
            tf.function(step, autograph=False).get_concrete_function(*specs)
    texts = [str(one.message) for one in caught]
    assert len(texts) == (name in NUMBERS) and all("'counted', a keras.metrics.Sum, gets a number" in t for t in texts)


@pytest.mark.parametrize("name", MEANS)
def test_what_may_be_a_mean_over_rows_raises_no_alarm(name):
    assert warned(MEANS[name]) == []


def test_keras_own_step_is_not_looked_at():
    with tf.Graph().as_default():
        assert RowSums.create(keras.Model(), ()) is None
    assert RowSums.create(Model(), ()) is None
