"""Worker side of `raytf.fit`, `evaluate` and `predict`: a model comes from the driver, and returns to it.

The model and its traced functions stay in the process between calls, so that a second call starts at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raytf.compat import keras_objects
from raytf.data.batch_spec import BatchSpec
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.streamed import StreamedDataset
from raytf.data.tf_data import TFData
from raytf.parallel import model_optimizers
from raytf.runtime.topology import Shard
from raytf.worker.job import TrainingOptions
from raytf.worker.stop import StopTraining

# The current model: its key, itself, its objects, its input wait, and its predict function.
_models: dict[str, Any] = {}
# Ends that measurement. Functions that were traced for a model hold its variable.
_measuring = contextlib.ExitStack()


@dataclass(frozen=True, kw_only=True)
class SentModel:
    """A model on its way to the workers.

    Args:
        key: Identifies the model.
        data: Result of `transport.serialize`, or None if the workers have it.
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
        structure: Structure of the tensors, see `arrays.RowData`.
    """

    dataset: StoredDataset | StreamedDataset | TFData
    batch: BatchSpec
    sampling: Sampling
    structure: tuple | None = None


@dataclass(frozen=True, kw_only=True)
class CallWork(TrainingOptions):
    """The work of the workers in one call.

    Args:
        do: "fit", "evaluate" or "predict".
        model: The model, or its key.
        callbacks: Result of `transport.serialize` that refers to the model's objects.
        rows: Datasets by name: "train", "validation".
        seed: Seed of all random numbers.
        arguments: Arguments of Keras's method.
        compiled_steps: Steps per execution of the user's model.
        chunk_steps: Number of steps after which predictions are sent.
    """

    do: str
    model: SentModel
    callbacks: bytes | None
    rows: dict[str, FitDataset]
    seed: int
    arguments: dict[str, Any] = field(default_factory=dict)
    compiled_steps: int = 1
    chunk_steps: int = 1


def run_call(session, config: dict[str, Any]) -> int | None:
    """Runs the loop of a `worker_group.TrialRun`; reports the results to the driver.

    Returns:
        The steps after which a training ended on request; None if it is complete.
    """
    import keras

    from raytf.worker import context

    work: CallWork = config["work"]
    with contextlib.suppress(OSError):  # another host may not have it
        os.chdir(work.model.folder)
    distribution = context.get_strategy()
    model, sent = _model(work.model, distribution)
    _drop_stale_traces(model, work)
    keras.utils.set_random_seed(work.seed % 2**32)
    do = {"fit": _fit, "evaluate": _evaluate, "predict": _predict}[work.do]
    return do(session, work, model, sent, distribution)


def _drop_stale_traces(model, work: CallWork) -> None:
    """Drops the graphs of a kept model if the rows' shapes changed: with two shapes they would lose the rank."""
    spec_of = lambda dataset: dataset.facts.spec if isinstance(dataset, TFData) else None
    specs = {
        name: (rows.structure, rows.batch.features, rows.batch.labels, spec_of(rows.dataset))
        for name, rows in work.rows.items()
    }
    previous = _models["specs"].get(work.do)
    _models["specs"][work.do] = repr(specs)
    if previous is not None and previous != repr(specs):
        model.train_function = model.test_function = None
        _models.pop("predict", None)


def _model(sending: SentModel, distribution):
    import keras

    from raytf.fitting import transport
    from raytf.worker.input_wait import measure_input_wait

    if sending.data is None and _models.get("key") == sending.key:
        transport.apply_settings(sending.settings)  # Keras keeps some of them per thread
        _models["sent"].assign(sending.values)
        return _models["model"], _models["sent"]
    if sending.data is None:
        raise RuntimeError("the workers do not have the model that the driver takes them to have")
    _models.clear()
    _measuring.close()
    keras.backend.clear_session()
    gc.collect()
    transport.apply_settings(sending.settings)
    with distribution.scope():
        (model,), sent = transport.deserialize(sending.data, sending.values)
    waited = _measuring.enter_context(measure_input_wait())
    _models.update(key=sending.key, model=model, sent=sent, waited=waited, plain=plain_attributes(model), specs={})
    return model, sent


def _dataset(work: CallWork, name: str, session, state: Mapping | None = None):
    """Returns (the feed, its dataset in the model's structure); `state` is the feed's on other workers, or None."""
    from raytf.data.feed import open_feed
    from raytf.worker import context

    rows, shared = work.rows[name], {"name": name, "strategy": context.get_strategy(), "saved": state}
    feed = open_feed(rows.dataset, rows.batch, rows.sampling, Shard(session.rank, session.size), **shared)
    return feed, restructure(feed.dataset(), rows.structure)


def restructure(dataset, structure: tuple | None):
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


def _fit(session, work: CallWork, model, sent, distribution) -> int | None:
    from raytf.fitting import fit_training, transport
    from raytf.worker.callbacks import feed_state

    users, callback_objects = transport.deserialize(work.callbacks, known=sent)
    everything = sent.joined(callback_objects)
    with session.checkpoint() as folder:
        pairs = {name: _dataset(work, name, session, feed_state(name)) for name in work.rows}
        try:
            history = fit_training.run_fit(
                session, work, model, folder, users, callback_objects, everything, pairs, _models["waited"]
            )
        except StopTraining as stop:
            return stop.step
    totals = _totals(model, everything)
    report = {"values": everything.values() | totals if session.rank == 0 else None, "ended": True}
    report |= {
        "built": fit_training.built_optimizers(model, everything),
        "history": (dict(history.history), list(history.epoch)),
    }
    report["params"] = {k: v for k, v in (history.params or {}).items() if isinstance(v, (int, float, str, type(None)))}
    report["changed"] = bool(report["built"]) or plain_attributes(model) != _models["plain"]
    if session.rank == 0:
        report["callbacks"], report["lost"] = transport.serialize_attributes(users, everything)
    session.report(report, None)


# Attributes that Keras and raytf change in a training.
_OF_A_TRAINING = ("built", "run_eagerly", "steps_per_execution", "stop_training", "stop_evaluating", "stop_predicting")


def plain_attributes(model) -> dict[tuple[int, str], Any]:
    """Returns plain attributes of layers, not variables. A training that changes them leaves a different model."""
    return {
        (i, name): value
        for i, layer in enumerate(keras_objects.layers_of(model))
        for name, value in vars(layer).items()
        if isinstance(value, (bool, int, float, str))
        and (name == "_trainable" or not name.startswith("_"))
        and name not in _OF_A_TRAINING
    }


def _evaluate(session, work: CallWork, model, sent, distribution) -> None:
    from raytf.fitting import transport

    users, _ = transport.deserialize(work.callbacks, known=sent)
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


def _predict(session, work: CallWork, model, sent, distribution) -> None:
    """Predicts this worker's rows of each step, alone; the driver orders the results.

    A model's own `predict` ends in Keras's, which all workers call together, even without rows. It gives each of them
    the rows of all, and the chief sends these.
    """
    import numpy as np
    from keras import tree

    from raytf.parallel.step_errors import cause_first

    _, dataset = _dataset(work, "train", session)
    step = _predict_function(model, distribution)
    gathers_outputs = model_optimizers.is_own(model, "predict") and session.size > 1
    parts: list[list] = []
    structure = None  # the structure of the outputs, with the index of each
    for done, batch in enumerate(dataset, 1):
        rows = int(tree.flatten(batch)[0].shape[0])
        with cause_first(f"in step {done} of a prediction"):
            outputs = step(batch) if rows or gathers_outputs else None
        if session.rank == 0 if gathers_outputs else rows:
            flat = [np.asarray(output) for output in tree.flatten(outputs)]
            structure = tree.pack_sequence_as(outputs, list(range(len(flat)))) if structure is None else structure
            parts.append([len(flat[0]), flat])
        else:
            parts.append([0, None])
        if done % work.chunk_steps == 0:
            session.report({"parts": parts, "like": structure}, None)
            parts = []
    session.report({"parts": parts, "like": structure, "ended": True}, None)


def _predict_function(model, distribution) -> Callable:
    import tensorflow as tf

    from raytf.compat.tensorflow import separate_function
    from raytf.data import worker_part

    if "predict" in _models:
        return _models["predict"]
    if model_optimizers.is_own(model, "predict"):
        part = lambda batch: worker_part.mark_worker_part(tf.data.Dataset.from_tensors(batch))
        return lambda batch: model.predict(part(batch), verbose=0)

    def step(batch):
        outputs = distribution.run(lambda data: type(model).predict_step(model, data), args=(batch,))
        return tf.nest.map_structure(lambda v: distribution.experimental_local_results(v)[0], outputs)

    _models["predict"] = step if model.run_eagerly else separate_function(step, reduce_retracing=True)
    return _models["predict"]
