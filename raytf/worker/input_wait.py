"""How long training steps wait for their input: measured in the step's own graph, around the call for a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf.compat.patching import patched, replacing
from raytf.compat.tensorflow import OwnedIterator

# Behind both `next(iterator)` and `iterator.get_next()`; and what several steps an execution use.
_CALLS = ("_next_internal", "get_next_as_optional")


@contextlib.contextmanager
def measure_input_wait() -> Iterator[Callable[[], float]]:
    """Steps that are traced inside add up the seconds that they wait; gives what reads them.

    TensorFlow offers no hook here, so that the iterator's own methods are replaced meanwhile. It costs two clock
    readings and an addition a step, and nothing outside of traced functions.
    """
    waited = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="raytf_waited")

    def timed(original, self):
        if tf.executing_eagerly():
            return original(self)
        asked = tf.timestamp()
        with tf.control_dependencies([asked]):
            batch = original(self)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            waited.assign_add(tf.timestamp() - asked)
        return batch

    with contextlib.ExitStack() as replaced:
        for name in _CALLS:
            new = replacing(getattr(OwnedIterator, name), timed)
            replaced.enter_context(patched(OwnedIterator, name, new))
        yield lambda: float(waited)
