"""Scenarios of the parity tests after public examples and notebooks: steps, layers, metrics and callbacks."""

from __future__ import annotations

import math
import warnings

import keras
import tensorflow as tf
from keras import layers, ops

from tests.processes.loss_scenarios import UNEVEN, VALIDATION, branches, one_hot, rows_of
from tests.processes.scenarios import SCENARIOS, by_branch, classes, floats, scenario  # noqa: F401

BATCH = 48  # more rows than a trial of few rows has


def network(kind=keras.Model, outputs=3, activation="softmax"):
    inputs = keras.Input((6,))
    return kind(inputs, layers.Dense(outputs, activation)(layers.Dense(8, "tanh")(inputs)))


def labelled(rows=UNEVEN):
    return floats(6, rows=rows), classes(3, rows=rows)


# ------------------------------------------------------------------------------------------- steps


class AccumulatesByHand(keras.Model):
    """Adds gradients up in variables of its own, and applies their mean in each second step."""

    def build(self, shape):
        super().build(shape)
        self.sums = [self.add_weight(shape=v.shape, trainable=False, name="sum") for v in self.trainable_variables]
        for variable in self.sums:
            variable.assign(ops.zeros_like(variable))
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        self.seen.assign_add(1)
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient)
        due = tf.equal(self.seen % 2, 0)
        self.optimizer.apply([tf.where(due, s / 2, tf.zeros_like(s)) for s in self.sums], self.trainable_variables)
        for total in self.sums:
            total.assign(tf.where(due, tf.zeros_like(total), total))
        return self.compute_metrics(x, y, y_pred)


@scenario
def example_accumulation_by_hand(p):
    def build():
        model = network(AccumulatesByHand)
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return p.fit(build, labelled())[1]


class Trackers(keras.Model):
    """Has metrics of its own, which it alone lists and resets, in training and in validation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.resets = 0

    @property
    def metrics(self):
        return [self.loss_tracker, self.hits]

    def reset_metrics(self):
        self.resets += 1
        super().reset_metrics()

    def _of(self, data, training):
        x, y = data
        smooth = 0.9 * tf.one_hot(y, 3, dtype=x.dtype) + 0.1 / 3
        y_pred = self(x, training=training)
        values = -tf.reduce_sum(smooth * tf.math.log(y_pred + 1e-7), axis=-1)
        return y, y_pred, values

    def train_step(self, data):
        with tf.GradientTape() as tape:
            y, y_pred, values = self._of(data, True)
            loss = tf.reduce_mean(values * tf.pow(1 - tf.exp(-values), 2.0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.hits.update_state(y, y_pred, sample_weight=tf.cast(y > 0, y_pred.dtype))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        y, y_pred, values = self._of(data, False)
        self.loss_tracker.update_state(values)
        self.hits.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@scenario
def example_trackers_of_its_own(p):
    def build():
        model = network(Trackers)
        model.compile(keras.optimizers.Adam(0.01))
        return model

    return p.fit(build, labelled(), validation_data=p.data(labelled(VALIDATION)))[1]


class SumOfHalves(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            values = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
            half = tf.shape(values)[0] // 2
            loss = (tf.reduce_sum(values[:half]) + tf.reduce_sum(values[half:])) / 24
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@scenario
def example_sum_of_halves_is_warned_of(p):
    """Its gradient cannot be that of one process, and the step is named where several workers trace it."""

    def build():
        model = network(SumOfHalves)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p.fit(build, labelled(), epochs=1)
    named = [str(one.message) for one in caught if "is a sum over rows, and each worker" in str(one.message)]
    assert len(named) == (p.world > 1) and all("example_scenarios.py, line " in text for text in named), named
    return {}


# ------------------------------------------------------------------------------------------- layers


class ArcFace(layers.Layer):
    """Adds a margin to the angle of the right class."""

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(shapes[0][-1], 3), name="kernel")

    def call(self, inputs):
        x, y = inputs
        cosine = ops.matmul(ops.normalize(x, axis=-1), ops.normalize(self.kernel, axis=0))
        angle = ops.arccos(ops.clip(cosine, -1 + 1e-7, 1 - 1e-7))
        right = ops.one_hot(ops.cast(y[:, 0], "int32"), 3, dtype=cosine.dtype)
        return ops.softmax(8.0 * (cosine * (1 - right) + ops.cos(angle + 0.5) * right))


class Configured(layers.Layer):
    """Builds its parts from the shapes of its config."""

    def build(self, shape):
        self.width = shape[-1]
        self.inner = layers.Dense(self.width, "relu")
        self.inner.build(shape)
        self.scale = self.add_weight(shape=(self.width,), initializer="ones", name="scale")

    def get_build_config(self):
        return {"width": self.width}

    def build_from_config(self, config):
        self.build((None, config["width"]))

    def call(self, x):
        return x + self.scale * self.inner(x)


@scenario
def example_arcface(p):
    def build():
        x, y = keras.Input((6,), name="x"), keras.Input((1,), name="y")
        hidden = Configured()(layers.Dense(5, "tanh")(x))
        model = keras.Model({"x": x, "y": y}, ArcFace()((hidden, y)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    x, y = labelled()
    return p.fit(build, ({"x": x, "y": y[:, None].astype(x.dtype)}, y))[1]


class Centers(layers.Layer):
    """Center loss, whose centers follow the means of their classes."""

    def build(self, shapes):
        more = {"trainable": False, "aggregation": "mean"}
        self.centers = self.add_weight(shape=(3, shapes[0][-1]), initializer="zeros", name="centers", **more)

    def call(self, inputs, training=False):
        x, y = inputs
        chosen = ops.one_hot(ops.cast(y[:, 0], "int32"), 3, dtype=x.dtype)
        self.add_loss(0.1 * ops.mean(ops.sum(ops.square(x - ops.matmul(chosen, self.centers)), axis=-1)))
        if training:
            gap = ops.matmul(chosen, self.centers) - x
            share = ops.cast(ops.shape(x)[0], x.dtype)
            self.centers.assign(self.centers - 0.5 * ops.matmul(ops.transpose(chosen), gap) / share)
        return x


@scenario
def example_center_loss_with_state(p):
    def build():
        x, y = keras.Input((6,), name="x"), keras.Input((1,), name="y")
        hidden = Centers()((layers.Dense(5, "tanh")(x), y))
        model = keras.Model({"x": x, "y": y}, layers.Dense(3, "softmax")(hidden))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    x, y = labelled()
    model, out = p.fit(build, ({"x": x, "y": y[:, None].astype(x.dtype)}, y))
    return out | {"centers": model.non_trainable_variables[0].numpy()}


# ------------------------------------------------------------------------------- losses and metrics


def triplet(y_true, y_pred):
    """Batch-hard triplets by distances from a Gram matrix."""
    gram = tf.linalg.matmul(y_pred, y_pred, transpose_b=True)
    norms = tf.linalg.diag_part(gram)
    distances = tf.maximum(norms[:, None] - 2.0 * gram + norms[None], 0.0)
    alike = tf.linalg.matmul(y_true, y_true, transpose_b=True)
    farthest = tf.reduce_max(distances * alike, axis=1)
    nearest = tf.reduce_min(distances + 1e3 * alike, axis=1)
    return tf.reduce_mean(tf.maximum(farthest - nearest + 0.5, 0.0))


def poly(y_true, y_pred):
    right = ops.sum(y_true * y_pred, axis=-1)
    return -ops.log(right + 1e-7) + 0.5 * (1 - right)


def first_rows(y_true, y_pred):
    """A mean over the first rows of a batch alone, which are more than a worker has."""
    return ops.mean(ops.square(y_true - y_pred)[:30])


def every_other_row(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred)[::2])


def last_row(y_true, y_pred):
    return ops.sum(ops.abs(y_true - y_pred)[-1])


@scenario
def example_losses(p):
    losses = {"triplet": triplet, "poly": poly, "first_rows": first_rows, "every_other_row": every_other_row}
    metrics = {name: [first_rows, last_row] for name in losses}
    build = lambda: branches(losses, activation="softmax", metrics=metrics)
    return by_branch(p.fit(build, rows_of(losses, one_hot, rows=2 * BATCH + 17), batch=BATCH))


class Confusion(keras.metrics.Metric):
    """Gives what follows from the matrix of classes and predictions."""

    def __init__(self, name="confusion"):
        super().__init__(name=name)
        self.matrix = self.add_weight(shape=(3, 3), initializer="zeros", name="matrix")

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = tf.math.confusion_matrix(tf.reshape(y_true, [-1]), tf.argmax(y_pred, -1), 3, sample_weight)
        self.matrix.assign_add(tf.cast(found, self.matrix.dtype))

    def result(self):
        hits = tf.linalg.diag_part(self.matrix.value)
        precision = tf.math.divide_no_nan(hits, tf.reduce_sum(self.matrix, 0))
        recall = tf.math.divide_no_nan(hits, tf.reduce_sum(self.matrix, 1))
        f1 = tf.math.divide_no_nan(2 * precision * recall, precision + recall)
        return {"macro_f1": tf.reduce_mean(f1), "accuracy": tf.reduce_sum(hits) / tf.reduce_sum(self.matrix)}


@scenario
def example_confusion_matrix(p):
    def build():
        model = network()
        metrics = {"metrics": [Confusion()], "weighted_metrics": [Confusion("weighted")]}
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", **metrics)
        return model

    weights = abs(floats(seed=5, rows=UNEVEN))
    return p.fit(build, (*labelled(), weights), validation_data=p.data(labelled(VALIDATION)))[1]


@scenario
def example_dicts_of_outputs(p):
    def build():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, "tanh")(inputs)
        outputs = {"kind": layers.Dense(3, "softmax")(hidden), "size": layers.Dense(1)(hidden)}
        model = keras.Model(inputs, outputs)
        losses = {"kind": keras.losses.SparseCategoricalCrossentropy(), "size": keras.losses.Huber(reduction="sum")}
        metrics = {"kind": ["accuracy"], "size": [keras.metrics.RootMeanSquaredError(name="rmse"), last_row]}
        model.compile(keras.optimizers.SGD(0.02), losses, loss_weights={"kind": 1.0, "size": 0.3}, metrics=metrics)
        return model

    x, y = labelled()
    return p.fit(build, (x, {"kind": y, "size": floats(1, seed=9, rows=UNEVEN)}))[1]


# ---------------------------------------------------------------------------------------- callbacks


class CosineByBatch(keras.callbacks.Callback):
    """Warms the rate up and lets it fall by the cosine, by the batch, and anneals a weight of the loss."""

    def __init__(self, share):
        super().__init__()
        self.share, self.step = share, 0

    def on_train_batch_begin(self, batch, logs=None):
        warm, done = min(1.0, (self.step + 1) / 3), self.step / 10
        self.model.optimizer.learning_rate.assign(0.1 * warm * (1 + math.cos(math.pi * done)) / 2)
        self.share.assign(1.0 / (1 + self.step))
        self.step += 1


class RateFinder(keras.callbacks.Callback):
    """Raises the rate with each batch, and stops where the smoothed loss gets worse."""

    def on_train_begin(self, logs=None):
        self.rate, self.smooth, self.best = 0.01, None, math.inf

    def on_train_batch_end(self, batch, logs=None):
        self.smooth = logs["loss"] if self.smooth is None else 0.5 * self.smooth + 0.5 * logs["loss"]
        self.best = min(self.best, self.smooth)
        self.rate *= 4
        self.model.optimizer.learning_rate.assign(self.rate)
        if self.smooth > 1.5 * self.best:
            self.model.stop_training = True


@scenario
def example_rates_by_batch(p):
    def build():
        model = network()
        model.share = keras.Variable(1.0, trainable=False, name="share")
        loss = lambda y, q: keras.losses.sparse_categorical_crossentropy(y, q) * (1 + ops.cast(model.share, q.dtype))
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    class Bound(CosineByBatch):
        def __init__(self):
            super().__init__(None)

        def on_train_begin(self, logs=None):
            self.share = self.model.share

    return p.fit(build, labelled(), callbacks=[Bound()])[1]


@scenario
def example_rate_finder(p):
    def build():
        model = network()
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        return model

    model, out = p.fit(build, labelled(), epochs=4, callbacks=[RateFinder()])
    return out | {"rate": float(model.optimizer.learning_rate)}
