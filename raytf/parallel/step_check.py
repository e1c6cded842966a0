"""A step of a small model on two devices of this process, against one: whether replacements fit a version of Keras.

Run in a process of its own: it divides the CPU into two devices, before TensorFlow's first operation.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from raytf.compat import versions
from raytf.errors import UnsupportedVersionError
from raytf.parallel import trainer

_TOLERANCE = 1e-6
_ROWS = 7  # uneven for two devices


def check() -> str | None:
    """A warning for versions that are not tested and fit all the same; None for versions that are tested.

    Raises:
        UnsupportedVersionError: a step has other results.
    """
    if not versions.untested():
        return None
    trainer.install()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # what is compared with needs no graph, whose making is what takes time
    one = _stepped(tf.distribute.get_strategy(), eagerly=True)
    two = _stepped(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    for name, value in one.items():
        if not np.allclose(value, two[name], rtol=0, atol=_TOLERANCE):
            where = f"a step on two devices has {name} {two[name].ravel()[0]:g}, not {value.ravel()[0]:g}"
            raise versions.misfit(where)
    return versions.warning()


def _stepped(strategy, eagerly: bool = False) -> dict[str, np.ndarray]:
    """The weights and the loss after a step of `fit`, by name."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(_ROWS, 3)).astype("float32"), random.normal(size=(_ROWS, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1, global_clipnorm=0.5), "mse", metrics=["mae"], run_eagerly=eagerly)
    history = model.fit(x, y, batch_size=_ROWS, verbose=0)
    found = {name: np.asarray(values) for name, values in history.history.items()}
    return found | {f"weight {i}": np.asarray(w) for i, w in enumerate(model.get_weights())}


def refusal() -> UnsupportedVersionError | str | None:
    """`check`, with its error as a value, for another process."""
    try:
        return check()
    except UnsupportedVersionError as error:
        return error
    except Exception as error:
        return versions.misfit(f"a step failed with {type(error).__name__}: {error}")
