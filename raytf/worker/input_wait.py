"""Measures how long training steps wait for their input, in the step's own graph, around the call for a batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf import activity
from raytf.compat.patching import patched, replacing
from raytf.compat.tensorflow import OwnedIterator

# `next(iterator)` and `iterator.get_next()` call the first; several steps per execution call the second.
_CALLS = ("_next_internal", "get_next_as_optional")


@contextlib.contextmanager
def measure_input_wait() -> Iterator[Callable[[], float]]:
    """Makes steps that are traced within it add up their wait in seconds. Yields a function that returns the sum.

    TensorFlow has no hook for this, so the context manager replaces methods of the iterator. This costs two clock
    readings and two additions a step, and nothing outside of traced functions. While a step waits, the start of the
    wait is subtracted. So `activity` can read from another thread how long it lasts.
    """
    with tf.device("CPU:0"):  # a read on the CPU does not wait for computations of a GPU
        waited = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="raytf_waited")
    last = [0.0]

    def timed(original, self):
        if tf.executing_eagerly():
            return original(self)
        started = tf.timestamp()
        with tf.control_dependencies([waited.assign_sub(started, read_value=False)]):
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
        balance = float(waited)
        return None if balance >= 0 else max(0.0, time.time() + balance - last[0])

    with contextlib.ExitStack() as replaced:
        for name in _CALLS:
            new = replacing(getattr(OwnedIterator, name), timed)
            replaced.enter_context(patched(OwnedIterator, name, new))
        activity_log = activity.tracker
        activity_log.pending_input, activity_log.waited_input = pending, read
        try:
            yield read
        finally:
            activity_log.pending_input = activity_log.waited_input = None
