"""Prepares processes of an elastic run for its next worker group when the number of workers changes.

Ray Train ends a worker group and starts another one. A process joins the next group if its training stopped on request,
or by another worker's loss. It has imported TensorFlow already; the state of the previous training is cleared. On a
worker; the driver's part is in `startup.py`.
"""

from __future__ import annotations

import os

from raytf import activity
from raytf.collectives import healing
from raytf.compat import ray_train
from raytf.runtime.failures import cause_of, is_consequence
from raytf.worker import clearing, ending
from raytf.worker.ending import MovedError


def leave(seconds: float) -> bool:
    """Prepares this process for another training; returns False if the last one has not ended, or has failed.

    Args:
        seconds: Seconds to wait for the end of the running training.
    """
    if not ray_train.training_has_ended(seconds):
        return False
    error = ray_train.training_error()
    cause = cause_of(error)
    if cause is None or not (isinstance(cause, MovedError) or is_consequence(cause)):
        return False
    from raytf.collectives import exchange

    _forget_frames(error)
    exchange.leave_all()
    healing.here.reset()
    ending.gate.reset()
    activity.here.reset()
    os.environ.pop("TF_CONFIG", None)
    clearing.clear()
    return True


def _forget_frames(error: BaseException) -> None:
    """Drops the frames of an error, which reference the model; Ray Train keeps the error."""
    left, seen = [error], set()
    while left:
        current = left.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        left += [current.__context__, current.__cause__, cause_of(current)]
