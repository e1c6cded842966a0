"""How long training steps wait for their input: measured in the step's own graph, around the call for a batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf import activity
from raytf.compat.patching import patched, replacing
from raytf.compat.tensorflow import OwnedIterator

# Behind both `next(iterator)` and `iterator.get_next()`; and what several steps an execution use.
_CALLS = ("_next_internal", "get_next_as_optional")


@contextlib.contextmanager
def measure_input_wait() -> Iterator[Callable[[], float]]:
    """Steps that are traced inside add up the seconds that they wait; gives what reads them, between two waits.

    TensorFlow offers no hook here, so that the iterator's own methods are replaced meanwhile. It costs two clock
    readings and two additions a step, and nothing outside of traced functions. While a step waits, the time at which it
    began to is subtracted, so that `activity` sees from another thread that it does, and since when.
    """
    with tf.device("CPU:0"):  # where it is read without waiting for what a GPU computes
        waited = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="raytf_waited")
    last = [0.0]

    def timed(original, self):
        if tf.executing_eagerly():
            return original(self)
        asked = tf.timestamp()
        with tf.control_dependencies([waited.assign_sub(asked, read_value=False)]):
            batch = original(self)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            waited.assign_add(tf.timestamp(), read_value=False)
        return batch

    def read() -> float:
        seconds = float(waited)
        if seconds >= 0:
            last[0] = seconds
        return last[0]

    def pending() -> float | None:
        began = float(waited)
        return None if began >= 0 else max(0.0, time.time() + began - last[0])

    with contextlib.ExitStack() as replaced:
        for name in _CALLS:
            new = replacing(getattr(OwnedIterator, name), timed)
            replaced.enter_context(patched(OwnedIterator, name, new))
        here = activity.here
        here.pending_input, here.waited_input = pending, read
        try:
            yield read
        finally:
            here.pending_input = here.waited_input = None
