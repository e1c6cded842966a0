"""What the drivers of a training send to processes: what these import, and the loop that they run. On a worker."""

from __future__ import annotations

from raytf import legacy_keras, output
from raytf.session import RaySession
from raytf.worker import Task


def import_raytf() -> None:
    """What a worker needs; no TensorFlow operation runs."""
    from raytf.keras_import import import_keras

    output.say_who(output.CHECK)
    import_keras()
    from raytf import feed  # noqa: F401

    if not legacy_keras.is_on():
        from raytf import callbacks, execution, inspection  # noqa: F401


def train(task: Task, session=None) -> None:
    """Runs on every worker of a KerasTrainer.

    Args:
        task: what to train.
        session: the run around it, see `session.py`; Ray Train's unless it is given.
    """
    from raytf import context, parameter_server, tpu, worker

    session = session or RaySession(validate=task.validate)
    if context.config().servers is not None:
        parameter_server.train(task, session)
    elif context.uses_tpu() and session.size > 1:
        with tpu.led(session) as leading:
            if leading is not None:
                worker.train(task, leading)
    else:
        worker.train(task, session)
