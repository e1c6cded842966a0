"""Logs of steps that users write: where a value comes from defines what it is, and not its name."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from raytf.compat.patching import patched_of
from raytf.parallel import step_logs, trainer
from raytf.parallel.step_logs import Origin, StepTrace


class Own(keras.Model):
    """Returns its loss as a tensor, under the name of a metric that only some of these update."""

    def __init__(self, updates=False):
        super().__init__()
        self.dense, self.updates = layers.Dense(1), updates

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics if self.updates else ():
            metric.update_state(loss)
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": ops.mean(ops.square(data[1] - self(data[0])))}


def fitted(callbacks=(), **kwargs):
    trainer.install()
    keras.utils.set_random_seed(3)
    model = Own(**kwargs)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(9, 2)).astype("float32")
    y = x[:, :1]
    seen = []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(float(logs["loss"])))
    history = model.fit(
        x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(x, y), callbacks=[look]
    )
    return model, history.history, seen, (x, y)


def test_tensor_with_a_metrics_name_is_logged_as_a_tensor():
    """Keras' own epoch has the metric's value, which is zero: nobody has updated it."""
    model, history, seen, (x, y) = fitted()
    assert history["loss"] == pytest.approx([seen[2], seen[5]])
    last = float(np.mean(np.square(y[8:] - model.predict(x[8:], verbose=0))))
    assert history["val_loss"][-1] == pytest.approx(last, rel=1e-5)


def test_updated_metric_is_logged_under_its_name_as_in_keras():
    _, history, seen, _ = fitted(updates=True)
    assert history["loss"] == pytest.approx([np.mean(seen[:3]), np.mean(seen[3:])])


def test_an_evaluation_between_batches_leaves_the_logs_of_training():
    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(np.ones((2, 2)), np.zeros((2, 1)), verbose=0)

    _, history, seen, _ = fitted(callbacks=[Evaluates()])
    assert history["loss"] == pytest.approx([seen[2], seen[5]])


def test_log_names_that_come_from_metrics():
    total, other = keras.Variable(0.0), keras.Variable(0.0)
    names = {"loss": [total], "mae": [other]}
    logs = {"loss": 1.0, "mae": 2.0}
    metric = keras.metrics.Mean()
    results = StepTrace([Origin(metric), Origin(metric)])
    assert step_logs.by_metrics(results, logs, names) == {"loss", "mae"}
    assert step_logs.by_metrics(StepTrace([Origin(), Origin(metric)]), logs, names) == {"mae"}
    assert step_logs.by_metrics(StepTrace([Origin(), Origin()], frozenset([id(total)])), logs, names) == {"loss"}
    assert step_logs.by_metrics(StepTrace(), logs, names) == {"loss", "mae"}  # of a step in another process
    assert step_logs.by_metrics(results, {"loss": 1.0}, names) == set()


@pytest.mark.slow
def test_what_follows_from_a_result_is_computed_from_that_of_all_rows():
    @tf.function
    def step(local, over_all, other):
        shown = step_logs.StepObservations(step_logs.Notes())
        result = tf.identity(local)
        shown.results[id(result)] = result, Origin("metric")
        derived = tf.cond(other > 0, lambda: tf.exp(result), lambda: result) + other
        copies = {}
        found = [
            step_logs._from_results_of_all(tensor, shown, lambda origin: over_all, copies)
            for tensor in (derived, 2 * result, other + 1)
        ]
        return found

    found = step(tf.constant(1.0), tf.constant(2.0), tf.constant(3.0))
    assert [float(v) for v in found] == pytest.approx([np.exp(2) + 3, 4, 4])


def test_numbers_of_workers_are_means_over_rows():
    """A worker without rows adds nothing, whatever its placeholder gave."""
    trainer.install()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    logs = {"loss": tf.constant(3.0), "nested": {"number": 2, "text": "a", "nothing": None}, "vector": [1.0, 2.0]}
    found = step_logs.of_all_workers(strategy, logs, 4, StepTrace(), pytest.fail)
    assert found == {"loss": 3.0, "nested": {"number": 2.0, "text": "a", "nothing": None}, "vector": [1.0, 2.0]}
    with np.errstate(invalid="ignore"):
        empty = step_logs.of_all_workers(strategy, {"loss": np.nan}, 0, StepTrace(), pytest.fail)
    assert np.isnan(empty["loss"])  # of nobody's rows there is no mean


def test_a_method_of_one_object_is_replaced_for_a_while_and_by_threads_together():
    class Kind:
        def value(self):
            return 1

    one, other = Kind(), Kind()
    more = lambda original: original() + 1
    with pytest.raises(ZeroDivisionError), patched_of(one, "value", more):
        with patched_of(one, "value", more):
            assert (one.value(), other.value()) == (2, 1)
        assert one.value() == 2
        raise ZeroDivisionError
    assert "value" not in vars(one) and one.value() == 1
    one.value = lambda: 5
    with patched_of(one, "value", more):
        assert one.value() == 6
    assert one.value() == 5
