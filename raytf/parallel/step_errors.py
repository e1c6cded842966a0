"""Errors of TensorFlow in a step: their cause comes first, with the step in which it occurred."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf.errors import with_cause

# Errors at the end of data, or after the loss of another process: other code catches these types.
_OF_OTHERS = (
    tf.errors.OutOfRangeError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)


@contextlib.contextmanager
def cause_first(location: str | Callable[[tf.errors.OpError], str]) -> Iterator[None]:
    """Puts the cause of a TensorFlow error first, which otherwise follows some 50 lines about the graph.

    Args:
        location: Where the error occurs, as "in step 3", or a function that returns that for an error.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if isinstance(error, _OF_OTHERS):
            raise
        text = str(error)
        new_text = with_cause(text, location if isinstance(location, str) else location(error))
        if new_text == text:
            raise
        try:
            new_error = type(error)(error.node_def, error.op, new_text)
        except TypeError:  # a class with other arguments
            raise error from error.__cause__
        raise new_error.with_traceback(error.__traceback__) from error.__cause__


def progress_clause(done: int, count: int) -> str:
    """Returns the names of an execution's steps, after `done` steps since the start."""
    return f"in step {done + 1}" if count == 1 else f"in one of the steps {done + 1} to {done + count}"
