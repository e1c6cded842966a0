"""Metrics whose state nobody can sum are refused with their line; those that need values to be built are built."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.errors import ConfigError
from raytf.parallel import model_optimizers


class InList(keras.metrics.Metric):
    def __init__(self, name="in_list"):
        super().__init__(name=name)
        self.values = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.append(float(np.mean(np.abs(np.asarray(y_true) - np.asarray(y_pred)))))

    def result(self):
        return sum(self.values) / max(1, len(self.values))

    def reset_state(self):
        self.values = []


class InTensorFlow(InList):
    def __init__(self):
        super().__init__("in_tensorflow")
        self.kept = tf.Variable(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.values.assign_add(tf.reduce_mean(y_pred))

    def result(self):
        return self.values.value()

    def reset_state(self):
        self.values.assign(0.0)


class WithNumPy(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="with_numpy")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign_add(np.full(self.most.shape, np.max(y_pred.numpy())))

    def result(self):
        return self.most + 0.0


class Late(WithNumPy):
    """Makes its variable in its first update."""

    def __init__(self):
        keras.metrics.Metric.__init__(self, name="with_numpy")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if not hasattr(self, "most"):
            self.most = self.add_variable(y_pred.numpy().shape[1:], "zeros", name="most")
        super().update_state(y_true, y_pred)


def built(metric, run_eagerly, wrapped=False):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    metrics = {"dense": [metric]} if wrapped else [metric]
    model.compile("sgd", "mse", metrics=metrics, run_eagerly=run_eagerly)
    model_optimizers.build(model, (tf.zeros((2, 2)), tf.zeros((2, 1))))
    return model


@pytest.mark.parametrize(("make", "eagerly"), [(InList, True), (InList, False), (InTensorFlow, True)])
def test_state_in_attributes_is_refused(make, eagerly):
    with pytest.raises(ConfigError, match=r"\(test_metric_state.py, line \d+\), which has self.values.* and no vari"):
        built(make(), eagerly, wrapped=eagerly)


@pytest.mark.parametrize("make", [WithNumPy, Late])
def test_a_metric_that_needs_values_is_built_with_them(make):
    metric = make()
    model = built(metric, run_eagerly=True)
    assert model.built and metric.variables and not np.any(metric.result())
    history = model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, epochs=1)
    assert "with_numpy" in history.history
