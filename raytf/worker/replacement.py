"""A worker that takes a lost one's place in a KerasTrainer: what it needs of the others, and how its training begins.

Where no process can take that place, one of the others keeps a checkpoint of the steps that all have made, and all
start anew from it (`keep`): weights and optimizer are those before the step that waits, and what each had for itself is
what it had passed on, the lost one too. One that is lost in a step whose sums are all there, before it has passed on
what came of it, has what it had a step before: the metrics of the epoch lack its rows of that step, which is said.

It gets the weights and the optimizer's state of one that waits within the next step, which have not changed in it; what
the lost one had for itself, which that one had passed on; and where callbacks stand that all workers follow alike. Its
`fit` begins with the step that the others are in; until then nothing is exchanged (`healing.Detached`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from raytf import activity
from raytf.collectives import gradient_ring, healing
from raytf.collectives.healing import Place
from raytf.collectives.ring import Listener
from raytf.errors import RaytfError
from raytf.parallel import double_writes, local_sgd, metrics, own_state
from raytf.storage import checkpoint_files, scratch, step_folders
from raytf.worker import checkpoint
from raytf.worker.session import read_files


@contextlib.contextmanager
def survivable(heals: bool, model, position, report, agreed: dict[str, Any], order: dict, session) -> Iterator[None]:
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
    """
    healer, holder = healing.here, gradient_ring.of(model.distribute_strategy)
    refused = _refused(model, holder) if heals else "the run is not to be healed"
    if refused is not None:
        healer.place = None
        healer.disarm(refused)
        yield
        return

    def listen() -> Listener:
        return gradient_ring.listener(gradient_ring.members(None))

    def parts_of(value: Callable[[keras.Variable], np.ndarray], logs: Mapping[str, float]) -> dict[str, Any]:
        named = {f"{i}.{j}": value(v) for i, metric in enumerate(model.metrics) for j, v in enumerate(metric.variables)}
        epoch_step = position.epoch_step + healer.within
        told = {"logs": logs, "metrics": metrics.described(model), "order": dict(order), "epoch_step": epoch_step}
        return report.parts(named, ahead=healer.within, **told)

    def keep(owned: Sequence[bytes], behind: Collection[int]) -> int:
        if early := own_state.written_early(model):
            raise RaytfError(f"its steps change {', '.join(early)} before gradients are summed, or behind updates")
        variables = own_state.variables_of(model)
        values = metrics.together(model, variables, [own_state.values_of(model, its) for its in owned], behind)
        known = {id(v): value for v, value in zip(variables, values, strict=True)}
        whole = position.epoch_step + healer.within >= position.steps
        logs = metrics.logs_of(model, known) if whole else {}
        own_state.put(model, values)  # this worker makes no other step
        step = position.step + healer.within
        session.keep_now(
            step_folders.name_of(step, copy=holder.ring.rank > 0), model, parts_of(lambda v: known[id(v)], logs)
        )
        return step

    def image() -> Place:
        if position.skipped:
            raise RaytfError("the others have made no step since they went on with another batch")
        within = healer.within
        epoch_step = position.epoch_step + within
        parts = parts_of(lambda v: np.zeros(tuple(v.shape), v.dtype), {})
        with scratch.folder() as folder:
            version = checkpoint_files.VERSION if epoch_step else checkpoint_files.VERSION_OF_EPOCHS
            checkpoint.write(folder, model, parts, version)
            files = read_files(folder)
        stand = {name: callback.told() for name, callback in agreed.items()}
        stand |= {"steps_per_execution": model.steps_per_execution, "reports": session.reports_made()}
        stand["looking"] = double_writes.looking()
        if healer.at_end:
            stand["last"] = metrics.last_logs(model)
        return Place(position.step + within, healer.tag, within + healer.begun, healer.at_end, files, b"", stand)

    can_keep = hasattr(session, "keep_now")
    healer.arm(listen, image, session.tell_of_loss, position.step, keep if can_keep else None)
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


class First(keras.callbacks.Callback):
    """Before all other callbacks: says that what they do at an epoch's end is not to be survived."""

    raytf_local_batches = True

    def on_epoch_end(self, epoch, logs=None):
        healing.here.close()
        if healing.here.healed:
            own_state.check_alike(self.model)


class Last(keras.callbacks.Callback):
    """Behind all other callbacks: says from where on a loss can be survived, or takes the place of a lost worker.

    Args:
        position: the `callbacks.FeedCallback`.
        place: that this worker takes, or None.
    """

    raytf_local_batches = True
    raytf_after_agreement = True

    def __init__(self, position, place: Place | None):
        super().__init__()
        self._position, self._place = position, place

    def on_epoch_begin(self, epoch, logs=None):
        place, self._place = self._place, None
        if place is None and healing.here.armed:
            own_state.began(self.model)
        elif place is not None:
            self._take(place)

    def _take(self, place: Place) -> None:
        own_state.take(self.model, place.own)
        activity.here.step = place.step
        if place.at_end:
            self.model.__dict__["_raytf_last"] = place.agreed["last"]
            healing.here.end_epoch()
        healing.here.enter(place.within)

    def on_train_batch_end(self, batch, logs=None):
        if self._position.epoch_step >= self._position.steps and self._place is None:
            healing.here.end_epoch()


def first_execution(place: Place) -> int:
    """Steps of the first execution: the others are within one of several."""
    return max(1, place.agreed["steps_per_execution"] - place.within)
