"""Imports Keras without what it imports for a few functions only, which still work: that comes when it is used.

Where they are installed, Keras imports scikit-learn (for `keras.wrappers`) and matplotlib (for `keras.visualization`):
1.9 s of the 5.7 s that `import keras` took on one core of a two-core machine, in every worker.

Python's garbage collector is kept from going through TensorFlow's million objects again and again: tracing and training
of eight small models took 10.7 s of CPU instead of 15.0.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

from raytf.compat import legacy_keras

_LATER = ("sklearn", "matplotlib")
# Objects that are made before the collector looks at the young ones: 700 by default, and a traced step makes thousands.
_COLLECT_EVERY = 50_000
_WRAPPERS = ("SKLearnClassifier", "SKLearnRegressor", "SKLearnTransformer")


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
    hidden = [name for name in _LATER if name not in sys.modules]
    # None makes an import of this name fail, as if the package were not installed
    sys.modules.update(dict.fromkeys(hidden))
    collecting, _active = gc.isenabled(), True
    gc.disable()
    try:
        yield
    finally:
        _active = False
        for name in hidden:
            del sys.modules[name]
        if collecting:
            gc.enable()
    _leave_for_later(hidden)
    gc.freeze()  # what is there now stays for as long as the process
    gc.set_threshold(_COLLECT_EVERY, *gc.get_threshold()[1:])


def _leave_for_later(hidden: list[str]) -> None:
    import keras

    if "matplotlib" in hidden:
        # what imports matplotlib: told to do so when it is used
        from keras.src.visualization import plot_bounding_box_gallery, plot_image_gallery

        for module in (plot_image_gallery, plot_bounding_box_gallery):
            for name, package in (("plt", "matplotlib.pyplot"), ("patches", "matplotlib.patches")):
                if hasattr(module, name):
                    setattr(module, name, _Later(package))
    if "sklearn" in hidden:
        for name in _WRAPPERS:
            delattr(keras.wrappers, name)
        keras.wrappers.__getattr__ = _wrapper


class _Later:
    """Stands for a module until something of it is used."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        return getattr(importlib.import_module(self._name), attribute)


def _wrapper(name: str):
    if name not in _WRAPPERS:
        raise AttributeError(f"keras.wrappers has no attribute {name!r}")
    # what imports scikit-learn: imported anew when it is used
    from keras.src.wrappers import fixes, sklearn_wrapper, utils

    if sklearn_wrapper.sklearn is None:
        for module in (fixes, utils, sklearn_wrapper):
            importlib.reload(module)
    return getattr(sklearn_wrapper, name)
