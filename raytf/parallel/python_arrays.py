"""Protects arrays that Python functions return to TensorFlow (generators, `PyDataset`, `tf.numpy_function`).

TensorFlow uses an array without a copy if its address is a multiple of 64 bytes. This holds for a quarter of small
arrays and all pages of mapped files. An operation with the last reference to a tensor may overwrite the tensor's memory
(TensorFlow 2.20 and 2.21). With several replicas, a generator's label array was overwritten so, for all later epochs.
Such arrays are copied first.
"""

from __future__ import annotations

import numpy as np

from raytf.collectives.exchange import ALIGNED
from raytf.compat.patching import patch
from raytf.compat.tensorflow import FuncRegistry, registered, releases_function


@patch((FuncRegistry, "insert"))
def insert(original, self, func):
    """Records which functions are raytf's own, whose memory only TensorFlow uses, when they are registered."""
    registered(func)
    return original(self, func)


@patch((FuncRegistry, "__call__"))
def call(original, self, token, device, args):
    """Returns to TensorFlow copies of the arrays of a user's Python function, and those of raytf's own as they are."""
    function = self.get(token)
    if releases_function(function):
        given = function(*args)
        return [np.asarray(value, order="C") for value in given] if isinstance(given, list) else np.asarray(given)
    given = original(self, token, device, args)
    return [_copy_if_aliased(value) for value in given] if isinstance(given, list) else _copy_if_aliased(given)


def _copy_if_aliased(value):
    """Returns a value, or a copy of an array that TensorFlow would use in place; it copies unaligned arrays itself."""
    taken = isinstance(value, np.ndarray) and value.dtype != object and value.ctypes.data % ALIGNED == 0
    return value.copy() if taken else value
