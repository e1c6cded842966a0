"""What the drivers of a training send to processes: what these import, and the loop that they run. On a worker."""

from __future__ import annotations

from raytf.compat import legacy_keras, selfcheck
from raytf.compat.fast_import import import_keras
from raytf.console import output
from raytf.train import dry_run  # noqa: F401 - asked of the first process
from raytf.worker.job import TrainJob
from raytf.worker.session import RaySession


def import_raytf() -> None:
    """What a worker needs; no TensorFlow operation runs.

    Raises:
        UnsupportedVersionError: what raytf imports is elsewhere in a version that is not tested.
    """
    output.say_who(output.CHECK)
    import_keras()
    from raytf.data import feed  # noqa: F401

    if not legacy_keras.is_on():
        try:
            from raytf.worker import fit  # noqa: F401
        except ImportError as error:
            selfcheck.explain(error)
            raise


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
    if context.setup().servers is not None:
        return coordinator.train(task, session)
    if context.uses_tpu() and session.size > 1:
        with tpu.led(session) as leading:
            return fit.train(task, leading) if leading is not None else None
    return fit.train(task, session)
