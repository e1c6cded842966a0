"""What one worker of a KerasTrainer does, on one screen: strategy, model, data, restore, fit, report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from raytf.blocks import Blocks
from raytf.callback_state import CallbackStates
from raytf.progress import Board


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a KerasTrainer tells its workers.

    Args:
        build_model, callbacks: the user's functions of the config.
        config: the user's config.
        features, labels, sample_weights: parsed columns.
        datasets: the `blocks.Blocks` or `streams.Stream` of "train" and, if there is one, of "validation".
        seed: of weights, shuffle and masks.
        shuffle, window: order of training rows.
        map: the user's function of a training batch, or None.
        steps_per_execution: "auto" or a number.
        board: the `progress.Board`, or None for no progress line.
        warmup_steps: in which the learning rate rises from 0.
        report_steps: (every how many steps, metric that a report needs) of reports within epochs, or None.
        variable_partitioner: see `remote_model.RemoteModel`.
        evaluator: checkpoints are evaluated beside the training, which does not validate.
        validate: something is to be called for each checkpoint: the evaluator, or a function of the user's.
        identity: what tells this run from another, by name; JSON values.
    """

    build_model: Callable
    callbacks: Callable | None
    config: dict[str, Any]
    features: Any
    labels: Any
    sample_weights: Any
    datasets: dict[str, Blocks]
    seed: int
    shuffle: str
    window: int
    map: Callable | None
    steps_per_execution: int | str
    board: Board | None
    warmup_steps: int = 0
    report_steps: tuple[int, str] | None = None
    variable_partitioner: Callable | None = None
    evaluator: bool = False
    validate: bool = False
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)

    def used(self) -> list[str]:
        """The datasets of the training itself."""
        return [name for name in self.datasets if not (self.evaluator and name == "validation")]

    def feed(self, name: str) -> dict[str, Any]:
        """The arguments of a `feed.Feed` of a dataset, without those that say who reads."""
        return {
            "blocks": self.datasets[name],
            "features": self.features,
            "labels": self.labels,
            "sample_weights": self.sample_weights,
            "global_batch": self.config["batch_size"],
            "seed": self.seed,
            "shuffle": self.shuffle if name == "train" else "none",
            "window": self.window,
            "map": self.map if name == "train" else None,
        }


def train(task: Task, session) -> None:
    """Runs on every worker; the user's code sees a plain Keras training.

    Args:
        task: what to train.
        session: the run around it, see `session.py`.
    """
    import keras

    from raytf import callbacks, checkpoint, context, execution, tpu, waiting

    distribution = context.get_strategy()
    with session.checkpoint() as folder, waiting.measured() as waited:
        state = checkpoint.read_state(folder) if folder else None
        if ended(state, task):
            return
        keras.utils.set_random_seed(task.seed % 2**32)
        with distribution.scope():
            model = task.build_model(dict(task.config))
        static = context.uses_tpu()
        feeds = {name: _feed(task, name, session, static and name == "train") for name in task.used()}
        if static:
            tpu.check_batch(task.config["batch_size"], feeds["train"].rows, distribution.num_replicas_in_sync)
            if task.steps_per_execution == "auto" and model.steps_per_execution == 1:
                model.steps_per_execution = min(tpu.STEPS_PER_EXECUTION, feeds["train"].steps)
        datasets = {name: feed.dataset() for name, feed in feeds.items()}
        with distribution.scope():
            build_from_data(model, datasets["train"])
        if task.steps_per_execution != "auto":
            model.steps_per_execution = task.steps_per_execution
        users = users_callbacks(task, session)
        states = CallbackStates(users)
        around = [callbacks.FeedCallback(feeds["train"]), *users]
        if task.steps_per_execution == "auto" and not static:
            around.insert(0, execution.ExecutionCallback(users))
        if task.warmup_steps:
            around.append(callbacks.WarmupCallback(task.warmup_steps, model))
        around += restored(folder, state, model, task, states, session)
        if session.rank == 0 and task.board is not None:
            around.append(callbacks.ProgressCallback(task.board, task.config["batch_size"], waited))
        to = session.report
        if task.report_steps is not None:
            to = functools.partial(session.report, keep=True)
            around.append(callbacks.StepReportCallback(task.report_steps[0], session.report, task.report_steps[1]))
        report = report_callback(task, datasets["train"], states, state, to)
        model.fit(
            datasets["train"],
            validation_data=datasets.get("validation"),
            epochs=task.config["epochs"],
            initial_epoch=state.epoch if state else 0,
            callbacks=[*around, report],
            verbose=0,
            shuffle=False,  # the feed does
        )


def _feed(task: Task, name: str, session, static: bool):
    from raytf.feed import Feed

    return Feed(**task.feed(name), worker=session.rank, workers=session.size, drop_remainder=static, static=static)


def build_from_data(model, dataset) -> None:
    """Builds a compiled model and its optimizer from the data's shapes, as Keras does before its first step.

    A checkpoint can then be restored into them.
    """
    import tensorflow as tf

    from raytf import optimizers

    def example(spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_lengths(tf.zeros([2], spec.dtype), [1, 1])
        return tf.zeros([2, *(size or 1 for size in spec.shape[1:])], spec.dtype)

    optimizers.build(model, tf.nest.map_structure(example, dataset.element_spec))


def ended(state, task: Task) -> bool:
    """Whether a run that goes on from a `checkpoint.State` (None: from nothing) has nothing left to do."""
    return state is not None and (state.stopped or state.epoch >= task.config["epochs"])


def users_callbacks(task: Task, session) -> list:
    """The user's callbacks, and one that writes events beside the run unless they do."""
    from raytf import callbacks

    users = list(task.callbacks(dict(task.config))) if task.callbacks else []
    return users + callbacks.tensorboard(session.storage, users)


def restored(folder: str | None, state, model, task: Task, states, session) -> list:
    """Gives a built model the state of a checkpoint, if there is one; callbacks that do so with the user's.

    Args:
        folder, state: of the checkpoint, or None.
        states: `callback_state.CallbackStates` of the user's callbacks.
    """
    from raytf import callbacks, checkpoint, identity
    from raytf.multiworker_callbacks import settable_rate

    if folder is None:
        return []
    rate = settable_rate(model.optimizer)
    built = None if rate is None else float(rate)
    checkpoint.restore(folder, model, task.config)
    if built is not None and identity.rates_differ(state.identity, task.identity):
        model.optimizer.learning_rate = built  # the user was told so, and said resume=True
    if session.rank == 0:
        callbacks.continue_logs(states.callbacks, state.epoch)
    return [callbacks.RestoreCallback(folder, states, session.rank == 0)]


def report_callback(task: Task, dataset, states, state, to: Callable):
    """The callback that reports each epoch with `to(metrics, write)`; put it last."""
    from raytf import callbacks

    return callbacks.ReportCallback(
        seed=task.seed,
        build=(task.build_model, task.config, _inputs(dataset)),
        callbacks=states,
        history=state.history if state else (),
        report=to,
        identity=task.identity,
    )


def _inputs(dataset):
    import tensorflow as tf

    spec = dataset.element_spec
    features = spec[0] if isinstance(spec, tuple) else spec
    return tf.nest.map_structure(lambda s: (tuple(size or 1 for size in s.shape[1:]), s.dtype.name), features)
