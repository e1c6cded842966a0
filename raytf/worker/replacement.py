"""The workers' half of recovery in a KerasTrainer: what a replacement worker needs, and how its training begins.

A replacement worker gets weights and optimizer of a worker that waits in the next step. That step has not changed them.
It also gets the lost worker's own state from its successor, and the state of callbacks that all workers share. Its
`fit` begins with the step of the others; until then it exchanges nothing (`recovery_client.PlaceholderRing`).

If no process can replace the lost worker, another worker saves a checkpoint of the last common step
(`save_checkpoint`). All workers restart from it. See docs/design/recovery.md.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf import activity
from raytf.collectives import communicator, gradient_ring, recovery_client
from raytf.collectives.recovery_client import ReplacementState
from raytf.compat.keras import pythonify_logs
from raytf.errors import RaytfError, one_line
from raytf.parallel import (
    assigned,
    callbacks,
    double_writes,
    epoch_iterator,
    local_sgd,
    metrics,
    model_optimizers,
    own_state,
    shards,
)
from raytf.storage import checkpoint_files, step_folders
from raytf.worker import checkpoint
from raytf.worker.callbacks import EpochReports
from raytf.worker.part import Training, TrainingPart

# Bytes of a row in `_variable_checksum`.
_ROW_BYTES = 1 << 13


def _unrecoverable(model, holder) -> str | None:
    """Returns why the loss of a worker is not recoverable, as a clause, or None."""
    if holder is None:
        return "workers do not sum gradients in raytf's ring"
    if shards.has_shards(model):
        return "with shard_optimizer a lost worker's share of the optimizer's state exists nowhere else"
    if local_sgd.averaging_interval(model.distribute_strategy) > 1:
        return "with sync_every workers have different weights"
    size = own_state.bytes_of(model)
    if size is None or size > recovery_client.MOST_BYTES:
        return (
            f"metrics and moving statistics have {size} bytes, more than {recovery_client.MOST_BYTES} to be passed on"
        )
    return None


class _StepBoundary:
    """Snapshot after a step of what a replacement worker needs; a later call returns the `ReplacementState`.

    It is taken after the last step of an epoch, and between steps with an exchange between workers. That is one for a
    checkpoint, for the check whether one is due, or for callbacks that observe batches. The replacement worker then
    repeats the end of the epoch, with validation and callbacks, or the end of the batch. It writes again what a lost
    chief has written of it.

    Callbacks may change the model after the step. The snapshot tracks what they assign from Python, such as the
    learning rate (`assigned.AssignmentWatch`). At the end of an epoch it compares checksums of all variables that
    workers have alike. After other steps that would cost part of each step: it covers only variables that compiled
    callbacks assign. The next step detects other assignments (`own_state.check_alike`).

    Args:
        model: The built model.
        parts: Parts of a checkpoint of this step, see `checkpoint.checkpoint_parts`.
        shared_state: See `ReplacementState`.
        step: Number of steps in all.
        tag: See `ReplacementState`.
        epoch_ends: Whether the step was the last one of the epoch, and callbacks were called for it.
    """

    def __init__(
        self,
        model,
        parts: dict[str, Any],
        shared_state: dict[str, Any],
        step: int,
        tag: int,
        epoch_ends: bool,
    ):
        # a copy, as callbacks continue to change the arrays
        arrays = {name: np.array(array) for name, array in parts[checkpoint_files.ARRAYS].items()}
        self._model, self._parts, self._shared_state = model, parts | {checkpoint_files.ARRAYS: arrays}, shared_state
        self._step, self._tag, self._epoch_ends = step, tag, epoch_ends
        self._last = model.__dict__["_raytf_last"]
        self._watch = assigned.AssignmentWatch(model)
        unseen = own_state.alike(model) if epoch_ends else assigned.in_graphs(model)
        self._digests = [(v, _variable_checksum(self._local_value(v))) for v in unseen]

    def _local_value(self, variable) -> np.ndarray:
        return own_state.local_value(self._model.distribute_strategy, variable)

    def __call__(self) -> ReplacementState:
        changed = []
        for variable, old_value in self._watch.old_values():
            kind, shape = tf.as_dtype(variable.dtype).as_numpy_dtype, tuple(variable.shape)
            values = (old_value, self._local_value(variable))
            changed.append((variable, *(value.view(kind).reshape(shape).copy() for value in values)))
        strategy = self._model.distribute_strategy
        own_state.put_each(strategy, [(variable, saved) for variable, saved, _ in changed])
        try:
            if changed_paths := [
                v.path for v, number in self._digests if _variable_checksum(self._local_value(v)) != number
            ]:
                raise RaytfError(f"a callback has changed {', '.join(changed_paths)} since the last step")
            files = checkpoint.checkpoint_files_of(self._model, self._parts)
        finally:
            own_state.put_each(strategy, [(variable, current) for variable, _, current in changed])
        shared_state = self._shared_state | {"last": metrics.last_logs(self._model, self._last)}
        ends = self._epoch_ends
        return ReplacementState(self._step, self._tag, 0, ends, files, b"", shared_state, after_execution=not ends)


def _variable_checksum(variable: np.ndarray) -> int:
    """Returns a checksum of a variable's bytes.

    It is a CRC of sums over rows of `_ROW_BYTES` bytes. It takes a fifth of the time of a CRC of all bytes.
    """
    whole = variable.size // _ROW_BYTES * _ROW_BYTES
    sums = np.add.reduce(variable[:whole].view(np.uint64).reshape(-1, _ROW_BYTES // 8), axis=0)
    return zlib.crc32(variable[whole:], zlib.crc32(sums))


class CallbackPhases(TrainingPart):
    """Marks, before all other callbacks, the begin of a batch and the end of an epoch as phases with callbacks."""

    def on_train_batch_begin(self, batch, logs=None):
        recovery_client.client.begin_batch()

    def on_epoch_end(self, epoch, logs=None):
        # if recoverable, a recovery need not be visible to all workers here; the next step checks
        if not recovery_client.client.mark_epoch_end() and recovery_client.client.recovered:
            own_state.check_alike(self.model)


class RecoveryCallback(TrainingPart):
    """Makes the loss of a worker recoverable where it can be, and sets up a replacement worker. Put it last.

    It marks, after all other callbacks, from when a loss is recoverable. Between two steps of an epoch this needs a
    training without reports there. Between an epoch and the next one it needs a session that counts reports.

    Args:
        training: The training.
    """

    raytf_after_agreement = True

    def __init__(self, training: Training):
        super().__init__()
        self._training, self._position, self._replacement_state_taken = (
            training,
            training.position,
            training.replacement_state,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps_per_execution": self._training.model.steps_per_execution}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.model.steps_per_execution = state["steps_per_execution"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Allows recovery, if the training does, while it runs."""
        training, recovery = self._training, recovery_client.client
        model, session = training.model, training.session
        self._holder = gradient_ring.ring_of(model.distribute_strategy)
        allowed = training.options.recovers and session.recovers
        refused = _unrecoverable(model, self._holder) if allowed else "TensorflowConfig(heal=False)"
        if refused is not None:
            recovery.replacement_state = None
            recovery.disarm(refused)
            yield
            return
        self._chief_only = callbacks.chief_state_classes(training.users)
        listen = lambda: gradient_ring.listener(gradient_ring.members(None))
        size = sum(map(communicator.bytes_of, [*model.variables, *model_optimizers.variables(model)]))
        save = self._save if session.saves_at_loss else None
        ends = session.numbers_reports
        recovery.arm(
            listen,
            self._replacement_state,
            session.report_loss,
            self._position.step,
            save,
            self._take_boundary,
            ends,
            size,
        )
        try:
            yield
        finally:
            recovery.disarm()

    def _pending_steps(self) -> int:
        """Returns the number of steps for which callbacks were not called yet."""
        return recovery_client.client.step - self._position.step

    def _steps_made(self) -> int:
        """Returns the number of steps of the epoch that are made."""
        return self._position.epoch_step + self._pending_steps()

    def _files(self, value: Callable[[keras.Variable], np.ndarray], logs: Mapping[str, float]) -> dict[str, Any]:
        training = self._training
        model, report = training.model, training.parts[EpochReports]
        named = {f"{i}.{j}": value(v) for i, metric in enumerate(model.metrics) for j, v in enumerate(metric.variables)}
        state = {"logs": logs, "metrics": metrics.described(model), "order": dict(training.order)}
        return report.parts(named, steps_ahead=self._pending_steps(), epoch_step=self._steps_made(), **state)

    def _save(self, owned: Sequence[bytes], older_ranks: Collection[int]) -> int:
        """Saves a checkpoint of the last common step, see `RecoveryClient.arm`; this worker makes no further step.

        If a worker is lost before it sends its state of the last step, the previous step's state is used. The metrics
        of the epoch then lack its rows of one step, and a warning reports it.
        """
        model, session, step = self._training.model, self._training.session, recovery_client.client.step
        if changed_early := own_state.written_early(model):
            raise RaytfError(
                f"its steps change {', '.join(changed_early)} before gradients are summed, or after updates"
            )
        variables = own_state.variables_of(model)
        values = metrics.merge_states(
            model, variables, [own_state.values_of(model, content) for content in owned], older_ranks
        )
        known = {id(v): value for v, value in zip(variables, values, strict=True)}
        logs = metrics.logs_of(model, known) if self._steps_made() >= self._position.steps else {}
        own_state.put(model, values)
        name = step_folders.folder_name(step, copy=self._holder.ring.rank > 0)
        session.save_sync(name, model, self._files(lambda v: known[id(v)], logs))
        return step

    def _shared(self) -> dict[str, Any]:
        """Returns the state that all workers share."""
        states = {kind.__name__: part.state_dict() for kind, part in self._training.parts.items()}
        reports = self._training.session.reports_made()
        return {"parts": states, "reports": reports, "comparing_writes": double_writes.is_comparing()}

    def _check_chief(self) -> None:
        """Raises RaytfError on other workers than the chief if a snapshot needs callbacks that only the chief has."""
        if self._chief_only and self._holder.ring.rank > 0:
            raise RaytfError(f"the state of {', '.join(self._chief_only)} existed on the lost chief only")

    def _replacement_state(self) -> ReplacementState:
        model, recovery = self._training.model, recovery_client.client
        self._check_chief()
        if self._position.skipped:
            raise RaytfError("no step was made since the run resumed with another batch size")
        files = checkpoint.checkpoint_files_of(model, self._files(_zeros_like, {}))
        execution_steps, shared_state = recovery.steps_in_execution + recovery.begun, self._shared()
        if recovery.at_end:
            shared_state["last"] = metrics.last_logs(model, model.__dict__["_raytf_last"])
        return ReplacementState(recovery.step, recovery.tag, execution_steps, recovery.at_end, files, b"", shared_state)

    def _take_boundary(self, epoch_ends: bool) -> Callable[[], ReplacementState] | None:
        training, recovery = self._training, recovery_client.client
        steps = training.options.report_steps is None
        observed = steps and training.model.__dict__.get("_raytf_sync_batches")
        if not training.session.numbers_reports and self._steps_made() >= self._position.steps:
            return None
        exchanges = lambda: any(part.exchanges(recovery.step) for part in training.parts.values())
        if not (epoch_ends or observed or (steps and exchanges())):
            return None
        try:
            self._check_chief()
            files = self._files(_zeros_like, {})
            return _StepBoundary(training.model, files, self._shared(), recovery.step, recovery.tag, epoch_ends)
        except RaytfError as error:
            why = str(error)
        except Exception as error:  # of a callback's `get_state`, which otherwise only the chief's checkpoint calls
            why = f"what a replacement needs could not be recorded: {one_line(error)}"

        def refused() -> ReplacementState:
            raise RaytfError(why)

        return refused

    def on_epoch_begin(self, epoch, logs=None):
        replacement_state, self._replacement_state_taken = self._replacement_state_taken, None
        if replacement_state is None and recovery_client.client.armed:
            own_state.send_at_epoch_begin(self.model)
        elif replacement_state is not None:
            self._take_state(replacement_state)

    def _take_state(self, replacement_state: ReplacementState) -> None:
        own_state.take(self.model, replacement_state.worker_state)
        activity.tracker.step = replacement_state.step
        if replacement_state.after_step:
            recovery_client.client.tag = replacement_state.tag
            self.model.__dict__["_raytf_last"] = replacement_state.shared_state["last"]
        if replacement_state.at_end:
            recovery_client.client.end_epoch()
        recovery_client.client.join_at_next_exchange(replacement_state.steps_in_execution)
        if replacement_state.after_execution:
            self._end_batch()

    def _end_batch(self) -> None:
        """Calls `on_train_batch_end` of all callbacks for the batch after which this worker begins."""
        recovery_client.client.steps_made()
        attributes, (logs, rows) = self.model.__dict__, self.model.__dict__["_raytf_last"]
        if attributes.get("_raytf_sync_batches"):
            logs = metrics.global_logs(self.model, logs, rows)
        logs = pythonify_logs(logs)
        for callback in attributes["_raytf_callbacks"]:
            try:
                callback.on_train_batch_end(self._position.epoch_step - 1, logs)
            except AttributeError as error:
                raise RaytfError(
                    "A callback of a replacement worker must accept the end of a batch of which it has not seen the "
                    f"begin, received: {type(callback).__name__} with {one_line(error)}. What it keeps between them "
                    "must be a number, a text, an array, a list or dict of these, or what get_state() gives."
                ) from error
        if self.model.stop_training:  # `fit` checks this only after a step of its own
            epoch_iterator.newest_iterator().begin_at(self._position.steps, None)

    def on_train_batch_end(self, batch, logs=None):
        if self._position.epoch_step >= self._position.steps and self._replacement_state_taken is None:
            recovery_client.client.end_epoch()


def _zeros_like(variable: keras.Variable) -> np.ndarray:
    """Returns zeros instead of a worker's own metrics, which a replacement gets from the lost one's successor."""
    return np.zeros(tuple(variable.shape), variable.dtype)
