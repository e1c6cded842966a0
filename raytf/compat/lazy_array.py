"""Arrays that are made while they are copied into a checkpoint. Imports only numpy, for the process that writes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


class LazyArray:
    """An array of a checkpoint that is made while it is copied: `numpy.asarray` of it makes it.

    Args:
        shape: Its shape.
        dtype: Its numpy dtype.
        make: Function that returns it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]):
        self.shape, self.dtype, self._make = shape, dtype, make
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self._make()
