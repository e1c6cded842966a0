"""Refuses metrics that keep their state in Python or in variables of TensorFlow, which nobody sums over workers."""

from __future__ import annotations

from raytf.compat import keras_objects
from raytf.errors import ConfigError, definition_line


def check(model) -> None:
    """Raises ConfigError for a metric of the user's without variables of Keras that keeps values in attributes.

    A metric may create its variables in its first update, so a model is checked after its build.
    """
    import keras

    known = set(vars(keras.metrics.Metric(name="any")))
    for metric in keras_objects.metrics_of(model):
        kind = type(metric)
        if kind.update_state.__module__.startswith("keras.") or metric.variables:
            continue
        attributes = [name for name, value in vars(metric).items() if name not in known and _is_state(value)]
        if attributes:
            names = ", ".join(f"self.{name}" for name in attributes)
            raise ConfigError(
                "A metric keeps its state in its variables, which are summed over workers and kept in checkpoints",
                f"the metric {metric.name!r} ({definition_line(kind)}), which has {names} and no variables",
                "Create them in its __init__: self.total = self.add_variable((), 'zeros', name='total'). Or pass a "
                "function (y_true, y_pred), or compute it from model.predict in a callback",
            )


def _is_state(value) -> bool:
    import numpy as np
    import tensorflow as tf

    return isinstance(value, (list, dict, set, int, float, np.ndarray, tf.Variable)) and not isinstance(value, bool)
