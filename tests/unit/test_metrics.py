"""Metrics under a strategy: what need not be said to other workers is not."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from raytf.compat import keras_objects
from raytf.parallel import trainer


def test_a_metric_is_set_to_zero_without_a_look_at_it(monkeypatch):
    """A look is a sum over all workers, for each of its variables."""
    trainer.install()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        metric = keras.metrics.Mean()
    strategy.run(lambda: metric.update_state([3.0, 5.0]))
    assert float(metric.result()) == 4.0
    held = keras_objects.held_by(metric.total)
    assert held.synchronization == tf.VariableSynchronization.ON_READ
    with monkeypatch.context() as patched:
        patched.setattr(type(held), "read_value", lambda self: pytest.fail("it is read"))
        with strategy.scope():
            metric.reset_state()
    assert float(metric.total.value) == float(metric.count.value) == 0.0
