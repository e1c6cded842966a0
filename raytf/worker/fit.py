"""The training of one worker of a KerasTrainer: strategy, model, data, restore, fit, report."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from raytf.collectives import healing
from raytf.collectives.healing import ReplacementState
from raytf.compat import keras_objects, loggers
from raytf.data import sampling
from raytf.data.feed import Feed, open_feed
from raytf.data.pipeline import PipelineFeed
from raytf.errors import ConfigError
from raytf.identity import same_run
from raytf.parallel import model_optimizers
from raytf.parallel.callbacks import settable_rate
from raytf.runtime.topology import Shard
from raytf.validation import is_callback
from raytf.worker import (
    callbacks,
    checkpoint,
    context,
    epoch_checks,
    figures,
    input_wait,
    job,
    replacement,
    steps_per_execution,
    tpu,
    within_epoch,
)
from raytf.worker.callback_state import CallbackStates
from raytf.worker.ending import STOP, MovedError, StopTraining
from raytf.worker.job import TrainJob
from raytf.worker.session import Holders
from raytf.worker.writers import Writers


def train(task: TrainJob, session) -> dict | None:
    """Trains on one worker, as a plain Keras training to the user's code. Every worker calls it.

    Args:
        task: Task from the trainer.
        session: Session of the run, see `session.py`.

    Returns:
        None if the training is complete; {"step": number of steps in all} if it was stopped.

    Raises:
        MovedError: The training was stopped for the run to continue with other workers.
    """
    distribution = context.get_strategy()
    task = task.of(session.size)
    with session.checkpoint() as folder, input_wait.measure_input_wait() as waited:
        state = checkpoint.read_state(folder) if folder else None
        if job.ended(state, task):
            return None
        heals = task.heals and session.recovers
        model = built(task, distribution)
        static = context.uses_tpu()
        replacement_state, agreed = healing.here.place, {}
        shared_state = replacement_state.agreed if replacement_state is not None else {}
        feeds = {
            name: _open(task, name, session, static and name == "train", distribution, shared_state.get(f"feed {name}"))
            for name in task.used()
        }
        agreed |= {f"feed {name}": feed for name, feed in feeds.items() if isinstance(feed, PipelineFeed)}
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
        validation_feeds = [feed for name, feed in feeds.items() if name != "train"]
        position = callbacks.FeedCallback(feeds["train"], state.step if state else 0, validation_feeds)
        fit_callbacks = [position, *users, epoch_checks.EpochChecks(task.nan, users, session.rank, session.size)]
        if replacement_state is not None:
            model.steps_per_execution = shared_state["steps_per_execution"]
        if task.steps_per_execution == "auto" and not static:
            agreed["execution"] = steps_per_execution.ExecutionCallback(users, shared_state.get("execution"))
            fit_callbacks.insert(0, agreed["execution"])
        if task.warmup_steps:
            agreed["warmup"] = callbacks.WarmupCallback(
                task.warmup_steps, model, position.step, shared_state.get("warmup")
            )
            fit_callbacks.append(agreed["warmup"])
        fit_callbacks += restored(folder, state, model, task, states, session)
        if session.rank == 0 and task.board is not None:
            fit_callbacks.append(callbacks.ProgressCallback(task.board, task.config["batch_size"], waited))
        fit_callbacks += figures.of_run(
            session.storage, position, task.config["batch_size"], session.rank, session.size, users, waited
        )
        send_report = session.report
        if task.report_steps is not None:
            send_report = functools.partial(session.report, keep=True)
            (every, needed), last = task.report_steps, state.history[-1] if state and state.history else None
            fit_callbacks.append(callbacks.StepReportCallback(every, session.report, needed, last))
        writers = Writers(session) if session.shares_writing else None
        steps = lambda: position.step
        report = report_callback(task, datasets["train"], states, state, send_report, steps=steps, writers=writers)
        order = feeds["train"].order
        first_callbacks, last_callbacks = resumed(
            folder,
            state,
            states,
            position,
            order,
            place=replacement_state,
            regroups=state is not None and _is_scaled(state, task),
        )
        step_checkpoints = within_epochs(task, feeds, position, report, session, writers, shared_state.get("kept"))
        if step_checkpoints:
            agreed["kept"] = step_checkpoints[0]
            session.ready(model, task.memory_every is not None)
        recoverable = replacement.survivable(
            heals,
            model,
            position,
            report,
            agreed,
            order,
            session,
            users,
            steps=task.report_steps is None,
            ends=session.numbers_reports,
        )
        try:
            with recoverable:
                model.fit(
                    datasets["train"],
                    validation_data=datasets.get("validation"),
                    epochs=task.config["epochs"],
                    initial_epoch=state.epoch if state else 0,
                    callbacks=[
                        replacement.First(),
                        *first_callbacks,
                        *fit_callbacks,
                        *last_callbacks,
                        report,
                        *step_checkpoints,
                        replacement.RecoveryCallback(position, replacement_state),
                    ],
                    verbose=0,
                    shuffle=False,  # the feed does
                )
        except StopTraining as stop:
            if stop.why != STOP:
                raise _moved(stop) from None
            return {"step": stop.step}
    return None


def _moved(ended: StopTraining) -> MovedError:
    """Returns the error that has Ray Train restart workers, without an error log: the controller logs the reason."""
    error = MovedError(ended.step, ended.why)
    logging.getLogger(loggers.TRAIN_ERRORS).addFilter(lambda record: MovedError.__name__ not in record.getMessage())
    return error


def within_epochs(
    task: TrainJob, feeds: dict[str, Feed], position, report, session, writers: Writers | None = None, told=None
) -> list:
    """Returns the callback that saves checkpoints within epochs, in a list that is empty if the run cannot have any."""
    if not session.saves:
        return []
    if task.memory_every is not None and context.uses_tpu():
        raise ConfigError(
            "memory_every needs workers each of which holds the whole model", "TPUs", "Use checkpoint_every"
        )
    holders = session.holders() if task.memory_every is not None else Holders(mine=False, peer=False)
    on_one_host = context.servers() is None and not holders.peer
    if session.rank == 0 and task.memory_every is not None and on_one_host:
        warnings.warn(
            "All workers are on one host: what memory_every holds there outlives a worker, and not the host",
            stacklevel=2,
        )
    saver = within_epoch.StepCheckpointCallback(
        task.checkpoint_every,
        session,
        position,
        report,
        order=feeds["train"].order,
        validates="validation" in feeds,
        memory_every=task.memory_every,
        holders=holders,
        writers=writers,
        told=told,
    )
    return [saver]


def resumed(
    folder: str | None,
    state,
    states,
    position,
    order,
    *iterator: Callable,
    place: ReplacementState | None = None,
    regroups: bool = False,
) -> tuple[list, list]:
    """Returns callbacks to run before and after the others, for a training that resumes within an epoch.

    A replacement worker with `place` resumes where the others are, also in the first step of an epoch. If the run
    `regroups` rows, as steps have another number of them now, it resumes after the rows of earlier steps. See
    `Resumption`.
    """
    begin = None
    if place is None:
        if state is None or not state.epoch_step:
            return [], []
        differs = sampling.differences(state.order, order)
        if differs and regroups:
            begin = sampling.regrouped(state.order, order, state.epoch_step)
        if differs and begin is None:
            warnings.warn(
                f"Epoch {state.epoch + 1} starts again, with weights that have seen {state.epoch_step} of its steps: "
                f"these would have other rows now ({differs})",
                stacklevel=2,
            )
            return [], []
    first = None if place is None else replacement.first_execution(place)
    begun = place is not None and not place.behind
    resumption = within_epoch.Resumption(
        folder, state, states, position, *iterator, first=first, begin=begin, begun=begun
    )
    return [resumption.first], [resumption.last]


def _is_scaled(state, task: TrainJob) -> bool:
    """Whether steps have another number of rows than before, as that scales with the number of workers."""
    return state.batch_scale != task.scale


def scale_rate(model, factor: float) -> None:
    """Multiplies the learning rate of a model by the scale of its batch.

    Raises:
        ConfigError: The optimizer has a learning rate schedule.
    """
    if factor == 1:
        return
    rate = settable_rate(model.optimizer)
    if rate is None:
        raise ConfigError(
            'elastic_batch="scale" needs an optimizer with a number for its learning rate',
            "a schedule",
            'Set the rate in a callback, by epochs, or use elastic_batch="keep"',
        )
    model.optimizer.learning_rate = float(rate) * factor


def _open(task: TrainJob, name: str, session, static: bool, strategy, told: dict | None) -> Feed | PipelineFeed:
    shard, given = Shard(session.rank, session.size), task.feed(name, drop_remainder=static)
    return open_feed(**given, shard=shard, static=static, name=name, strategy=strategy, told=told)


def built(task: TrainJob, distribution):
    """Returns the model that `build_model` builds under a strategy, from the run's seed, the same on all workers."""
    keras.utils.set_random_seed(task.sampling.seed % 2**32)
    with distribution.scope():
        model = task.build_model(dict(task.config))
        keras_objects.make_shared_seed()
    return model


def build_from_data(model, dataset, method: str = "fit") -> None:
    """Builds a compiled model and its optimizer from the data's shapes, as Keras does before its first step.

    A checkpoint can then be restored into them.

    Args:
        model: A compiled `keras.Model`.
        dataset: A `tf.data.Dataset` of batches.
        method: "fit" or "evaluate", the use of the dataset.

    Raises:
        ConfigError: A layer of the model is stateful, or the model is not built and only its own code can call it.
    """

    _refuse_state_of_rows(model)

    def example(spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_lengths(tf.zeros([2], spec.dtype), [1, 1])
        return tf.zeros([2, *(size or 1 for size in spec.shape[1:])], spec.dtype)

    model_optimizers.build(model, tf.nest.map_structure(example, dataset.element_spec), method)


def _refuse_state_of_rows(model) -> None:
    """Raises ConfigError for a stateful layer: its state is in no checkpoint, nor on workers with other rows."""
    for layer in keras_objects.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigError(
                "A step must depend on its own rows alone, as they come in another order in each epoch, and on any "
                "worker",
                f"the layer {layer.name!r}, {type(layer).__name__}(stateful=True)",
                "Use stateful=False, with longer sequences",
            )


def users_callbacks(task: TrainJob, session) -> list:
    """Returns the user's callbacks, and a TensorBoard callback for the run's folder unless they contain one.

    Raises:
        ConfigError: The function of callbacks returns something else.
    """
    result = task.callbacks(dict(task.config)) if task.callbacks else []
    users = [result] if is_callback(result) else list(result) if isinstance(result, Iterable) else [result]
    if not all(map(is_callback, users)):
        raise ConfigError(
            "callbacks(config) must return a list of Keras callbacks",
            repr(result),
            "Return objects, such as [keras.callbacks.EarlyStopping()]",
        )
    return users + callbacks.tensorboard(session.storage, users, session.rank)


def restored(folder: str | None, state, model, task: TrainJob, states, session) -> list:
    """Restores a built model from a checkpoint, if there is one. Returns callbacks that restore the user's callbacks.

    Args:
        folder: Folder of the checkpoint, or None.
        state: State of the checkpoint, or None.
        model: The built model.
        task: Task from the trainer.
        states: `callback_state.CallbackStates` of the user's callbacks.
        session: Session of the run.
    """

    if folder is None:
        scale_rate(model, task.scale)
        return []
    rate = settable_rate(model.optimizer)
    built_rate = None if rate is None else float(rate)
    is_new = checkpoint.restore(folder, model, task.config)
    if built_rate is not None and same_run.rates_differ(state.identity, task.identity):
        model.optimizer.learning_rate = built_rate  # the user saw this difference, and passed resume=True
        is_new = True
    scale_rate(model, task.scale if is_new else task.scale / state.batch_scale)
    if session.rank == 0:
        callbacks.continue_logs(states.callbacks, state.epoch)
    return [callbacks.RestoreCallback(folder, states, session.rank == 0, state.history)]


def report_callback(
    task: TrainJob,
    dataset,
    states,
    state,
    to: Callable,
    steps: Callable[[], int] | None = None,
    writers: Writers | None = None,
):
    """Returns the callback that reports each epoch with `to(metrics, write)`; put it last."""

    return callbacks.ReportCallback(
        seed=task.sampling.seed,
        build=(task.build_model, task.config, _inputs(dataset)),
        callbacks=states,
        history=state.history if state else (),
        report=to,
        identity=task.identity,
        steps=steps,
        writers=writers,
        batch_scale=task.scale,
    )


def _inputs(dataset):

    spec = dataset.element_spec
    features = spec[0] if isinstance(spec, tuple) else spec
    return tf.nest.map_structure(lambda s: (tuple(size or 1 for size in s.shape[1:]), s.dtype.name), features)
