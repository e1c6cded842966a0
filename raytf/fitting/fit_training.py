"""The training of a `raytf.fit` on a worker: what its driver needs, in addition to the parts of each training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from raytf.compat import keras_objects
from raytf.fitting import transport
from raytf.parallel import model_optimizers
from raytf.parallel.callbacks import reads_batches
from raytf.storage import step_folders
from raytf.worker import checkpoint, loop
from raytf.worker.callbacks import EpochReports, FeedCallback
from raytf.worker.part import Training, TrainingPart
from raytf.worker.parts import PARTS

# Number of workers that hold a copy of the last epoch's weights, so that the loss of one worker loses nothing.
HOLD_LAST = 2
# The state after the last complete epoch, for the driver if the training does not complete.
_last_states: dict[str, Any] = {}


@dataclasses.dataclass(kw_only=True, eq=False)
class FitTraining(Training):
    """A training of a model that the driver has sent.

    Args:
        callback_objects: Objects that came with the callbacks.
        everything: These, and those of the model.
    """

    callback_objects: Any
    everything: Any


class CallbackValues(TrainingPart):
    """Gives the values of callbacks' own variables to a replacement worker.

    Args:
        training: The training.
    """

    def __init__(self, training: FitTraining):
        super().__init__()
        self._objects = training.callback_objects

    def state_dict(self) -> dict[str, Any]:
        # copies, as they may be sent while the next step writes into the variables
        return {number: np.array(value) for number, value in self._objects.values().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._objects.assign(state)


class EpochReport(TrainingPart):
    """Holds each epoch's state for a driver that interrupts the next one, or whose training fails in it.

    Args:
        training: The training.
    """

    raytf_after_agreement = True

    def __init__(self, training: FitTraining):
        super().__init__()
        self._session, self._everything = training.session, training.everything

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Drops the state of an earlier training, and that of a complete one."""
        _last_states.clear()
        yield
        _last_states.clear()

    def on_epoch_end(self, epoch, logs=None):
        if self._session.rank < HOLD_LAST:
            history = self.model.history
            values = {number: np.array(value) for number, value in self._everything.values().items()}  # steps change
            optimizers = {
                name: (kind, trained, list(map(np.array, values)))
                for name, (kind, trained, values) in built_optimizers(self.model, self._everything).items()
            }
            _last_states.update(values=values, built=optimizers, history=(dict(history.history), list(history.epoch)))
        self._session.report({}, None)


# The driver holds an epoch's state before a checkpoint within the next one can be requested.
_REPORT_INDEX = PARTS.index(EpochReports) + 1
TABLE = (CallbackValues, *PARTS[:_REPORT_INDEX], EpochReport, *PARTS[_REPORT_INDEX:])


def last_epoch() -> dict:
    """Returns this worker's state after the last complete epoch; empty if there is none."""
    return dict(_last_states)


def run_fit(
    session, work, model, folder: str | None, users, callback_objects, everything, pairs: Mapping[str, tuple], waited
):
    """Returns the History of a training.

    Args:
        session, work, model: Those of the training, see `fit_worker`.
        folder: Folder of the checkpoint to resume from, or None.
        users: The user's callbacks.
        callback_objects, everything: See `FitTraining`.
        pairs: (feed, dataset) by name.
        waited: See `part.Training`.

    Raises:
        StopTraining: The training was requested to stop.
    """
    if model.steps_per_execution != work.compiled_steps and any(map(reads_batches, users)):
        model.steps_per_execution = work.compiled_steps  # an earlier call has chosen another number
        model.make_train_function(force=True)
    state = checkpoint.read_state(folder) if folder else None
    feeds = {name: feed for name, (feed, _) in pairs.items()}

    def save(metrics: dict, snapshot) -> None:
        """Saves the end of an epoch like a step; `EpochReport` reports it."""
        if session.saves and session.rank == 0:
            session.save_step(step_folders.folder_name(snapshot.step), snapshot.model, snapshot.parts())

    training = FitTraining(
        options=work,
        seed=work.seed,
        session=session,
        folder=folder,
        state=state,
        model=model,
        feeds=feeds,
        datasets={name: dataset for name, (_, dataset) in pairs.items()},
        users=users,
        position=FeedCallback(feeds, state.step if state else 0),
        waited=waited,
        epochs=work.arguments["epochs"],
        first_epoch=work.arguments["initial_epoch"],
        arguments={"validation_freq": work.arguments["validation_freq"]},
        report=save,
        callback_objects=callback_objects,
        everything=everything,
    )
    return loop.run_training(training, TABLE)


def built_optimizers(model, everything) -> dict[str, tuple[str, list[int], list]]:
    """Returns optimizers built on this worker by name: (class, numbers of trained variables, variables' values)."""
    optimizers = {}
    for name, optimizer in model_optimizers.optimizers_of(model).items():
        new = [v for v in optimizer.variables if id(v) not in everything.numbers]
        if new and optimizer.built:
            trained = [everything.numbers.get(id(v)) for v in keras_objects.variables_of_optimizer(optimizer)]
            optimizers[name] = type(optimizer).__name__, trained, [transport.value_of(v) for v in optimizer.variables]
    return optimizers
