"""Worker side of `raytf.fit`, `evaluate` and `predict`: a model comes from the driver, and returns to it.

The model and its traced functions stay in the process between calls, so that a second call starts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytf.collectives import healing
from raytf.collectives.healing import ReplacementState
from raytf.compat import keras_objects
from raytf.data.batch_spec import BatchSpec
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.streamed import StreamedDataset
from raytf.data.tf_data import TFData
from raytf.parallel import model_optimizers
from raytf.runtime.topology import Shard
from raytf.storage import step_folders
from raytf.train.worker_group import GroupWorker
from raytf.worker import checkpoint
from raytf.worker.callback_state import CallbackStates
from raytf.worker.checkpoint_every import Every
from raytf.worker.ending import StopTraining

# The current model: its key, itself, its objects, its input wait, and its predict function.
_kept: dict[str, Any] = {}
# Ends that measurement. Functions that were traced for a model hold its variable.
_measuring = contextlib.ExitStack()
# The state after the last complete epoch, for the driver if the training does not complete.
_last: dict[str, Any] = {}
# Number of workers that hold a copy of these weights, so that the loss of one worker loses nothing.
HOLD_LAST = 2


@dataclass(frozen=True, kw_only=True)
class Sending:
    """A model on its way to the workers.

    Args:
        key: Identifies the model.
        data: Result of `transport.write`, or None if the workers have it.
        values: Values of its variables.
        settings: Keras's settings in the driver.
        folder: The driver's current folder.
    """

    key: str
    data: bytes | None
    values: dict
    settings: dict
    folder: str


@dataclass(frozen=True, kw_only=True)
class FitDataset:
    """A dataset on its way to the workers.

    Args:
        dataset, batch, sampling: Arguments of `feed.open_feed`.
        structure: Structure of the tensors, see `arrays.Data`.
    """

    dataset: StoredDataset | StreamedDataset | TFData
    batch: BatchSpec
    sampling: Sampling
    structure: tuple | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of the workers in one call.

    Args:
        do: "fit", "evaluate" or "predict".
        model: The model, or its key.
        callbacks: Result of `transport.write` that refers to the model's objects.
        rows: Datasets by name: "train", "validation".
        seed: Seed of all random numbers.
        arguments: Arguments of Keras's method.
        steps_per_execution: The model's own value.
        board: A `progress.Board`, or None.
        chunk_steps: Number of steps after which predictions are sent.
        every: Schedule of mid-epoch checkpoints; None: no checkpoints.
        identity: Identity of the training, for its checkpoints.
        heals: Whether a lost worker is replaced in place, if possible.
        nan: Reaction to a loss that is NaN or infinite, see `epoch_checks.EpochChecks`.
    """

    do: str
    model: Sending
    callbacks: bytes | None
    rows: dict[str, FitDataset]
    seed: int
    arguments: dict[str, Any] = field(default_factory=dict)
    steps_per_execution: int = 1
    board: Any = None
    chunk_steps: int = 1
    every: Every | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    heals: bool = False
    nan: str = "warn"


class FitWorker(GroupWorker):
    """A worker that keeps its model after a call."""


def run(session, config: dict[str, Any]) -> int | None:
    """Runs the loop of a `worker_group.TrialRun`; reports the results to the driver.

    Returns:
        The steps after which a training ended on request; None if it is complete.
    """
    import keras

    from raytf.worker import context

    work: Work = config["work"]
    with contextlib.suppress(OSError):  # another host may not have it
        os.chdir(work.model.folder)
    distribution = context.get_strategy()
    model, sent = _model(work.model, distribution)
    _trace_anew(model, work)
    keras.utils.set_random_seed(work.seed % 2**32)
    do = {"fit": _fit, "evaluate": _evaluate, "predict": _predict}[work.do]
    return do(session, work, model, sent, distribution)


def _trace_anew(model, work: Work) -> None:
    """Drops the graphs of a kept model if the rows' shapes changed: with two shapes they would lose the rank."""
    spec_of = lambda dataset: dataset.looked.spec if isinstance(dataset, TFData) else None
    specs = {
        name: (rows.structure, rows.batch.features, rows.batch.labels, spec_of(rows.dataset))
        for name, rows in work.rows.items()
    }
    previous = _kept["specs"].get(work.do)
    _kept["specs"][work.do] = repr(specs)
    if previous is not None and previous != repr(specs):
        model.train_function = model.test_function = None
        _kept.pop("predict", None)


def _model(sending: Sending, distribution):
    import keras

    from raytf.fitting import transport
    from raytf.worker.input_wait import measure_input_wait

    if sending.data is None and _kept.get("key") == sending.key:
        transport.apply_settings(sending.settings)  # Keras keeps some of them per thread
        _kept["sent"].assign(sending.values)
        return _kept["model"], _kept["sent"]
    if sending.data is None:
        raise RuntimeError("the workers do not have the model that the driver takes them to have")
    _kept.clear()
    _measuring.close()
    keras.backend.clear_session()
    gc.collect()
    transport.apply_settings(sending.settings)
    with distribution.scope():
        (model,), sent = transport.read(sending.data, sending.values)
    waited = _measuring.enter_context(measure_input_wait())
    _kept.update(key=sending.key, model=model, sent=sent, waited=waited, plain=_plain_attributes(model), specs={})
    return model, sent


def _dataset(work: Work, name: str, session, place: ReplacementState | None = None):
    """Returns (the feed, its dataset in the model's structure)."""
    from raytf.data.feed import open_feed
    from raytf.worker import context

    rows, feed_state = work.rows[name], None if place is None else place.agreed.get(f"feed {name}")
    shared = {"name": name, "strategy": context.get_strategy(), "told": feed_state}
    feed = open_feed(rows.dataset, rows.batch, rows.sampling, Shard(session.rank, session.size), **shared)
    return feed, structured(feed.dataset(), rows.structure)


def structured(dataset, structure: tuple | None):
    """Returns a feed's dataset in the user's structure."""
    from keras import tree

    if structure is None:
        return dataset

    structure = tree.lists_to_tuples(structure)  # as Keras does: tf.data makes one tensor of a list

    def pack(*parts):
        parts = tuple(
            tree.map_structure(lambda name, part=part: part[name], names)
            for names, part in zip(structure, parts, strict=True)
        )
        # Keras interprets a single tuple or list as (x, y)
        return parts if len(parts) > 1 or isinstance(parts[0], tuple) else parts[0]

    return dataset.map(pack)


def _fit(session, work: Work, model, sent, distribution) -> int | None:
    from raytf.fitting import transport

    users, own = transport.read(work.callbacks, known=sent)
    everything = sent.joined(own)
    _last.clear()
    with session.checkpoint() as folder:
        replacement_state = healing.here.place
        if replacement_state is not None:
            own.assign(replacement_state.agreed["own"])
        history = _trained(session, work, model, users, own, everything, folder, replacement_state)
    if isinstance(history, StopTraining):
        return history.step
    totals = _totals(model, everything)
    _last.clear()
    report = {"values": everything.values() | totals if session.rank == 0 else None, "ended": True}
    report |= {"built": _built(model, everything), "history": (dict(history.history), list(history.epoch))}
    report["params"] = {k: v for k, v in (history.params or {}).items() if isinstance(v, (int, float, str, type(None)))}
    report["changed"] = bool(report["built"]) or _plain_attributes(model) != _kept["plain"]
    if session.rank == 0:
        report["callbacks"], report["lost"] = transport.write_attributes(users, everything)
    session.report(report, None)


def _trained(session, work: Work, model, users, own, everything, folder: str | None, place: ReplacementState | None):
    """Returns the history of a training, or the `StopTraining` that ended it.

    Args:
        users, own: Callbacks, and the objects that came with them.
        everything: These, and those of the model.
        folder: Folder of the checkpoint to resume from, or None.
        place: State of the lost worker that this one replaces, or None.
    """
    import keras
    import numpy as np

    from raytf.parallel import callbacks as callbacks_module
    from raytf.worker import callbacks, epoch_checks, figures, replacement
    from raytf.worker import steps_per_execution as steps_per_execution_module

    datasets = {name: _dataset(work, name, session, place) for name in work.rows}
    feed, dataset = datasets["train"]
    validation_data = [pair for name, pair in datasets.items() if name != "train"]
    looking = any(callbacks_module.looks_at_batches(c) for c in users)
    if model.steps_per_execution != work.steps_per_execution and looking:  # chosen by an earlier call
        model.steps_per_execution = work.steps_per_execution
        model.make_train_function(force=True)
    shared_state = {} if place is None else place.agreed
    if place is not None:
        model.steps_per_execution = shared_state["steps_per_execution"]
    kept = _Kept(session, work, model, users, feed, folder, place, [item for item, _ in validation_data])
    execution = steps_per_execution_module.ExecutionCallback(users, shared_state.get("execution"))
    checks = epoch_checks.EpochChecks(work.nan, users, session.rank, session.size)
    other_callbacks = [execution, kept.position, *users, checks, *kept.around]
    batch, waited = feed.global_batch, _kept["waited"]
    if session.rank == 0 and work.board is not None:
        other_callbacks.append(callbacks.ProgressCallback(work.board, batch, waited))
    other_callbacks += figures.of_run(None, kept.position, batch, session.rank, session.size, users, waited)

    class EpochReport(keras.callbacks.Callback):
        """Holds each epoch's state for a driver that interrupts the next one, or whose training fails in it."""

        raytf_local_batches = True
        raytf_after_agreement = True

        def on_epoch_end(self, epoch, logs=None):
            if session.rank < HOLD_LAST:
                history = self.model.history
                own = {number: np.array(value) for number, value in everything.values().items()}  # a step changes them
                built = {
                    name: (kind, trained, list(map(np.array, values)))
                    for name, (kind, trained, values) in _built(model, everything).items()
                }
                _last.update(values=own, built=built)
                _last["history"] = (dict(history.history), list(history.epoch))
            session.report({}, None)

    agreed = {"execution": execution, "own": _Values(own)}
    agreed |= {f"feed {name}": item for name, (item, _) in datasets.items() if hasattr(item, "told")}
    if kept.steps:
        agreed["kept"] = kept.steps[0]
    arguments, first_callbacks, last_callbacks = kept.going_on()
    survivable = replacement.survivable(
        work.heals, model, kept.position, kept.report, agreed, feed.order, session, users
    )
    try:
        with survivable:
            history = model.fit(
                dataset,
                validation_data=validation_data[0][1] if validation_data else None,
                callbacks=[
                    replacement.First(),
                    *first_callbacks,
                    *other_callbacks,
                    *last_callbacks,
                    kept.report,
                    EpochReport(),
                    *kept.steps,
                    replacement.RecoveryCallback(kept.position, place),
                ],
                verbose=0,
                shuffle=False,  # the feed does
                **arguments,
            )
    except StopTraining as stop:
        return stop
    kept.complete(history)
    return history


# Attributes that Keras and raytf change in a training.
_OF_A_TRAINING = ("built", "run_eagerly", "steps_per_execution", "stop_training", "stop_evaluating", "stop_predicting")


def _plain_attributes(model) -> dict[tuple[int, str], Any]:
    """Returns plain attributes of layers, not variables. A training that changes them leaves a different model."""
    return {
        (i, name): value
        for i, layer in enumerate(keras_objects.layers_of(model))
        for name, value in vars(layer).items()
        if isinstance(value, (bool, int, float, str))
        and (name == "_trainable" or not name.startswith("_"))
        and name not in _OF_A_TRAINING
    }


def last_epoch() -> dict:
    """Returns this worker's state after the last complete epoch; empty if there is none."""
    return dict(_last)


@dataclass(frozen=True)
class _Values:
    """The values of objects' variables, for a replacement worker."""

    objects: Any

    def told(self) -> dict:
        import numpy as np

        # it may be sent while the next step writes into the variables
        return {number: np.array(value) for number, value in self.objects.values().items()}


class _Kept:
    """The state to resume a training from, and the checkpoints of a named one.

    Args:
        session, work, model: Those of the training.
        users: Its callbacks.
        feed: The feed of its rows.
        folder: Folder of the checkpoint to resume from, or None.
        place: State of the lost worker that this one replaces, or None.
        others: The feeds of the validation.

    Attributes:
        position: Counts the steps.
        report: The callback that tracks the epochs, and saves their ends.
        around, steps: Callbacks after the user's, and after all others.
    """

    def __init__(self, session, work: Work, model, users, feed, folder, place: ReplacementState | None, others: list):
        from raytf.worker import callbacks, within_epoch

        self._session, self._work, self._model, self._feed = session, work, model, feed
        self._folder, self._place = folder, place
        self._first = work.arguments["initial_epoch"]
        self._state = state = checkpoint.read_state(folder) if folder else None
        self.position = callbacks.FeedCallback(feed, state.step if state else 0, others)
        self.around: list = []
        self.steps: list = []
        self._states = CallbackStates(users)
        if state is not None:
            checkpoint.restore(folder, model)
            if session.rank == 0:
                callbacks.continue_logs(users, self._first + state.epoch)
            self.around = [callbacks.RestoreCallback(folder, self._states, session.rank == 0, state.history)]
        named = work.every is not None
        self.report = callbacks.ReportCallback(
            named,
            seed=work.seed,
            callbacks=self._states,
            history=state.history if state else (),
            report=self._keep if named else _nothing,
            identity=work.identity,
            steps=lambda: self.position.step,
        )
        if not named:
            return
        more = {"order": feed.order, "validates": bool(others)}
        more["told"] = None if place is None else place.agreed["kept"]
        self.steps = [within_epoch.StepCheckpointCallback(work.every, session, self.position, self.report, **more)]

    def _keep(self, metrics: dict, moment) -> None:
        """Saves the end of an epoch in the same way as its steps."""
        if self._session.rank == 0:
            self._session.save_step(step_folders.name_of(moment.state.step), moment.model, moment.parts())

    def going_on(self) -> tuple[dict, list, list]:
        """Returns (arguments of `fit`, callbacks before and after the others)."""
        from raytf.worker import fit

        state, arguments = self._state, dict(self._work.arguments)
        if state is None:
            return arguments, [], []
        state = dataclasses.replace(state, epoch=self._first + state.epoch)
        arguments["initial_epoch"] = arguments["epochs"] if state.stopped else state.epoch
        order = self._feed.order
        first_callbacks, last_callbacks = fit.resumed(
            self._folder, state, self._states, self.position, order, place=self._place
        )
        return arguments, first_callbacks, last_callbacks

    def complete(self, history) -> None:
        """Restores earlier epochs in a history if no epoch was left to train."""
        from raytf.worker import callbacks

        if self._state is not None and not history.epoch:
            callbacks.put_back(history, self._state.history)


def _nothing(metrics: dict, moment) -> None:
    """Reports nothing: `EpochReport` already reports to the driver."""


def _built(model, everything) -> dict[str, tuple[str, list[int], list]]:
    """Returns optimizers built on this worker by name: (class, numbers of trained variables, variables' values)."""
    from raytf.fitting import transport

    optimizers = {}
    for name, optimizer in model_optimizers.of(model).items():
        new = [v for v in optimizer.variables if id(v) not in everything.numbers]
        if new and optimizer.built:
            trained = [everything.numbers.get(id(v)) for v in keras_objects.trained_by(optimizer)]
            optimizers[name] = type(optimizer).__name__, trained, [transport.value_of(v) for v in optimizer.variables]
    return optimizers


def _evaluate(session, work: Work, model, sent, distribution) -> None:
    from raytf.fitting import transport

    users, _ = transport.read(work.callbacks, known=sent)
    logs = model.evaluate(
        _dataset(work, "train", session)[1], callbacks=list(users), verbose=0, return_dict=True, **work.arguments
    )
    report = {"logs": {k: _plain(v) for k, v in logs.items()}, "values": _totals(model, sent), "ended": True}
    session.report(report, None)


def _totals(model, sent) -> dict:
    """Returns the metrics' variables summed over all workers, by number; collective: every worker must call it."""
    from raytf.collectives import communicator
    from raytf.fitting import transport
    from raytf.parallel import metrics

    if communicator.many_replicas(model.distribute_strategy):
        totals = [(v, total.numpy()) for v, total in metrics.synchronize(model)]
    else:
        totals = [(v, transport.value_of(v)) for v in model.metrics_variables]
    return {sent.numbers[id(v)]: value for v, value in totals if id(v) in sent.numbers}


def _plain(value):
    import numpy as np

    value = np.asarray(value)
    return value.item() if value.ndim == 0 else value


def _predict(session, work: Work, model, sent, distribution) -> None:
    """Predicts this worker's rows of each step, alone; the driver orders the results.

    A model's own `predict` ends in Keras's, which all workers call together, even without rows. It gives each of them
    the rows of all, and the chief sends these.
    """
    import numpy as np
    from keras import tree

    _, dataset = _dataset(work, "train", session)
    step = _predict_function(model, distribution)
    together = _predicts_itself(model) and session.size > 1
    parts: list[list] = []
    like = None  # the structure of the outputs, with the index of each
    for done, batch in enumerate(dataset, 1):
        rows = int(tree.flatten(batch)[0].shape[0])
        outputs = step(batch) if rows or together else None
        if session.rank == 0 if together else rows:
            flat = [np.asarray(output) for output in tree.flatten(outputs)]
            like = tree.pack_sequence_as(outputs, list(range(len(flat)))) if like is None else like
            parts.append([len(flat[0]), flat])
        else:
            parts.append([0, None])
        if done % work.chunk_steps == 0:
            session.report({"parts": parts, "like": like}, None)
            parts = []
    session.report({"parts": parts, "like": like, "ended": True}, None)


def _predicts_itself(model) -> bool:
    """Whether the model overrides `predict`, with its own use of the rows."""
    import keras

    return type(model).predict is not keras.Model.predict


def _predict_function(model, distribution) -> Callable:
    import tensorflow as tf

    from raytf.compat.tensorflow import traced_apart
    from raytf.data import worker_part

    if "predict" in _kept:
        return _kept["predict"]
    if _predicts_itself(model):
        part = lambda batch: worker_part.mark_worker_part(tf.data.Dataset.from_tensors(batch))
        return lambda batch: model.predict(part(batch), verbose=0)

    def step(batch):
        outputs = distribution.run(lambda data: type(model).predict_step(model, data), args=(batch,))
        return tf.nest.map_structure(lambda v: distribution.experimental_local_results(v)[0], outputs)

    _kept["predict"] = step if model.run_eagerly else traced_apart(step, reduce_retracing=True)
    return _kept["predict"]
