"""Imports Keras, and keeps Python's garbage collector from going through TensorFlow's million objects again and again:
tracing and training of eight small models took 10.7 s of CPU instead of 15.0."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from raytf.compat import legacy_keras

# Objects that are made before the collector looks at the young ones: 700 by default, and a traced step makes thousands.
_COLLECT_EVERY = 50_000


def import_keras() -> None:
    """`import keras`, quicker; nothing if it is imported already. Where that is to be Keras 2, it, for this thread.

    Raises:
        ConfigError: it is not installed.
    """
    if legacy_keras.is_on():
        legacy_keras.check_installed(f"{legacy_keras.VARIABLE}=1", f" on host {os.uname().nodename}")
        # Unset in a thread that did not import Keras 2, whose second `model.save("a.keras")` is then of another format.
        importlib.import_module("tf_keras.src.saving.saving_lib")._SAVING_V3_ENABLED.value = True
    elif "keras" not in sys.modules:
        with quick():
            import keras  # noqa: F401


_active = False


@contextlib.contextmanager
def quick():
    """Within it the first import of Keras, with TensorFlow or after it, is quicker; nothing within another."""
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
    gc.freeze()  # what is there now stays for as long as the process
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
