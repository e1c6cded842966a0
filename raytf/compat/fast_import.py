"""Imports Keras without repeated garbage collections over TensorFlow's million objects, and without other packages.

Tracing and training of eight small models took 10.7 s of CPU instead of 15.0 s. Keras imports scikit-learn, with much
of SciPy, and matplotlib where they are installed. The first took 1.0 s of the 5.2 s of CPU of a worker's imports.
Keras' modules that use them are imported with their first use here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import types

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


# Modules that import scikit-learn, and matplotlib.
_DEFERRED = ("keras.wrappers", "keras.visualization", "keras.src.visualization")


class _Deferred(types.ModuleType):
    """A placeholder in `sys.modules` of a module that is imported with the first use of one of its names."""

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__path__":  # what tools look up in all modules
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


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
    if "keras" not in sys.modules:
        for name in _DEFERRED:
            sys.modules.setdefault(name, _Deferred(name))
    try:
        yield
    finally:
        _active = False
        if collecting:
            gc.enable()
    gc.freeze()  # current objects stay for the life of the process
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])
