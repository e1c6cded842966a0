"""Functions that drivers of a training send to processes: imports, and the train loop. On a worker."""

from __future__ import annotations

import os
import warnings

import ray

from raytf.collectives import ring_token
from raytf.compat import autograph, legacy_keras, versions
from raytf.compat.fast_import import import_keras
from raytf.console import output
from raytf.errors import one_line
from raytf.train import (
    backend,
    dry_run,  # noqa: F401 - the first process runs it
)
from raytf.worker import clearing
from raytf.worker.job import TrainJob
from raytf.worker.session import RaySession


def import_raytf() -> None:
    """Imports the modules that a worker needs; runs no TensorFlow operation.

    Raises:
        UnsupportedVersionError: An untested version lacks a name that raytf imports.
    """
    output.mark_as_model_check()
    import_keras()
    from raytf.data import feed  # noqa: F401

    if not legacy_keras.is_enabled():
        try:
            from raytf.worker import fit  # noqa: F401
        except ImportError as error:
            versions.explain_import_error(error)
            raise


def warm_up_standby(refs: list, workers: int, cpus: int) -> str | None:
    """Prepares a standby worker as it starts: imports, and a warm-up step of the model that it may train.

    Args:
        refs: Empty, or the ref of (the `TrainJob`, the `settings.WorkerSetup`).
        workers: Number of workers of the run.
        cpus: Number of CPUs of a worker, at least 1.

    Returns:
        Why the step failed, in one line; None if it succeeded or was not requested.
    """
    import_raytf()
    clearing.record_settings()
    if not refs:
        return None
    from raytf.worker import context, warm_up

    output.set_output_name("spare")
    try:
        task, setup = ray.get(refs[0])
        backend.set_variables(setup.config, [f"127.0.0.1:{1 + rank}" for rank in range(workers)], workers - 1, cpus)
        ring_token.keep_token(ring_token.new_token())
        with warnings.catch_warnings(), autograph.in_memory(), context.prepared(setup):
            warnings.simplefilter("ignore")  # the workers show warnings
            warm_up.warm_up(task, workers)
    except Exception as error:  # a process that has imported TensorFlow is useful without the step
        return one_line(error)
    finally:
        os.environ.pop("TF_CONFIG", None)
    return None


def train(task: TrainJob, session=None) -> dict | None:
    """Runs the training on every worker of a KerasTrainer.

    Args:
        task: The training.
        session: Session of the run, see `session.py`; by default that of this process.

    Returns:
        None if the training is complete; otherwise the step after which it was stopped, see `fit.train`.
    """
    from raytf.parameter_server import coordinator
    from raytf.worker import context, fit, tpu

    session = session or RaySession(validate=task.validate)
    if context.setup().servers is not None:
        return coordinator.train(task, session)
    if context.uses_tpu() and session.size > 1:
        with tpu.coordinated_session(session) as leading:
            return fit.train(task, leading) if leading is not None else None
    return fit.train(task, session)
