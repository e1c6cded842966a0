"""Arrays that Python functions give to TensorFlow (generators, `PyDataset`, `tf.numpy_function`) stay as they are.

TensorFlow takes an array without a copy where its memory begins at a multiple of 64 bytes, as a quarter of small arrays
do, and each page of a file that is mapped. And an operation that has the last reference to a tensor may write its
result into the tensor's memory (TensorFlow 2.20 and 2.21): under several replicas the labels of a generator that gives
parts of an array were overwritten in that array, for all epochs to come. Such arrays are copied first.
"""

from __future__ import annotations

import numpy as np

from raytf.collectives.exchange import ALIGNED
from raytf.compat.patching import patch
from raytf.compat.tensorflow import FuncRegistry, gives_memory, registered


@patch((FuncRegistry, "insert"))
def insert(original, self, func):
    """Which functions are raytf's own, whose memory is for TensorFlow alone, is known when they are made known."""
    registered(func)
    return original(self, func)


@patch((FuncRegistry, "__call__"))
def call(original, self, token, device, args):
    """TensorFlow gets memory of its own from a Python function, and not that of the user's arrays."""
    given = original(self, token, device, args)
    if gives_memory(self.get(token)):
        return given
    return [_own(value) for value in given] if isinstance(given, list) else _own(given)


def _own(value):
    """A value, or a copy of an array that TensorFlow would take as it is; what is not aligned it copies itself."""
    taken = isinstance(value, np.ndarray) and value.dtype != object and value.ctypes.data % ALIGNED == 0
    return value.copy() if taken else value
