"""Compares a small model's step on two devices with one device: whether raytf's patches fit a version of Keras.

Run in a separate process: it splits the CPU into two devices, before TensorFlow's first operation.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from raytf.compat import versions
from raytf.errors import UnsupportedVersionError
from raytf.parallel import trainer

_TOLERANCE = 1e-6
_ROWS = 7  # cannot be split evenly over two devices


def check() -> str | None:
    """Returns a warning for untested versions that pass, or None for tested versions.

    Raises:
        UnsupportedVersionError: A step has other results.
    """
    if not versions.untested_versions():
        return None
    trainer.install()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # the reference runs without a graph, as tracing takes most of the time
    single = _stepped(tf.distribute.get_strategy(), eagerly=True)
    two = _stepped(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    for name, value in single.items():
        if not np.allclose(value, two[name], rtol=0, atol=_TOLERANCE):
            difference = f"a step on two devices has {name} {two[name].ravel()[0]:g}, not {value.ravel()[0]:g}"
            raise versions.misfit_error(difference)
    return versions.untested_warning()


def _stepped(strategy, eagerly: bool = False) -> dict[str, np.ndarray]:
    """Returns the weights and the loss after a step of `fit`, by name."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(_ROWS, 3)).astype("float32"), random.normal(size=(_ROWS, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1, global_clipnorm=0.5), "mse", metrics=["mae"], run_eagerly=eagerly)
    history = model.fit(x, y, batch_size=_ROWS, verbose=0)
    results = {name: np.asarray(values) for name, values in history.history.items()}
    return results | {f"weight {i}": np.asarray(w) for i, w in enumerate(model.get_weights())}


def refusal() -> UnsupportedVersionError | str | None:
    """Returns the result of `check`, or its error as a value, for another process."""
    try:
        return check()
    except UnsupportedVersionError as error:
        return error
    except Exception as error:
        return versions.misfit_error(f"a step failed with {type(error).__name__}: {error}")
