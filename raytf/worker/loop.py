"""The training loop of every worker: of a KerasTrainer, of a trial, of `raytf.fit` and of a standby's warm-up step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras

from raytf.worker.part import Training, TrainingPart, shared_states


def run_training(training: Training, table: Sequence[type[TrainingPart]]) -> keras.callbacks.History:
    """Assembles the parts of a training, and fits. Every worker calls it.

    Args:
        training: The training.
        table: Classes of its parts in the order in which Keras calls them, see `parts.PARTS`.

    Raises:
        StopTraining: The training was requested to stop, and has ended after a step.
    """
    states = shared_states()
    for kind in table:
        part = kind.create(training)
        if part is not None:
            training.parts[kind] = part
            if kind.__name__ in states:
                part.load_state_dict(states[kind.__name__])
    with contextlib.ExitStack() as running:
        for part in training.parts.values():
            running.enter_context(part.running())
        return training.fit([callback for part in training.parts.values() for callback in part.callbacks])
