"""The meaning of `verbose` in Keras' `fit`, `evaluate` and `predict` within a train loop: only the chief prints.

The driver's progress line replaces the bar of Keras, which prints a line for each step without a terminal.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import tensorflow as tf
from keras import tree
from keras.callbacks import CallbackList

_current: dict[str, object] = {}


@contextlib.contextmanager
def limit_output(chief: bool, line: Callable | None):
    """Limits Keras' output to the chief, and TensorFlow's loggers to warnings, each logged once, for the block.

    Args:
        chief: Whether this worker is the chief.
        line: Returns a callback that shows a `fit` instead of Keras' bar; None shows nothing.
    """
    loggers = tf.get_logger(), logging.getLogger("absl")
    previous = [(logger, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        if logger.handlers:
            logger.propagate = False  # Ray Train's handler of the root logger would log it again
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    _current.update(chief=chief, line=line)
    try:
        yield
    finally:
        _current.clear()
        for logger, propagate, level in previous:
            logger.propagate = propagate
            logger.setLevel(level)


def for_fit(verbose, callbacks):
    """Returns `verbose` and `callbacks` of a `fit` for Keras.

    By default, and for a bar (1), the driver shows the chief's progress line. With 2 it shows Keras' line for each
    epoch.
    """
    if not _current:
        return verbose, callbacks
    has_line = _current["chief"] and _current["line"] is not None and verbose in ("auto", 1)
    if has_line and not isinstance(callbacks, CallbackList):  # Keras adds no bar to it either, nor steps
        callbacks = [*tree.flatten(callbacks or []), _current["line"]()]
    return (2 if _current["chief"] and verbose == 2 else 0), callbacks


def for_call(verbose):
    """Returns `verbose` of an `evaluate` or `predict` for Keras: 0 by default, otherwise the chief's last line."""
    if not _current:
        return verbose
    return 2 if _current["chief"] and verbose in (1, 2) else 0
