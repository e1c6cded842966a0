"""How long training steps wait for their input: measured in the step's own graph, around the call for a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

# Behind both `next(iterator)` and `iterator.get_next()`; and what several steps an execution use.
_CALLS = ("_next_internal", "get_next_as_optional")


@contextlib.contextmanager
def measure_input_wait() -> Iterator[Callable[[], float]]:
    """Steps that are traced inside add up the seconds that they wait; gives what reads them.

    TensorFlow offers no hook here, so that the iterator's own methods are replaced meanwhile. It costs two clock
    readings and an addition a step, and nothing outside of traced functions.
    """
    waited = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="raytf_waited")
    originals = {name: getattr(OwnedIterator, name) for name in _CALLS}

    def timed(original):
        @functools.wraps(original)
        def call(self):
            if tf.executing_eagerly():
                return original(self)
            asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                batch = original(self)
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                waited.assign_add(tf.timestamp() - asked)
            return batch

        return call

    for name, original in originals.items():
        setattr(OwnedIterator, name, timed(original))
    try:
        yield lambda: float(waited)
    finally:
        for name, original in originals.items():
            setattr(OwnedIterator, name, original)
