"""Warms up a standby worker: runs a step of the model that it may train, and discards the result.

All imports, conversions and setup of Keras and TensorFlow are done when the process becomes a replacement worker. It
warms up as the last of `workers` workers, without connections: sums are those of workers that are all alike.
"""

from __future__ import annotations

import dataclasses
import gc

from raytf.collectives import communicator, recovery_client
from raytf.data import worker_part
from raytf.parallel import own_state
from raytf.storage import scratch
from raytf.storage.checkpoint_files import CheckpointState
from raytf.worker import checkpoint, fit, loop
from raytf.worker.job import TrainJob
from raytf.worker.session import Session
from raytf.worker.steps_per_execution import ExecutionCallback

# Larger models are not saved and restored in a warm-up: that takes longer than the imports that it saves.
_MOST_BYTES = 64 << 20


def warm_up(task: TrainJob, workers: int) -> None:
    """Runs a step of the first rows, in the environment of the last one of `workers` workers."""
    no_op = lambda: None
    recovery_client.client.warms_up = True
    recovery_client.client.arm(no_op, no_op, no_op, step=0)
    try:
        _step(task, Session(workers - 1, workers))
    finally:
        recovery_client.client.warms_up = False
        recovery_client.client.disarm()
        gc.collect()


def _step(task: TrainJob, session: Session) -> None:
    first = {"train": task.datasets["train"].first()}
    one_epoch = dataclasses.replace(task, datasets=first, callbacks=None, config={**task.config, "epochs": 1})
    training = fit.prepare(one_epoch, session, lambda: 0.0, lambda name: {"steps": 1})
    model = training.model
    training.datasets["train"] = worker_part.mark_worker_part(training.datasets["train"].take(1))
    if sum(map(communicator.bytes_of, model.variables)) <= _MOST_BYTES:
        with scratch.temporary_folder() as folder:
            state = CheckpointState(epoch=0, step=0, seed=task.sampling.seed, stopped=False, history=[])
            checkpoint.save(folder, model, state)
            checkpoint.restore(folder, model)
    loop.run_training(training, [ExecutionCallback])  # no other part, as the others exchange data or write
    if own_state.bytes_of(model) is not None:
        own_state.take(model, own_state.content_of(model))
