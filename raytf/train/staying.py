"""Processes of an elastic run that stay when the number of its workers changes: what each does between two groups.

Ray Train ends a group of workers and starts another one. Those of its processes whose trainings have ended, after the
same step or because another worker was lost, become workers of the next group: they have imported TensorFlow, and what
the training before has left in them is cleared. On a worker; the driver's part is in `startup.py`.
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
    """Makes this process ready for another training; False where it is not to be: the last has not ended, or failed.

    Args:
        seconds: for which it waits for the end of the one that goes on.
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
    """Lets go of what the functions that an error went through have held, as the model; Ray Train keeps the error."""
    left, seen = [error], set()
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [one.__context__, one.__cause__, cause_of(one)]
