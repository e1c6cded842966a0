"""The contract of a training's parts, and the state that they share. Runs on a worker."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from raytf.collectives import recovery_client
from raytf.parallel import epoch_iterator
from raytf.storage.checkpoint_files import CheckpointState
from raytf.worker.callback_state import CallbackStates
from raytf.worker.job import TrainingOptions
from raytf.worker.session import Session


class TrainingPart(keras.callbacks.Callback):
    """A feature of a training: a Keras callback, with state that a replacement worker gets.

    A new part is a class in the file of its feature, and a line in the table of `parts.py`. The line has its position
    in the order, and why. With `raytf_local_batches` logs of batches have no values of other workers. With
    `raytf_after_agreement` it runs after workers have agreed on what callbacks changed.
    """

    raytf_local_batches = True

    def __init__(self, training: Training | None = None):
        super().__init__()

    @classmethod
    def create(cls, training: Training) -> TrainingPart | None:
        """Returns the part of a training, or None if it needs none. The parts before it in the table exist."""
        return cls(training)

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the callbacks for Keras, usually this part alone."""
        return [self]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that all workers have alike, for a replacement worker."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the `state_dict` of another worker, before the training begins."""

    def exchanges(self, step: int) -> bool:
        """Returns whether it may exchange data with other workers after a step; `step` is the total number of steps."""
        return False

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager around `fit`."""
        return contextlib.nullcontext()


def shared_states() -> dict[str, dict[str, Any]]:
    """Returns the states of parts, by class, that this replacement worker takes over; empty on other workers."""
    state = recovery_client.client.replacement_state
    return {} if state is None else state.shared_state["parts"]


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """A training on this worker, ready to be fitted.

    Args:
        options: Options that parts read.
        seed: Seed of all random numbers.
        session: Session of the run.
        folder: Folder of the checkpoint to resume from, or None.
        state: State of that checkpoint, or None.
        model: The compiled and built model.
        feeds: Feeds by name: "train", and maybe "validation".
        datasets: Their datasets, as the model takes them.
        users: The user's callbacks, which were just built.
        position: The part that counts steps, see `callbacks.FeedCallback`.
        waited: Function that returns the seconds for which steps have waited for rows; None if other processes make
            the steps.
        epochs: Index of the epoch to end with.
        first_epoch: Index of the first epoch of the run.
        arguments: Further arguments of Keras' `fit`.
        build: See `checkpoint.checkpoint_parts`.
        report: Function `report(metrics, snapshot)` for ends of epochs; the session's by default.
        workers: Number of processes that make steps; the session's by default.

    Attributes:
        parts: The parts by class, in order.
        states: States of the user's callbacks.
        replacement_state: State of the lost worker that this one replaces, or None.
        initial_epoch: Index of the next epoch.
    """

    options: TrainingOptions
    seed: int
    session: Session
    folder: str | None
    state: CheckpointState | None
    model: keras.Model
    feeds: dict[str, Any]
    datasets: dict[str, Any]
    users: Sequence[keras.callbacks.Callback]
    position: Any
    waited: Callable[[], float] | None
    epochs: int
    first_epoch: int = 0
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: tuple | None = None
    report: Callable | None = None
    workers: int | None = None

    def __post_init__(self):
        self.parts: dict[type[TrainingPart], TrainingPart] = {}
        self.states = CallbackStates(self.users)
        self.replacement_state = recovery_client.client.replacement_state
        self.initial_epoch = self.first_epoch
        if self.state is not None:
            self.state = dataclasses.replace(self.state, epoch=self.first_epoch + self.state.epoch)
            self.initial_epoch = self.epochs if self.state.stopped else self.state.epoch

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """Returns the metrics of the epochs before this training."""
        return self.state.history if self.state is not None else ()

    @property
    def global_batch(self) -> int:
        """Returns the rows of a step over all workers."""
        return self.feeds["train"].global_batch

    @property
    def order(self) -> dict[str, Any]:
        """Returns what decides which rows a step has, see `Feed.order`."""
        return self.feeds["train"].order

    def iterator(self) -> Any:
        """Returns the iterator of an epoch, whose `begin_at(step, dataset)` sets its first step."""
        return epoch_iterator.newest_iterator()

    def fit(self, callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.History:
        """Runs the remaining epochs with these callbacks."""
        return self.model.fit(
            self.datasets["train"],
            validation_data=self.datasets.get("validation"),
            epochs=self.epochs,
            initial_epoch=self.initial_epoch,
            callbacks=list(callbacks),
            verbose=0,
            shuffle=False,  # the feed does
            **self.arguments,
        )
