"""Within an epoch: saves checkpoints, stops after a step, and resumes from such a checkpoint.

`callbacks.ReportCallback` saves the checkpoints at ends of epochs. A resumed training makes the next step as without a
break: with equal rows, masks, random numbers, metrics and callbacks. `fit` resets metrics and calls `on_epoch_begin`
before it; `MidEpochResume` undoes these changes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytf import activity
from raytf.collectives import communicator
from raytf.compat import keras_objects
from raytf.data import sampling, worker_part
from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.parallel import local_sgd, metrics, model_optimizers, own_state, shards
from raytf.storage import step_folders
from raytf.worker import checkpoint as checkpoints
from raytf.worker import checkpoint_every, context, random_state, snapshot_parts, stop
from raytf.worker.callbacks import EpochReports
from raytf.worker.checkpoint_every import CheckpointClock
from raytf.worker.part import Training, TrainingPart
from raytf.worker.session import NO_HOLDERS, MemoryReplicas
from raytf.worker.writers import WriterCount


class StepCheckpointCallback(TrainingPart):
    """Saves checkpoints within epochs, and one when the training is requested to stop.

    Every worker needs it, as metrics are summed over all.

    With an interval in steps, checkpoints are at the same steps in each run. They also average what workers average at
    the ends of epochs (moving statistics), so a resumed run has equal bits. With an interval in time they are at any
    step and do not change the training. A resumed run then has these averages up to rounding.

    For checkpoints in memory, the chief and a worker on another host copy the training state. That worker receives the
    state that only the chief has.

    Args:
        training: The training, with a session that saves them.
        holders: Workers that keep checkpoints in memory.

    Attributes:
        stood: Seconds for which the training has paused for a checkpoint before this callback is called for its step.
        saved_step: Number of steps at the last saved checkpoint; 0 without one.
        memory_step: Number of steps at the last checkpoint in memory; 0 without one.
    """

    raytf_after_agreement = True
    stood = 0.0
    saved_step = memory_step = 0

    def __init__(self, training: Training, holders: MemoryReplicas):
        super().__init__()
        options, session, self._holders = training.options, training.session, holders
        self._interval, self._memory_every = options.checkpoint_every, options.memory_every
        self._session, self._position, self._report = session, training.position, training.parts[EpochReports]
        self._order, self._validates = dict(training.order), "validation" in training.feeds
        self._writers = WriterCount(session) if session.shares_writing else None
        self._state: Mapping | None = None

    @classmethod
    def create(cls, training: Training) -> StepCheckpointCallback | None:
        session, options = training.session, training.options
        if not session.saves:
            return None
        in_memory = options.memory_every is not None
        if in_memory and context.uses_tpu():
            raise ConfigError(
                "memory_every needs workers each of which holds the whole model", "TPUs", "Use checkpoint_every"
            )
        holders = session.holders() if in_memory else NO_HOLDERS
        if session.rank == 0 and in_memory and context.servers() is None and not holders.peer:
            warn_user(
                "All workers are on one host: copies of memory_every survive the loss of a worker, and not of the host",
            )
        session.ready(training.model, in_memory, WriterCount(session).most(training.model))
        return cls(training, holders)

    def on_train_begin(self, logs=None):
        self._waits = self._holds = False  # whether one is due as soon as all workers have the same weights
        self._seen = self._next_check = self._position.step
        self._clock = CheckpointClock(self._interval, time.monotonic(), self._position.step)
        self._local_steps = local_sgd.averaging_interval(self.model.distribute_strategy)
        state, self._state = self._state, None
        if state is not None:
            vars(self).update(state["own"])
        stop.stop_barrier.begin(None if state is None else state["stop_barrier"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        attributes = {name: getattr(self, name) for name in ("_waits", "_holds", "_seen", "_next_check")}
        return {"own": attributes, "stop_barrier": stop.stop_barrier.state()}

    def exchanges(self, step: int) -> bool:
        if self._waits or self._holds or stop.stop_barrier.why is not None:
            return True
        steps = [number for number in (self._interval.steps, self._memory_every) if number is not None]
        if any(checkpoint_every.crosses_multiple(number, self._seen, step) for number in steps):
            return True
        return self._interval.is_within_epochs and self._interval.steps is None and step >= self._next_check

    def on_train_batch_end(self, batch, logs=None):
        ended = stop.stop_barrier.is_last()
        previous, self._seen = self._seen, self._position.step
        self._waits = self._waits or self._is_due(previous, self._seen)
        if self._memory_every is not None:
            self._holds = self._holds or checkpoint_every.crosses_multiple(self._memory_every, previous, self._seen)
        ends = self._position.epoch_step >= (self.params["steps"] or math.inf) and not self._validates
        due, in_memory = ended or (self._waits and not ends), self._holds and not ends
        if not (due or in_memory) or self.model.stop_training or not self._are_alike():
            return
        if not due:
            self._holds = False
            with activity.tracker.in_phase(activity.CHECKPOINT):
                self._save(logs, to_storage=False, in_memory=True)
            return
        self._waits = self._holds = False
        began = time.monotonic()
        with activity.tracker.in_phase(activity.CHECKPOINT):
            self._save(logs, to_storage=True, in_memory=in_memory)
        self._clock.made(time.monotonic(), time.monotonic() - began + self.stood)
        if ended:
            raise stop.StopTraining(stop.stop_barrier.why, self._position.step)

    def on_epoch_end(self, epoch, logs=None):
        # after the last epoch the report is that of a complete run: `fit` ends by itself, with `on_train_end` of all
        is_last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
        # if the weights were not the same after any step, the epoch is already reported
        if stop.stop_barrier.is_over() and not is_last:
            raise stop.StopTraining(stop.stop_barrier.why, self._position.step)
        self._waits = self._holds = False
        self._clock.epoch_ended(time.monotonic(), self._position.step)

    def wants(self, step: int) -> bool:
        """Returns whether to wait for all steps that have begun, for a training that begins steps before others end.

        Args:
            step: Number of steps in all.
        """
        self._waits = self._waits or self._is_due(step, step)
        return self._waits or stop.stop_barrier.why is not None

    def steps_to_next(self, step: int) -> float:
        """Returns the number of steps to the next checkpoint with an interval in steps, else infinity."""
        numbers = [number for number in (self._interval.steps, self._memory_every) if number is not None]
        return min((number - step % number for number in numbers), default=math.inf)

    def _is_due(self, last_step: int, step: int) -> bool:
        if not self._interval.is_within_epochs:
            return False
        if self._interval.steps is not None:
            return checkpoint_every.crosses_multiple(self._interval.steps, last_step, step)
        if step < self._next_check:
            return False
        began = time.monotonic()
        due, wait = self._clock.check(began, step)
        wait, due = divmod(communicator.chief_number(self.model.distribute_strategy, wait * 2 + due), 2)
        self._clock.checked(time.monotonic() - began)
        self._next_check = step + wait
        return bool(due)

    def _are_alike(self) -> bool:
        """Returns whether all workers have the same weights; with `sync_every` they differ between two averages."""
        optimizers = model_optimizers.optimizers_of(self.model).values()
        return self._local_steps == 1 or all(
            int(optimizer.iterations) % self._local_steps == 0 for optimizer in optimizers
        )

    def _save(self, logs, to_storage: bool, in_memory: bool) -> None:
        """Saves a checkpoint, or keeps it in memory, or both. Every worker calls it at the same step."""
        strategy, step, session = self.model.distribute_strategy, self._position.step, self._session
        self.saved_step = step if to_storage else self.saved_step
        self.memory_step = step if in_memory else self.memory_step
        assign = in_memory or self._interval.steps is not None
        values, averages, logs = metrics.collect_metrics(self.model, logs, assign)
        if assign:
            own_state.send_averaged(self.model)
        with _assigned(averages):
            chief = session.rank == 0
            parts = self._parts(values, logs) if chief else {}
            writers = self._writers.count(self.model) if to_storage and self._writers is not None else 1
            with shards.gather_full_state(self.model, writers=writers):
                if chief and to_storage:
                    session.save_step(step_folders.folder_name(step), self.model, parts, writers)
                elif writers > 1:
                    session.save_part(step_folders.folder_name(step), self.model, writers)
                elif chief:
                    session.hold_in_memory(step_folders.folder_name(step), self.model, parts)
            if in_memory and self._holders.peer:
                parts = snapshot_parts.broadcast_parts(strategy, parts)
                holds, peer = self._holders.local and not chief, 0
                if shards.has_shards(self.model):
                    (peer,) = map(int, communicator.sum_over_workers(strategy, [np.int64(holds * session.rank)]))
                with shards.gather_full_state(self.model, peer):
                    if holds:
                        session.hold_in_memory(step_folders.folder_name(step, copy=True), self.model, parts)

    def _parts(self, values: list, logs: Mapping) -> dict:
        """Returns the parts of a checkpoint of this step, without the model."""
        named = {f"{i}.{j}": value for i, arrays in enumerate(values) for j, value in enumerate(arrays)}
        step_state = {"logs": logs, "metrics": metrics.described(self.model), "order": self._order}
        return self._report.parts(named, epoch_step=self._position.epoch_step, **step_state)


@contextlib.contextmanager
def _assigned(pairs):
    """Assigns values to variables, and restores the old ones at the end."""
    old_values = [np.asarray(variable) for variable, _ in pairs]
    for variable, value in pairs:
        variable.assign(value)
    try:
        yield
    finally:
        for (variable, _), value in zip(pairs, old_values, strict=True):
            variable.assign(value)


class PrepareMidEpochResume(TrainingPart):
    """Holds, for `MidEpochResume`, the restored values of a training that resumes within an epoch. Put it first.

    Args:
        training: The training.
        begin: (epoch's next step, rows of it that were trained on before), see `sampling.regrouped`.
    """

    def __init__(self, training: Training, begin: tuple[int, int]):
        super().__init__()
        self._training, self.begin = training, begin
        self._begins = True

    @classmethod
    def create(cls, training: Training) -> PrepareMidEpochResume | None:
        """Returns the part if the training resumes after some steps of an epoch, or joins others in an epoch.

        The rows of a step may scale with the number of workers. If steps have another number of rows now, it resumes
        after the rows of earlier steps.
        """
        state = training.state
        if state is None or (training.replacement_state is None and not state.epoch_step):
            return None
        begin = state.epoch_step, 0
        differs = None if training.replacement_state else sampling.differences(state.order, training.order)
        if differs:
            scaled = state.batch_scale != training.options.scale
            begin = sampling.regrouped(state.order, training.order, state.epoch_step) if scaled else None
        if begin is None:
            warn_user(
                f"Epoch {state.epoch + 1} restarts, with weights that have seen {state.epoch_step} of its steps: these "
                f"would have other rows now ({differs})",
            )
            return None
        return cls(training, begin)

    def on_train_begin(self, logs=None):
        model = self.model
        variables = [*model.variables, *keras_objects.seeds_of(model), *model_optimizers.variables(model)]
        counted = {id(v) for v in model.metrics_variables}
        self.variables = [(v, np.array(v)) for k, v in {id(v): v for v in variables}.items() if k not in counted]
        self.iterator = self._training.iterator()

    def on_epoch_begin(self, epoch, logs=None):
        if self._begins:
            self._begins = False
            self.callback_copies, self.random = self._training.states.copy_states(), random_state.random_states()


class MidEpochResume(TrainingPart):
    """Resumes a training after some steps of an epoch; put it after all callbacks except those that report.

    Args:
        training: The training, with a checkpoint.
        begin_state: Holds the restored values.
    """

    raytf_after_agreement = True

    def __init__(self, training: Training, begin_state: PrepareMidEpochResume):
        super().__init__()
        self._begin_state: PrepareMidEpochResume | None = begin_state
        self._repeats_step: tuple | None = None
        self._replacement_state, self._position, self._states = (
            training.replacement_state,
            training.position,
            training.states,
        )
        self._epoch, self._logs, self._names = training.state.epoch, training.state.logs, training.state.metrics
        self._step, self._skip = begin_state.begin
        self._metrics = checkpoints.metrics_of(training.folder)
        self._unbuilt_variables: dict[int, list[np.ndarray]] = {}

    @classmethod
    def create(cls, training: Training) -> MidEpochResume | None:
        begin_state = training.parts.get(PrepareMidEpochResume)
        return None if begin_state is None else cls(training, begin_state)

    def on_epoch_begin(self, epoch, logs=None):
        """Restores metrics and what callbacks have changed, and makes the first epoch begin at its step.

        A callback may have chosen another epoch than the checkpoint's: that one begins with its first step.
        """
        begin_state, self._begin_state = self._begin_state, None
        if begin_state is None or epoch != self._epoch:
            return
        self._restore(begin_state.callback_copies, begin_state.variables, begin_state.random)
        if (
            self._replacement_state is not None and not self._replacement_state.after_step
        ):  # callbacks had the begin of the execution's batch
            self._repeats_step = begin_state.callback_copies, begin_state.variables, begin_state.random
        try:
            self._unbuilt_variables = {
                i: self._metrics[i] for i in metrics.restore_sums(self.model, self._metrics, self._names)
            }
        except ValueError as error:  # with resume=True the model may have other metrics
            warn_user(
                f"The metrics of epoch {epoch + 1} count the steps after its first {self._step} alone, as the "
                f"checkpoint knows others: {error}",
            )
        self._begin_at(begin_state.iterator, epoch)
        if (
            self._replacement_state is None and self._step >= self._position.steps
        ):  # the epoch's logs are the checkpoint's
            metrics.finish_logs(self.model, self._logs)

    def _restore(self, values: Sequence[tuple], variables: Sequence[tuple], random: Mapping) -> None:
        for variable, value in variables:
            if not np.array_equal(np.asarray(variable), value):
                variable.assign(value)
        self._states.restore_copies(values)
        random_state.restore_random_states(random)

    def _begin_at(self, iterator, epoch: int) -> None:
        dataset = self._position.resume_at(epoch, self._step, self._skip)
        first = 1 if self._skip else None
        if self._replacement_state is not None:  # the other workers may be within an execution of several steps
            first = max(1, self.model.steps_per_execution - self._replacement_state.steps_in_execution)
        if first is None or self._step + first >= self._position.steps:
            iterator.begin_at(self._step, dataset)
            return
        remaining = functools.partial(self._position.resume_at, epoch, self._step + first)
        iterator.begin_at(self._step, worker_part.mark_worker_part(dataset.take(first)), (first, remaining))

    def on_train_batch_begin(self, batch, logs=None):
        """Reverts, after all callbacks, their second `on_train_batch_begin` of the first execution."""
        saved_state, self._repeats_step = self._repeats_step, None
        if saved_state is not None:
            callback_copies, variables, random = saved_state
            own_ids = {id(v) for v in own_state.variables_of(self.model)}  # the worker's own, which were restored since
            self._restore(callback_copies, [pair for pair in variables if id(pair[0]) not in own_ids], random)

    def on_train_batch_end(self, batch, logs=None):
        """Restores metrics that were created in the first execution."""
        unbuilt, self._unbuilt_variables = self._unbuilt_variables, {}
        if unbuilt:
            metrics.add(self.model, unbuilt)
