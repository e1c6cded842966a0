"""Resets what a training leaves in a process that trains again: graphs, seeds, settings of Keras. Runs on a worker."""

from __future__ import annotations

import gc
from typing import Any

from raytf.compat import legacy_keras

_noted: dict[str, Any] = {}


def record_settings() -> None:
    """Records Keras' settings for `clear_training`, once in a process, before the user's code can change them."""
    if not _noted:
        _noted.update(_settings())


def clear_training() -> None:
    """Clears all traces of a training, and restores the settings of Keras that `record_settings` recorded."""
    import tensorflow as tf

    from raytf.compat.tensorflow import forget_custom_gradients, forget_traces

    if legacy_keras.is_enabled():
        from tf_keras import backend, mixed_precision

        modules = (backend, mixed_precision)
    else:
        from keras import backend, config

        modules = (config,)
    backend.clear_session()
    for name, value in _noted.items():
        module = next(module for module in modules if hasattr(module, f"set_{name}"))
        getattr(module, f"set_{name}")(value)
    tf.config.run_functions_eagerly(False)
    forget_custom_gradients()
    forget_traces()
    gc.collect()


def _settings() -> dict[str, Any]:
    if legacy_keras.is_enabled():
        from tf_keras import backend, mixed_precision

        config = {name: getattr(backend, name)() for name in ("floatx", "epsilon", "image_data_format")}
        return config | {"global_policy": mixed_precision.global_policy()}
    from keras import config

    # not the dtype policy: it is per thread, and reading it sets it to the current `floatx`
    return {name: getattr(config, name)() for name in ("floatx", "epsilon", "image_data_format")}
