"""What `verbose` of Keras' `fit`, `evaluate` and `predict` means in a train loop: it is the chief's.

The bar of Keras, a line for each step where there is no terminal, is the driver's progress line here.
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
def of(chief: bool, line: Callable | None):
    """Within it Keras shows what it is asked for on the chief alone, and TensorFlow's loggers warn once, and only warn.

    Args:
        chief: whether this worker is.
        line: gives a callback that shows a `fit` in the place of Keras' bar, or None where nothing does.
    """
    loggers = tf.get_logger(), logging.getLogger("absl")
    before = [(logger, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        if logger.handlers:
            logger.propagate = False  # Ray Train gives the root logger a handler that would say it again
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    _current.update(chief=chief, line=line)
    try:
        yield
    finally:
        _current.clear()
        for logger, propagate, level in before:
            logger.propagate = propagate
            logger.setLevel(level)


def for_fit(verbose, callbacks):
    """`verbose` and `callbacks` of a `fit` as they are for Keras.

    By default, and for a bar (1), the chief's progress line is shown at the driver; 2 is Keras' line for each epoch.
    """
    if not _current:
        return verbose, callbacks
    if _current["chief"] and _current["line"] is not None and verbose in ("auto", 1):
        line = _current["line"]()
        if isinstance(callbacks, CallbackList):
            callbacks.append(line)
        else:
            callbacks = [*tree.flatten(callbacks or []), line]
    return (2 if _current["chief"] and verbose == 2 else 0), callbacks


def for_call(verbose):
    """`verbose` of an `evaluate` or a `predict` as it is for Keras: nothing by default, else the chief's last line."""
    if not _current:
        return verbose
    return 2 if _current["chief"] and verbose in (1, 2) else 0
