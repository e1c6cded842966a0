"""Keras callbacks of a training on Ray: epochs of the feed, metrics and checkpoints, progress, TensorBoard.

Over 500 lines: one small callback after another.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from raytf import activity, validation
from raytf.collectives import communicator
from raytf.compat import keras as compat_keras
from raytf.compat import keras_objects, legacy_keras
from raytf.console import phases, progress
from raytf.errors import ConfigError
from raytf.identity import same_run
from raytf.parallel import model_optimizers, shards
from raytf.parallel.callbacks import settable_rate
from raytf.storage.snapshots import NotWrittenError
from raytf.worker import checkpoint as checkpoints
from raytf.worker import figures, session
from raytf.worker.callback_state import CallbackStates
from raytf.worker.part import Training, TrainingPart, shared_states
from raytf.worker.writers import WriterCount


def feed_state(name: str) -> dict | None:
    """Returns the state of a feed on the other workers, for a replacement worker that opens it; None on others."""
    return shared_states().get(FeedCallback.__name__, {}).get(name)


class FeedCallback(TrainingPart):
    """Sets the epoch of feeds, and counts steps.

    Args:
        feeds: Feeds by name: "train", and maybe "validation", whose batches may also differ in each epoch.
        step: Number of steps before this training.

    Attributes:
        step: Number of steps in all.
        epoch_step: Number of steps of the current epoch.
        skipped: Rows that the next step skips, as they were trained on before; see `sampling.regrouped`.
    """

    def __init__(self, feeds: Mapping[str, Any], step: int = 0):
        super().__init__()
        self._feeds, self._feed, self.step, self.epoch_step = feeds, feeds["train"], step, 0
        self.skipped = 0

    @classmethod
    def create(cls, training: Training) -> TrainingPart:
        return training.position

    def state_dict(self) -> dict[str, Any]:
        return {name: feed.state_dict() for name, feed in self._feeds.items()}

    @property
    def steps(self) -> int:
        """Returns the number of steps of an epoch."""
        return self._feed.steps

    def resume_at(self, epoch: int, step: int, skip: int = 0):
        """Resumes an epoch after some steps, and returns the dataset of the remaining ones.

        If the next step skips rows, the dataset contains only this step.
        """
        self._feed.set_epoch(epoch, step)
        self.epoch_step, self.skipped = step, skip
        return self._feed.step_without(skip) if skip else self._feed.dataset()

    def on_train_begin(self, logs=None):
        if activity.tracker.began is None:  # otherwise the rest of a resumed epoch begins
            activity.tracker.began = self.step

    def on_epoch_begin(self, epoch, logs=None):
        for feed in self._feeds.values():
            feed.set_epoch(epoch)
        self.epoch_step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += batch + 1 - self.epoch_step
        self.epoch_step, self.skipped = batch + 1, 0
        activity.tracker.step = self.step


class _InitSignature:
    """Gives a class the signature of its `__init__`, which `inspect` does not read if there is a `__new__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class ReportCallback(keras.callbacks.Callback):
    """Reports metrics and a checkpoint to Ray at the end of every epoch, in a train loop of your own. Put it last.

    Every worker needs it, as `ray.train.report` is a barrier. Only the chief (rank 0) writes a checkpoint: the complete
    training state. A restarted loop finds it by `ray.train.get_checkpoint()`, and must restore it. A loop of your own
    needs at most `checkpoint`, `build`, `callbacks` and `history`; raytf's trainers pass the other arguments.

    Args:
        checkpoint: Whether to write a checkpoint with each report; True by default. Without one the Result has the
            last report's metrics alone.
        seed: Seed of the run, which is stored in the checkpoint; 0 by default.
        build: Tuple (build_model, config, inputs), for `raytf.load_model(build_model=...)`. The checkpoint contains the
            name of the function, the config and the inputs. Inputs are (shape without the batch, dtype), or a dict of
            these. By default a checkpoint contains none.
        callbacks: List of callbacks whose state the checkpoint contains, in order; none by default.
        history: List of dicts with the metrics of the epochs before, when a run resumes.
        report: Function `report(metrics, write)` instead of Ray's; `write(folder)` writes the checkpoint. It may return
            a function that waits for the end of the writing. That function returns why there is no checkpoint, or None.
        identity: Dict that identifies the run, which is stored in each checkpoint.
        steps: Function `steps()` that returns the number of steps in all; by default those of an optimizer.
        writers: Agrees on the workers that write a checkpoint. None: the chief.
        batch_scale: Scale of the batch, which is stored in each checkpoint.

    Raises:
        NotWrittenError: With `report`, at the end of the training: the last checkpoint could not be written.

    Example:
        >>> import ray, raytf
        >>> def train_loop():
        ...     import keras, numpy, raytf
        ...     with raytf.get_strategy().scope():
        ...         model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...         model.compile("sgd", "mse")
        ...     model.fit(numpy.ones((64, 4)), numpy.ones(64), batch_size=16, callbacks=[raytf.ReportCallback()])
        >>> trainer = raytf.TensorflowTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=2))
        >>> result = trainer.fit()
    """

    __signature__ = _InitSignature()
    raytf_local_batches = True
    raytf_after_agreement = True

    def __new__(cls, *args, **kwargs) -> ReportCallback:
        # imported while `tf.keras` was Keras 3, and called while it is Keras 2
        if cls is ReportCallback and legacy_keras.is_enabled():
            from raytf.worker import legacy_callbacks

            return legacy_callbacks.LegacyReportCallback(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        checkpoint: bool = True,
        *,
        seed: int = 0,
        build: tuple | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | CallbackStates = (),
        history: Sequence[Mapping[str, float]] = (),
        report: Callable = session.report_to_ray,
        identity: Mapping[str, Any] | None = None,
        steps: Callable[[], int] | None = None,
        writers: WriterCount | None = None,
        batch_scale: float = 1.0,
    ):
        super().__init__()
        validation.check_flag("checkpoint", checkpoint)
        self._steps, self._writers, self._batch_scale = steps, writers, batch_scale
        self._identity = dict(identity or {})
        self._send_report = report
        self._checkpoint, self._seed, self._build = checkpoint, seed, build
        self._states = callbacks if isinstance(callbacks, CallbackStates) else CallbackStates(callbacks)
        self._history = list(history)
        self._reported = None
        self._write_error: Callable[[], NotWrittenError | None] | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._states.begin()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._history.append({"epoch": epoch + 1, **_numbers(logs)})
        self._report(stopped=bool(self.model.stop_training))

    def on_train_end(self, logs: dict | None = None) -> None:
        # EarlyStopping and averaged weights may have replaced the weights after the last epoch
        if self._history and self._reported is not None:
            with activity.tracker.in_phase(activity.CHECKPOINT):  # the last checkpoint may not be whole yet
                is_same = np.array_equal(self._fingerprint(), self._reported, equal_nan=True)
                is_saved = is_same and self._is_saved()
            if not is_saved:
                self._report(stopped=bool(self.model.stop_training))
            with activity.tracker.in_phase(activity.CHECKPOINT):
                failed = self._write_error and self._write_error()
            if failed is not None:
                raise failed
        self._states.end()

    def _is_saved(self) -> bool:
        """Returns whether the chief's last checkpoint is whole; if not, all workers report once more."""
        if self._write_error is None:  # `report` has no such result, and raises errors itself
            return True
        return bool(communicator.chief_number(self.model.distribute_strategy, self._write_error() is None))

    def _fingerprint(self) -> np.ndarray:
        sums = [np.sum(compat_keras.as_array(v), dtype=np.float64) for v in self.model.trainable_variables]
        return np.array(sums, np.float64)

    def _report(self, stopped: bool):
        self._reported = self._fingerprint()
        snapshot = self._snapshot(stopped) if self._checkpoint else None
        writers = 1 if snapshot is None else snapshot.writers
        with activity.tracker.in_phase(activity.CHECKPOINT), shards.gather_full_state(self.model, writers=writers):
            self._write_error = self._send_report(dict(self._history[-1]), snapshot)

    def _snapshot(self, stopped: bool) -> checkpoints.CheckpointSnapshot:
        snapshot = checkpoints.CheckpointSnapshot(self.model, self._state(stopped), self._states, self._build)
        writers = 1 if self._writers is None else self._writers.count(self.model)
        if writers == 1:
            return snapshot
        broadcast_name = functools.partial(self._writers.name, self.model)
        return dataclasses.replace(snapshot, writers=writers, broadcast_name=broadcast_name)

    def parts(self, variables: Mapping[str, np.ndarray], steps_ahead: int = 0, **state_fields: Any) -> dict[str, Any]:
        """Returns the files of a checkpoint within an epoch, see `checkpoint.checkpoint_parts`.

        Args:
            variables: Arrays of `metrics.npz`.
            steps_ahead: Steps of the current execution for which callbacks were not called yet.
            state_fields: epoch_step, logs, metrics and order of the `CheckpointState`.
        """
        state = self._state(stopped=False)
        state = dataclasses.replace(state, step=state.step + steps_ahead, **_number(state_fields))
        return checkpoints.checkpoint_parts(self.model, state, self._states, self._build, variables)

    def _state(self, stopped: bool) -> checkpoints.CheckpointState:
        # an optimizer that waits for others, or steps more than once, has another count
        counts = [int(optimizer.iterations) for optimizer in model_optimizers.optimizers_of(self.model).values()]
        step = min((count for count in counts if count), default=0) if self._steps is None else self._steps()
        rate = checkpoints.rate_of(self._build[1]) if self._build else None
        return checkpoints.CheckpointState(
            len(self._history),
            step,
            self._seed,
            stopped,
            list(self._history),
            self._identity,
            rate,
            batch_scale=self._batch_scale,
        )


class EpochReports(ReportCallback, TrainingPart):
    """Reports ends of epochs to the session of a training, see `ReportCallback`."""

    @classmethod
    def create(cls, training: Training) -> EpochReports:
        session, options, position = training.session, training.options, training.position
        keep = options.report_steps is not None
        return cls(
            seed=training.seed,
            build=training.build,
            callbacks=training.states,
            history=training.history,
            report=training.report or (functools.partial(session.report, keep=True) if keep else session.report),
            identity=options.identity,
            steps=lambda: position.step,
            writers=WriterCount(session) if session.shares_writing else None,
            batch_scale=options.scale,
        )


class StepReportCallback(TrainingPart):
    """Reports the global metrics of the epoch so far every few steps, with those of the last complete epoch.

    There is no report without the metric of `report_steps`: validation metrics begin with the first epoch's end.

    Args:
        training: The training.
    """

    def __init__(self, training: Training):
        super().__init__()
        (self._interval, self._needed), self._session = training.options.report_steps, training.session
        self._last: dict = dict(training.history[-1]) if training.history else {}
        self._next = self._joined_next = 0

    @classmethod
    def create(cls, training: Training) -> StepReportCallback | None:
        return None if training.options.report_steps is None else cls(training)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._joined_next = state["next"]  # of the epoch that the others are in

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._next, self._joined_next = epoch, self._joined_next, 0

    def on_train_batch_begin(self, batch, logs=None):
        # an epoch may resume after some steps
        self._next = self._next or batch + self._interval - batch % self._interval

    def on_train_batch_end(self, batch, logs=None):
        done = batch + 1
        # the end of an epoch is reported separately
        if done < self._next or done >= (self.params["steps"] or math.inf):
            return
        self._next = done + self._interval
        metrics = self._last | _numbers(keras_objects.epoch_logs(self.model, logs))
        if self._needed in metrics:
            self._session.report({**metrics, "epoch": self._epoch, "step": done}, None)

    def on_epoch_end(self, epoch, logs=None):
        self._last = _numbers(logs)


class WarmupCallback(TrainingPart):
    """Raises the learning rate linearly from 0 to the optimizer's over the first steps of a training.

    Args:
        training: The training, with a model that was just built: its learning rate is the final one.

    Raises:
        ConfigError: The optimizer has a learning rate schedule or several rates, or is not the only one.
    """

    def __init__(self, training: Training):
        super().__init__()
        model = training.model
        additional = [name for name in model_optimizers.optimizers_of(model) if name != "optimizer"]
        if additional:
            raise ConfigError(
                "warmup_steps raises the learning rate of model.optimizer",
                f"a model that has other optimizers ({', '.join(additional)})",
                "Put the warm-up into their schedules",
            )
        rate = settable_rate(model.optimizer)
        if rate is None:
            raise ConfigError(
                "warmup_steps needs an optimizer with a number for its learning rate",
                f"{type(model_optimizers.unscaled(model.optimizer)).__name__}, with a schedule or several rates",
                "Give the optimizer config['learning_rate'], or put the warm-up into the schedule",
            )
        self._steps, self._rate = training.options.warmup_steps, float(rate)
        self._done, self._begin = training.position.step, 0

    @classmethod
    def create(cls, training: Training) -> WarmupCallback | None:
        return cls(training) if training.options.warmup_steps else None

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done, "begin": self._begin}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._done, self._begin = state["done"], state["begin"]

    def on_train_batch_begin(self, batch, logs=None):
        if self._done < self._steps:
            self._begin = batch
            self.model.optimizer.learning_rate = self._rate * (self._done + 1) / self._steps

    def on_train_batch_end(self, batch, logs=None):
        if self._done < self._steps:
            self._done += batch - self._begin + 1
            if self._done >= self._steps:
                self.model.optimizer.learning_rate = self._rate


class RestoreCallback(TrainingPart):
    """Restores a training from a checkpoint: first the model, and then callbacks, random numbers and the History.

    Args:
        training: The training, with a checkpoint. Its metrics of earlier epochs go into the History of `fit`.
    """

    def __init__(self, training: Training):
        super().__init__()
        self._folder, self._states, self._history = training.folder, training.states, training.history
        self._chief = training.session.rank == 0

    @classmethod
    def create(cls, training: Training) -> RestoreCallback | None:
        """Restores the model at once, as later parts and `fit` begin with it."""
        model, state, options = training.model, training.state, training.options
        if state is None:
            scale_rate(model, options.scale)
            return None
        rate = settable_rate(model.optimizer)
        built_rate = None if rate is None else float(rate)
        is_new = checkpoints.restore(training.folder, model, training.build[1] if training.build else None)
        if built_rate is not None and same_run.rates_differ(state.identity, options.identity):
            model.optimizer.learning_rate = built_rate  # the user saw this difference, and passed resume=True
            is_new = True
        scale_rate(model, options.scale if is_new else options.scale / state.batch_scale)
        if training.session.rank == 0:
            continue_logs(training.users, state.epoch)
        return cls(training)

    def on_train_begin(self, logs=None):
        checkpoints.restore_callbacks(self._folder, self._states, self._chief)
        checkpoints.restore_random(self._folder)

    def on_epoch_begin(self, epoch, logs=None):
        self._put_back()  # not earlier: the History resets its epochs after all other callbacks

    def on_train_end(self, logs=None):
        self._put_back()  # if no epoch was left

    def _put_back(self) -> None:
        history, rows, self._history = self.model.history, self._history, ()
        for row in rows:
            history.epoch.append(row["epoch"] - 1)
            for name in row.keys() - {"epoch"}:
                history.history.setdefault(name, []).append(row[name])


def scale_rate(model, factor: float) -> None:
    """Multiplies the learning rate of a model by the scale of its batch.

    Raises:
        ConfigError: The optimizer has a learning rate schedule or several rates.
    """
    if factor == 1:
        return
    rate = settable_rate(model.optimizer)
    if rate is None:
        raise ConfigError(
            'elastic_batch="scale" needs an optimizer with a number for its learning rate',
            f"{type(model_optimizers.unscaled(model.optimizer)).__name__}, with a schedule or several rates",
            'Set the rate in a callback, by epochs, or use elastic_batch="keep"',
        )
    model.optimizer.learning_rate = float(rate) * factor


def continue_logs(callbacks, epoch: int) -> None:
    """Makes CSV files of `CSVLogger` continue at an epoch, without a restart and without duplicates; for the chief.

    Args:
        callbacks: The user's callbacks, before the training begins.
        epoch: The next epoch, from 0.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger) and os.path.isfile(callback.filename):
            with open(callback.filename, "rb+") as file:
                lines = file.readlines()
                # rows of a previous run, which `append` keeps, end with a lower epoch or with a header
                while lines and (number := re.match(rb"\d+", lines[-1])) and int(number[0]) >= epoch:
                    lines.pop()
                file.truncate(sum(map(len, lines)))  # unlike another write it cannot lose the rows before
            callback.append = True


class ProgressCallback(TrainingPart):
    """Sends the position of the chief's training to the driver's progress line, at most once in `interval` seconds.

    Between the ends of epochs loss and accuracy are those of the chief's own rows.

    Args:
        board: A `progress.Board`.
        global_batch: Rows of a step.
        waited: Function that returns the seconds for which steps have waited for rows since the start; None if unknown.
        interval: Shortest interval in seconds.
    """

    def __init__(self, board, global_batch: int, waited, interval: float = 0.2):
        super().__init__()
        self._board, self._batch, self._waited, self._interval = board, global_batch, waited, interval
        self._sent = 0.0

    @classmethod
    def create(cls, training: Training) -> ProgressCallback | None:
        board = training.options.board
        shown = board is not None and training.session.rank == 0
        return cls(board, training.global_batch, training.waited) if shown else None

    def on_train_begin(self, logs=None):
        self._writer = progress.BoardWriter(self._board)
        self._writer.begin(phases.FIRST_STEP)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._began = time.monotonic(), self._waited() if self._waited else 0.0

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.monotonic()
        if seconds - self._sent >= self._interval:
            self._sent = seconds
            self._send(batch + 1, logs, ended=False)

    def on_epoch_end(self, epoch, logs=None):
        self._send(self.params["steps"] or 0, logs, ended=True)

    def on_train_end(self, logs=None):
        self._writer.begin(phases.ENDING)  # the last epoch may not be the last of those that were asked for
        self._writer.close()

    def _send(self, step, logs, ended):
        update = {
            "epoch": self._epoch + 1,
            "epochs": self.params["epochs"],
            "step": min(step, self.params["steps"] or step),
            "steps": self.params["steps"],
            "rows": self._batch,
            "logs": _numbers(logs),
            "waiting": self._waiting(),
            "ended": ended,
        }
        self._writer.write(update)

    def _waiting(self) -> float | None:
        if self._waited is None:
            return None
        return (self._waited() - self._began[1]) / max(1e-9, time.monotonic() - self._began[0])


class UsersCallbacks(TrainingPart):
    """Puts the user's callbacks into the order of parts.

    Args:
        training: The training.
    """

    def __init__(self, training: Training):
        super().__init__()
        self._users = training.users
        names = keras_objects.reported_names(training.model)
        validation.check_monitors(self._users, names, "validation" in training.datasets)

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        return list(self._users)


def tensorboard(storage, callbacks, rank: int) -> list:
    """Returns a TensorBoard callback that writes to the run's folder, in a list; empty if the user has one.

    It is empty, too, if the storage is not a file system of this machine: object stores get no events. Trials have no
    storage: Tune writes their events.

    Args:
        storage: Storage of the run, or None.
        callbacks: The user's callbacks.
        rank: Rank of this worker. The chief imports the writer of events before the first step. It may import boto3,
            hundreds of files, for which all workers would wait in the second step.
    """
    import pyarrow.fs

    brought = any(isinstance(c, keras.callbacks.TensorBoard) for c in callbacks)
    local = storage is not None and isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
    if not (brought or local):
        return []
    if rank == 0:
        import tensorboard.summary.v2  # noqa: F401
    return [] if brought else [Events(os.path.join(storage.experiment_fs_path, "tensorboard"), write_graph=False)]


class Events(keras.callbacks.TensorBoard):
    """Writes events of the chief at epochs. If the disk fails it stops, but not the training."""

    raytf_local_batches = raytf_on_chief = True
    _failed = False

    def on_train_batch_end(self, batch, logs=None):
        """Skips the event of each metric that Keras would prepare, in 0.2 ms, and drop without events of batches."""


_hooks = {name for name in vars(keras.callbacks.TensorBoard) if name.startswith("on_")} - vars(Events).keys()
for _name in ("set_model", *_hooks):
    _hook = getattr(keras.callbacks.TensorBoard, _name)
    setattr(Events, _name, figures.ends_on_error("Events for TensorBoard")(_hook))


def _numbers(logs) -> dict:
    return _number(logs or {})


def _number(value):
    if isinstance(value, dict):
        return {k: _number(v) for k, v in value.items()}
    value = np.asarray(value)
    return value.item() if value.ndim == 0 else value.tolist()
