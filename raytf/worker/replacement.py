"""A worker that takes a lost one's place in a KerasTrainer: what it needs of the others, and how its training begins.

Where no process can take that place, one of the others keeps a checkpoint of the steps that all have made, and all
start anew from it (`keep`): weights and optimizer are those before the step that waits, and what each had for itself is
what it had passed on, the lost one too. One that is lost in a step whose sums are all there, before it has passed on
what came of it, has what it had a step before: the metrics of the epoch lack its rows of that step, which is said.

It gets the weights and the optimizer's state of one that waits within the next step, which have not changed in it; what
the lost one had for itself, which that one had passed on; and where callbacks stand that all workers follow alike. Its
`fit` begins with the step that the others are in; until then nothing is exchanged (`healing.Detached`).

One that takes the place of a worker that was lost at the end of an epoch, or before the first step of the next one is
made, begins behind the epoch's last step. What another one held then is noted there (`_Moment`), as callbacks may
have changed it since. It makes the validation, and its callbacks are told of the end of the epoch, as in a run that
goes on from a checkpoint of that step: what a lost chief has written of it is written again. Behind an execution of
steps it is noted, too, where workers meet before the next one: for a checkpoint or the look whether one is due, or as
callbacks look at batches. There its callbacks are told of the batch first.
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
from raytf.collectives import communicator, gradient_ring, healing
from raytf.collectives.healing import ReplacementState
from raytf.collectives.ring import Listener
from raytf.compat.keras import pythonify_logs
from raytf.errors import RaytfError, in_a_line
from raytf.parallel import (
    assigned,
    callbacks,
    double_writes,
    epoch_iterator,
    local_sgd,
    metrics,
    model_optimizers,
    own_state,
)
from raytf.storage import checkpoint_files, step_folders
from raytf.worker import checkpoint

# See `_number`.
_ROW_BYTES = 1 << 13


@contextlib.contextmanager
def survivable(
    heals: bool,
    model,
    position,
    report,
    agreed: dict[str, Any],
    order: dict,
    session,
    users: Sequence[keras.callbacks.Callback],
    steps: bool = True,
    ends: bool = False,
) -> Iterator[None]:
    """Within it the loss of a worker in a step can be survived, where it can at all.

    Args:
        heals: whether the run is to survive it.
        model: built.
        position: the `callbacks.FeedCallback`.
        report: the `callbacks.ReportCallback`.
        agreed: callbacks that all workers follow alike, by name; `told()` of each gives where it stands.
        order: `Feed.order` of the training rows.
        session: the run around it: it knows how many reports were made, is told of a loss, and may keep a checkpoint
            when it is asked to (`keep_now`).
        users: the user's callbacks.
        steps: whether it can be survived between two steps of an epoch, too: no report is made there.
        ends: and between the last step of an epoch and the first one of the next: the session knows which reports are
            made.
    """
    healer, holder = healing.here, gradient_ring.of(model.distribute_strategy)
    refused = _refused(model, holder) if heals else "the run is not to be healed"
    if refused is not None:
        healer.place = None
        healer.disarm(refused)
        yield
        return

    alone = callbacks.held_by_chief(users)
    meeting = [callback for callback in agreed.values() if hasattr(callback, "meets")]

    def ahead() -> int:
        """Steps that are made, of which callbacks have not been told."""
        return healer.step - position.step

    def listen() -> Listener:
        return gradient_ring.listener(gradient_ring.members(None))

    def parts_of(value: Callable[[keras.Variable], np.ndarray], logs: Mapping[str, float]) -> dict[str, Any]:
        named = {f"{i}.{j}": value(v) for i, metric in enumerate(model.metrics) for j, v in enumerate(metric.variables)}
        epoch_step = position.epoch_step + ahead()
        told = {"logs": logs, "metrics": metrics.described(model), "order": dict(order), "epoch_step": epoch_step}
        return report.parts(named, ahead=ahead(), **told)

    def keep(owned: Sequence[bytes], behind: Collection[int]) -> int:
        if early := own_state.written_early(model):
            raise RaytfError(f"its steps change {', '.join(early)} before gradients are summed, or behind updates")
        variables = own_state.variables_of(model)
        values = metrics.together(model, variables, [own_state.values_of(model, its) for its in owned], behind)
        known = {id(v): value for v, value in zip(variables, values, strict=True)}
        whole = position.epoch_step + ahead() >= position.steps
        logs = metrics.logs_of(model, known) if whole else {}
        own_state.put(model, values)  # this worker makes no other step
        step = healer.step
        session.keep_now(
            step_folders.name_of(step, copy=holder.ring.rank > 0), model, parts_of(lambda v: known[id(v)], logs)
        )
        return step

    def standing() -> dict[str, Any]:
        """Where those stand that all workers follow alike."""
        stand = {name: callback.told() for name, callback in agreed.items()}
        stand |= {"steps_per_execution": model.steps_per_execution, "reports": session.reports_made()}
        return stand | {"looking": double_writes.looking()}

    def nothing(variable: keras.Variable) -> np.ndarray:
        return np.zeros(tuple(variable.shape), variable.dtype)

    def check_chief() -> None:
        """A copy is asked of the first worker that is left, which has other callbacks than the chief."""
        if alone and holder.ring.rank > 0:
            raise RaytfError(f"what {', '.join(alone)} held was the chief's alone")

    def image() -> ReplacementState:
        check_chief()
        if position.skipped:
            raise RaytfError("the others have made no step since they went on with another batch")
        files = checkpoint.files(model, parts_of(nothing, {}))
        within, stand = healer.within + healer.begun, standing()
        if healer.at_end:
            stand["last"] = metrics.last_logs(model, model.__dict__["_raytf_last"])
        return ReplacementState(healer.step, healer.tag, within, healer.at_end, files, b"", stand)

    def note(epoch_ends: bool) -> Callable[[], ReplacementState] | None:
        made = position.epoch_step + ahead()
        looks = steps and model.__dict__.get("_raytf_sync_batches")
        if not ends and made >= position.steps:
            return None
        if not (epoch_ends or looks or (steps and any(callback.meets(healer.step) for callback in meeting))):
            return None
        try:
            check_chief()
            return _Moment(model, parts_of(nothing, {}), standing(), healer.step, healer.tag, epoch_ends)
        except RaytfError as error:
            why = str(error)
        except Exception as error:  # of a callback's `get_state`, which only the chief's checkpoint needs otherwise
            why = f"what a process in its place would need could not be noted: {in_a_line(error)}"

        def refused() -> ReplacementState:
            raise RaytfError(why)

        return refused

    can_keep = hasattr(session, "keep_now")
    size = sum(map(communicator.bytes_of, [*model.variables, *model_optimizers.variables(model)]))
    healer.arm(listen, image, session.tell_of_loss, position.step, keep if can_keep else None, note, ends, size)
    try:
        yield
    finally:
        healer.disarm()


def _refused(model, holder) -> str | None:
    """Why the loss of a worker cannot be survived, as a clause, or None."""
    if holder is None:
        return "workers do not sum gradients in raytf's ring"
    if local_sgd.every(model.distribute_strategy) > 1:
        return "with sync_every workers have different weights"
    size = own_state.bytes_of(model)
    if size is None or size > healing.MOST_BYTES:
        return f"metrics and moving statistics have {size} bytes, more than {healing.MOST_BYTES} to be passed on"
    return None


class _Moment:
    """What a process needs to go on behind a step, noted as that is made; later a call gives the `ReplacementState`.

    Callbacks may change the model behind it. What they assign from Python, as the learning rate, is noted then
    (`assigned.AssignmentWatch`). Where an epoch ends, it is noted of all variables whether they are the same, too.
    Behind other steps that would cost a part of each: there it is noted of those that a callback's compiled function is
    known to assign; what it assigns otherwise is seen behind the next step (`own_state.check_alike`).

    Args:
        model: built.
        parts: of a checkpoint of this moment, see `checkpoint.parts`.
        agreed: see `ReplacementState`.
        step: that are made in all.
        tag: see `ReplacementState`.
        epoch_ends: whether callbacks have been told of the step, which was the last one of the epoch.
    """

    def __init__(
        self,
        model,
        parts: dict[str, Any],
        agreed: dict[str, Any],
        step: int,
        tag: int,
        epoch_ends: bool,
    ):
        arrays = {name: np.array(array) for name, array in parts[checkpoint_files.ARRAYS].items()}  # callbacks go on
        self._model, self._parts, self._agreed = model, parts | {checkpoint_files.ARRAYS: arrays}, agreed
        self._step, self._tag, self._epoch_ends = step, tag, epoch_ends
        self._last = model.__dict__["_raytf_last"]
        self._watch = assigned.AssignmentWatch(model)
        unseen = own_state.alike(model) if epoch_ends else assigned.in_graphs(model)
        self._noted = [(v, _number(self._here(v))) for v in unseen]

    def _here(self, variable) -> np.ndarray:
        return own_state.here(self._model.distribute_strategy, variable)

    def __call__(self) -> ReplacementState:
        changed = []
        for variable, held in self._watch.before():
            kind, shape = tf.as_dtype(variable.dtype).as_numpy_dtype, tuple(variable.shape)
            then_and_now = (held, self._here(variable))
            changed.append((variable, *(its.view(kind).reshape(shape).copy() for its in then_and_now)))
        strategy = self._model.distribute_strategy
        own_state.put_each(strategy, [(variable, then) for variable, then, _ in changed])
        try:
            if others := [v.path for v, number in self._noted if _number(self._here(v)) != number]:
                raise RaytfError(f"a callback has changed {', '.join(others)} since the last step")
            files = checkpoint.files(self._model, self._parts)
        finally:
            own_state.put_each(strategy, [(variable, now) for variable, _, now in changed])
        agreed = self._agreed | {"last": metrics.last_logs(self._model, self._last)}
        ends = self._epoch_ends
        return ReplacementState(self._step, self._tag, 0, ends, files, b"", agreed, between=not ends)


def _number(held: np.ndarray) -> int:
    """A number that is another one where the bytes of a variable are others.

    Sums of every 1024th word, of which the digest is made, take a fifth of the time that this takes of the bytes.
    """
    whole = held.size // _ROW_BYTES * _ROW_BYTES
    sums = np.add.reduce(held[:whole].view(np.uint64).reshape(-1, _ROW_BYTES // 8), axis=0)
    return zlib.crc32(held[whole:], zlib.crc32(sums))


class First(keras.callbacks.Callback):
    """Before all others: says that callbacks are told of a batch, and of an epoch's end, which may not be survived."""

    raytf_local_batches = True

    def on_train_batch_begin(self, batch, logs=None):
        healing.here.begin_batch()

    def on_epoch_end(self, epoch, logs=None):
        # where it may, workers need not see here alike whether one was healed; the next step looks
        if not healing.here.tell_callbacks() and healing.here.healed:
            own_state.check_alike(self.model)


class RecoveryCallback(keras.callbacks.Callback):
    """Behind all other callbacks: says from where on a loss can be survived, or takes the place of a lost worker.

    Args:
        position: the `callbacks.FeedCallback`.
        place: that this worker takes, or None.
    """

    raytf_local_batches = True
    raytf_after_agreement = True

    def __init__(self, position, place: ReplacementState | None):
        super().__init__()
        self._position, self._place = position, place

    def on_epoch_begin(self, epoch, logs=None):
        place, self._place = self._place, None
        if place is None and healing.here.armed:
            own_state.began(self.model)
        elif place is not None:
            self._take(place)

    def _take(self, place: ReplacementState) -> None:
        own_state.take(self.model, place.own)
        activity.here.step = place.step
        if place.behind:
            healing.here.tag = place.tag
            self.model.__dict__["_raytf_last"] = place.agreed["last"]
        if place.at_end:
            healing.here.end_epoch()
        healing.here.enter(place.within)
        if place.between:
            self._tell_of_batch()

    def _tell_of_batch(self) -> None:
        """Tells all callbacks of the batch behind which this worker begins."""
        healing.here.steps_made()
        told, (logs, rows) = self.model.__dict__, self.model.__dict__["_raytf_last"]
        if told.get("_raytf_sync_batches"):
            logs = metrics.global_logs(self.model, logs, rows)
        logs = pythonify_logs(logs)
        for callback in told["_raytf_callbacks"]:
            try:
                callback.on_train_batch_end(self._position.epoch_step - 1, logs)
            except AttributeError as error:
                raise RaytfError(
                    "A callback in a lost worker's place must be able to be told of a batch's end, but not of its "
                    f"begin, received: {type(callback).__name__} with {in_a_line(error)}. What it keeps between them "
                    "must be a number, a text, an array, a list or dict of these, or what get_state() gives."
                ) from error
        if self.model.stop_training:  # what `fit` asks behind a step that it has made
            epoch_iterator.newest_iterator().begin_at(self._position.steps, None)

    def on_train_batch_end(self, batch, logs=None):
        if self._position.epoch_step >= self._position.steps and self._place is None:
            healing.here.end_epoch()


def first_execution(place: ReplacementState) -> int:
    """Steps of the first execution: the others are within one of several."""
    return max(1, place.agreed["steps_per_execution"] - place.within)
