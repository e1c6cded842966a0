"""What the drivers of a training send to processes: what these import, and the loop that they run. On a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

import ray
from ray.exceptions import RayActorError

from raytf.collectives import ring
from raytf.compat import autograph, legacy_keras, loggers, versions
from raytf.compat.fast_import import import_keras
from raytf.console import output
from raytf.errors import RaytfError, in_a_line
from raytf.train import (
    backend,
    dry_run,  # noqa: F401 - asked of the first process
)
from raytf.worker import clearing
from raytf.worker.job import TrainJob
from raytf.worker.session import RaySession


def import_raytf() -> None:
    """What a worker needs; no TensorFlow operation runs.

    Raises:
        UnsupportedVersionError: what raytf imports is elsewhere in a version that is not tested.
    """
    output.say_check()
    import_keras()
    from raytf.data import feed  # noqa: F401

    if not legacy_keras.is_on():
        try:
            from raytf.worker import fit  # noqa: F401
        except ImportError as error:
            versions.explain(error)
            raise


def rehearse(told: list, workers: int, cpus: int) -> str | None:
    """What a spare process does as it starts: imports, and a step of the model that it may have to train.

    Args:
        told: empty, or the ref of (the `TrainJob`, the `settings.WorkerSetup`).
        workers: of the run.
        cpus: of a worker.

    Returns:
        Why the step could not be made, in a line; None where it was, or none was asked for.
    """
    import_raytf()
    clearing.note()
    if not told:
        return None
    from raytf.worker import context, rehearsal

    output.say_who("spare")
    try:
        task, setup = ray.get(told[0])
        backend.set_variables(setup.config, [f"127.0.0.1:{1 + rank}" for rank in range(workers)], workers - 1, cpus)
        ring.keep_token(ring.new_token())
        with warnings.catch_warnings(), autograph.in_memory(), context.prepared(setup):
            warnings.simplefilter("ignore")  # the workers show them
            rehearsal.rehearse(task, workers)
    except Exception as error:  # a process that has imported TensorFlow is of use all the same, and it is said
        return in_a_line(error)
    finally:
        os.environ.pop("TF_CONFIG", None)
    return None


def train(task: TrainJob, session=None) -> dict | None:
    """Runs on every worker of a KerasTrainer.

    Args:
        task: what to train.
        session: the run around it, see `session.py`; Ray Train's unless it is given.

    Returns:
        Where it was told to end, see `fit.train`; None where the training came to its end.
    """
    from raytf.parameter_server import coordinator
    from raytf.worker import context, fit, tpu

    session = session or RaySession(validate=task.validate)
    with _in_a_sentence():
        if context.setup().servers is not None:
            return coordinator.train(task, session)
        if context.uses_tpu() and session.size > 1:
            with tpu.led(session) as leading:
                return fit.train(task, leading) if leading is not None else None
        return fit.train(task, session)


@contextlib.contextmanager
def _in_a_sentence() -> Iterator[None]:
    """Keeps Ray Train from printing the stack of an error whose sentence the driver raises.

    Those are raytf's own, and what follows from the end of the run's other processes, as at a signal.
    """
    try:
        yield
    except (RaytfError, RayActorError) as error:
        name = f"{type(error).__name__}: "
        logging.getLogger(loggers.TRAIN_ERRORS).addFilter(lambda record: name not in record.getMessage())
        raise
