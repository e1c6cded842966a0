"""Parts of `raytf.fit`, `evaluate` and `predict` that need no cluster."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from ray.train import RunConfig, ScalingConfig

from raytf.fitting import arrays, calls, warm
from raytf.fitting.call import Call


def test_workers_of_calls_in_several_threads_are_kept_once(monkeypatch):
    """Those that nobody knows would hold their resources for as long as the driver lives."""
    monkeypatch.setattr(warm._IdleGroup, "_watch_group", lambda self: None)
    idle, closed = warm._IdleGroup(), []
    one, other = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("one", "other"))
    idle.put(one)
    idle.put(other)
    assert closed == ["one"] and idle.take() is other and idle.take() is None
    idle.put(one)
    monkeypatch.setattr(warm.connection, "session", lambda: "of another Ray")
    idle.put(other)
    assert closed == ["one"], "its resources have gone with its Ray"
    idle.clear()
    assert closed == ["one", "other"]


class Positive(keras.layers.Layer):
    """Keeps the columns that begin with a positive number."""

    def call(self, x):
        return tf.boolean_mask(x, x[0] > 0, axis=1)


class Decides(keras.Sequential):
    def predict_step(self, data):
        return self(data)


@pytest.mark.parametrize(
    ("kind", "layer", "steps"),
    [
        (keras.Sequential, keras.layers.Dense(1024), 4),
        (keras.Sequential, Positive(), 32),  # its size depends on the data
        (Decides, keras.layers.Dense(1), 32),
    ],
)
def test_predictions_are_sent_before_they_fill_the_memory(kind, layer, steps):
    data = arrays.check_rows(np.ones((4, 4), "float32"), None, None, None, None, None)
    model = kind([keras.Input((4,)), layer])
    row_bytes = Call(model, ScalingConfig(num_workers=1), RunConfig(), {"train": data}).build("predict")
    assert calls._chunk_steps(row_bytes * 2048) == steps
