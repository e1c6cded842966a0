"""Evaluates every new checkpoint of a training beside it, in a process of its own that stays warm.

Ray Train starts a task for each checkpoint that is reported for validation; the task asks this actor.
"""

from __future__ import annotations

import functools

import ray
from ray.train import Checkpoint
from ray.train.v2.api.validation_config import ValidationConfig

from raytf.resources import actor_options
from raytf.worker import Task

# Beside "loss", "val_loss", ... of the training.
PREFIX = "eval_"


class Evaluator:
    """The model of a task, with the weights of one checkpoint after the other; an actor.

    Args:
        task: with a dataset "validation".
    """

    def __init__(self, task: Task):
        self._task, self._model = task, None
        self._found: dict[int, dict[str, float]] = {}

    def evaluate(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Metrics of a checkpoint on the validation data, by name."""
        from raytf import checkpoint as checkpoints

        if self._model is None:
            self._build()
        with checkpoint.as_directory() as folder:
            checkpoints.restore(folder, self._model)
            epoch = checkpoints.read_state(folder).epoch
        values = self._model.evaluate(self._dataset, verbose=0, return_dict=True)
        self._found[epoch] = {PREFIX + name: float(value) for name, value in values.items()}
        return self._found[epoch]

    def _build(self) -> None:
        from raytf.keras_import import import_keras

        import_keras()
        from raytf import keras_multiworker
        from raytf.feed import Feed
        from raytf.worker import build_from_data

        keras_multiworker.install()
        self._model = self._task.build_model(dict(self._task.config))
        self._dataset = Feed(**self._task.feed("validation")).dataset()
        build_from_data(self._model, self._dataset)

    def found(self) -> dict[int, dict[str, float]]:
        """What was found, by the number of epochs that a checkpoint had behind it."""
        return self._found


def start(task: Task, resources: dict[str, float], environment: dict):
    """Starts an `Evaluator`.

    Args:
        task: of the training; its map of training rows is not used.
        resources: of the actor.
        environment: runtime environment of its process.
    """
    return ray.remote(Evaluator).options(**actor_options(resources), runtime_env=environment).remote(task)


def validation(actor) -> ValidationConfig:
    """What Ray Train calls for a checkpoint."""
    return ValidationConfig(fn=functools.partial(_ask, actor), ray_remote_kwargs={"num_cpus": 0})


def _ask(actor, checkpoint: Checkpoint) -> dict:
    return ray.get(actor.evaluate.remote(checkpoint))
