"""What a training leaves in a process that is to train again: graphs, seeds, Keras' settings. On a worker."""

from __future__ import annotations

import gc
from typing import Any

from raytf.compat import legacy_keras

_noted: dict[str, Any] = {}


def note() -> None:
    """Notes Keras' settings, for `clear`: once in a process, before a user's code may have changed them."""
    if not _noted:
        _noted.update(_settings())


def clear() -> None:
    """Leaves nothing of a training behind, and gives Keras the settings that were noted."""
    import tensorflow as tf

    from raytf.compat.tensorflow import forget_custom_gradients, forget_traces

    if legacy_keras.is_on():
        from tf_keras import backend, mixed_precision

        places = (backend, mixed_precision)
    else:
        from keras import backend, config

        places = (config,)
    backend.clear_session()
    for name, value in _noted.items():
        place = next(place for place in places if hasattr(place, f"set_{name}"))
        getattr(place, f"set_{name}")(value)
    tf.config.run_functions_eagerly(False)
    forget_custom_gradients()
    forget_traces()
    gc.collect()


def _settings() -> dict[str, Any]:
    if legacy_keras.is_on():
        from tf_keras import backend, mixed_precision

        config = {name: getattr(backend, name)() for name in ("floatx", "epsilon", "image_data_format")}
        return config | {"global_policy": mixed_precision.global_policy()}
    from keras import config

    # not the dtype policy: each thread has its own, and who asks for it sets it, to what `floatx` is so far
    return {name: getattr(config, name)() for name in ("floatx", "epsilon", "image_data_format")}
