"""Imports Keras without repeated garbage collections over TensorFlow's million objects.

Tracing and training of eight small models took 10.7 s of CPU instead of 15.0 s.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from raytf.compat import legacy_keras

# Number of new objects before the collector scans the young ones: 700 by default, and a traced step makes thousands.
_COLLECT_EVERY = 50_000


def import_keras() -> None:
    """Imports Keras faster, unless it is imported; with Keras 2, prepares that for this thread.

    Raises:
        ConfigError: Keras 2 is requested and not installed.
    """
    if legacy_keras.is_enabled():
        legacy_keras.check_installed(f"{legacy_keras.VARIABLE}=1", f" on host {os.uname().nodename}")
        # Unset in a thread that did not import Keras 2, whose second `model.save("a.keras")` then has another format.
        importlib.import_module("tf_keras.src.saving.saving_lib")._SAVING_V3_ENABLED.value = True
    elif "keras" not in sys.modules:
        with quick():
            import keras  # noqa: F401


_active = False


@contextlib.contextmanager
def quick():
    """Speeds up the first import of Keras, with TensorFlow or after it; nested calls do nothing."""
    global _active
    if _active:
        yield
        return
    collecting, _active = gc.isenabled(), True
    gc.disable()
    try:
        yield
    finally:
        _active = False
        if collecting:
            gc.enable()
    gc.freeze()  # current objects stay for the life of the process
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
