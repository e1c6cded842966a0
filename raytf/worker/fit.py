"""The training of one worker of a KerasTrainer: builds the model, opens the data, and runs the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import keras
import tensorflow as tf

from raytf.compat import keras_objects
from raytf.data.feed import open_feed
from raytf.errors import ConfigError
from raytf.parallel import joined_state, model_optimizers, shards
from raytf.runtime.topology import Shard
from raytf.storage.checkpoint_files import CheckpointState
from raytf.validation import is_callback
from raytf.worker import callbacks, checkpoint, context, input_wait, job, loop, tpu
from raytf.worker.callbacks import FeedCallback
from raytf.worker.job import TrainJob
from raytf.worker.part import Training
from raytf.worker.parts import PARTS
from raytf.worker.session import Session
from raytf.worker.stop import STOP, StoppedForRestartError, StopTraining


def train(task: TrainJob, session: Session) -> dict | None:
    """Trains on one worker, as a plain Keras training to the user's code. Every worker calls it.

    Args:
        task: Task from the trainer.
        session: Session of the run, see `session.py`.

    Returns:
        None if the training is complete; {"step": number of steps in all} if it was stopped.

    Raises:
        StoppedForRestartError: The training was stopped for the run to continue with other workers.
    """
    context.get_strategy()
    task = task.for_workers(session.size)
    with session.checkpoint() as folder, input_wait.measure_input_wait() as waited:
        state = checkpoint.read_state(folder) if folder else None
        if job.is_complete(state, task):
            return None
        try:
            loop.run_training(prepare(task, session, waited, callbacks.feed_state, folder, state), PARTS)
        except StopTraining as stop:
            if stop.why != STOP:
                raise StoppedForRestartError(stop.step, stop.why) from None
            return {"step": stop.step}
    return None


def prepare(
    task: TrainJob,
    session: Session,
    waited: Callable[[], float],
    feed_state: Callable[[str], Mapping | None],
    folder: str | None = None,
    state: CheckpointState | None = None,
) -> Training:
    """Returns the training of a task: builds the model, and opens the feeds.

    Args:
        task: The task for this number of workers.
        session: Session of the run.
        waited: See `Training`.
        feed_state: Function that returns the state of a feed by name on other workers, or None, see `Feed.state_dict`.
        folder: Folder of the checkpoint to resume from, or None.
        state: State of that checkpoint, or None.
    """
    strategy, static = context.get_strategy(), context.uses_tpu()
    model, shard = build_model(task, strategy), Shard(session.rank, session.size)
    feeds = {}
    for name in task.used():
        arguments = task.feed(name, drop_remainder=static and name == "train")
        more = {"name": name, "strategy": strategy, "static": static and name == "train", "saved": feed_state(name)}
        feeds[name] = open_feed(**arguments, shard=shard, **more)
    if static:
        task = tpu.with_steps_per_call(task, model, feeds["train"])
    datasets = {name: feed.dataset() for name, feed in feeds.items()}
    with strategy.scope():
        build_from_data(model, datasets["train"])
    return Training(
        options=task,
        seed=task.sampling.seed,
        session=session,
        folder=folder,
        state=state,
        model=model,
        feeds=feeds,
        datasets=datasets,
        users=users_callbacks(task, session),
        position=FeedCallback(feeds, state.step if state else 0),
        waited=waited,
        epochs=task.config["epochs"],
        build=describe_build(task, datasets["train"]),
    )


def build_model(task: TrainJob, distribution):
    """Returns the model that `build_model` builds under a strategy, from the run's seed, the same on all workers."""
    keras.utils.set_random_seed(task.sampling.seed % 2**32)
    with distribution.scope():
        model = task.build_model(dict(task.config))
        keras_objects.make_shared_seed()
    shards.attach(model, distribution)
    return model


def build_from_data(model, dataset, method: str = "fit") -> None:
    """Builds a compiled model and its optimizer from the data's shapes, as Keras does before its first step.

    A checkpoint can then be restored into them.

    Args:
        model: A compiled `keras.Model`.
        dataset: A `tf.data.Dataset` of batches.
        method: "fit" or "evaluate", the use of the dataset.

    Raises:
        ConfigError: A layer is stateful, or the model is not built and only its own code can call it.
    """

    joined_state.refuse_state_of_rows(model)

    def example(spec):
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_lengths(tf.zeros([2], spec.dtype), [1, 1])
        return tf.zeros([2, *(size or 1 for size in spec.shape[1:])], spec.dtype)

    model_optimizers.build(model, tf.nest.map_structure(example, dataset.element_spec), method)


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


def describe_build(task: TrainJob, dataset) -> tuple:
    """Returns what a checkpoint notes to build the model again: (build_model, config, inputs)."""
    spec = dataset.element_spec
    features = spec[0] if isinstance(spec, tuple) else spec
    shape = lambda s: (tuple(size or 1 for size in s.shape[1:]), s.dtype.name)
    return task.build_model, task.config, tf.nest.map_structure(shape, features)
