"""The coordinator of a KerasTrainer with parameter servers: what `fit.train` is for strategies that train in step.

Keras 3 has no `fit` for a ParameterServerStrategy. Steps are made asynchronously, each by one worker on a whole batch,
through TensorFlow's ClusterCoordinator. Every row is used once an epoch; only the few steps that a worker had when it
died are given to another, and those of them that it had made are made again. At the end of an epoch the coordinator
waits for all steps, and callbacks, validation and the checkpoint see a plain Keras model with the servers' values.
"""

from __future__ import annotations

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf

from raytf.compat.keras import pythonify_logs
from raytf.data.feed import SUPERBATCH, Feed
from raytf.parallel import callbacks as callbacks_module
from raytf.parameter_server import rows
from raytf.parameter_server.remote_model import RemoteModel
from raytf.parameter_server.servers import ServerGroup
from raytf.worker import callbacks, checkpoint, context
from raytf.worker.callback_state import CallbackStates
from raytf.worker.fit import build_from_data, report_callback, restored, users_callbacks
from raytf.worker.job import ended

# Steps that a worker is given at once: few enough that all workers end an epoch at about the same time.
_SPANS_A_WORKER, _LONGEST_SPAN = 8, 32
_POLL_SECONDS = 0.05


class EpochRunner:
    """Runs epochs on the workers of a ParameterServerStrategy.

    Args:
        model: compiled and built, outside the strategy.
        strategy: a `tf.distribute.ParameterServerStrategy`.
        servers: its servers.
        feeds: `feed.Feed` by name: "train" and, if there is one, "validation".
        partitioner: see `RemoteModel`.
        steps_per_execution: steps that a worker makes at once, or None.
    """

    def __init__(self, model, strategy, servers: ServerGroup, feeds: dict[str, Feed], partitioner, steps_per_execution):
        self.model, self._servers, self._feeds = model, servers, feeds
        self.remote = RemoteModel(model, strategy, partitioner)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._spans = {name: self._span(name, feed, strategy) for name, feed in feeds.items()}
        self._steps = steps_per_execution

    def _span(self, name: str, feed: Feed, strategy):
        step = self.remote.train_step if name == "train" else self.remote.test_step
        initial = [np.array(v) for v in self.model.metrics_variables]

        @tf.autograph.experimental.do_not_convert
        def span(epoch, first, count):
            batches = iter(rows.span(name, feed, epoch, first, count))
            begin = epoch * feed.steps + first

            def one(done, *totals):
                totals = strategy.run(step, args=(batches.get_next(), begin + done, totals))
                return (done + 1, *totals)

            start = (tf.constant(0, tf.int64), *(tf.constant(value) for value in initial))
            # one step after the other: what the servers hold must be what the step before left there
            _, *totals = tf.while_loop(lambda done, *_: done < count, one, start, parallel_iterations=1)
            return totals

        return tf.function(span)

    def epoch(self, name: str, number: int, progress=None) -> dict[str, float]:
        """All steps of an epoch.

        Args:
            name: "train" or "validation".
            number: from 0.
            progress: called with the steps that are done, now and then.

        Returns:
            The metrics, by name.

        Raises:
            ServerLostError: a parameter server died.
        """
        feed, results, first = self._feeds[name], [], 0
        spans = _SPANS_A_WORKER * self._servers.plan.num_workers
        longest = self._steps or min(_LONGEST_SPAN, feed.steps // spans)
        longest = max(1, min(longest, int(SUPERBATCH // max(1, feed.shape.row_bytes * feed.global_batch))))
        with self._lost_servers():
            while first < feed.steps:
                end = min(feed.steps, first + longest, (first // feed.chunk_steps + 1) * feed.chunk_steps)
                arguments = [tf.constant(value, tf.int64) for value in (number, first, end - first)]
                results.append(self._coordinator.schedule(self._spans[name], args=tuple(arguments)))
                first = end
            self._wait(progress)
            totals = [[np.asarray(v) for v in result.fetch()] for result in results]
        self.model.reset_metrics()
        for i, variable in enumerate(self.model.metrics_variables):
            initial = np.array(variable)
            variable.assign(initial + sum(total[i] - initial for total in totals))
        return pythonify_logs(self.model.get_metrics_result())

    def _wait(self, progress) -> None:
        before = self.remote.steps() if progress else 0
        while not self._coordinator.done():
            self._servers.changed.wait(_POLL_SECONDS)
            self._servers.check()
            if progress:
                progress(self.remote.steps() - before)

    @contextlib.contextmanager
    def _lost_servers(self):
        """TensorFlow's many errors of a server that is gone, as one."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError):
            self._servers.changed.wait(10.0)
            self._servers.check()
            raise

    def steps(self, name: str) -> int:
        """Steps of an epoch; 0 for a dataset that is not there."""
        return self._feeds[name].steps if name in self._feeds else 0


def train(task, session) -> None:
    """Runs on the coordinator; see `fit.train`."""
    config, strategy, servers = task.config, context.get_strategy(), context.servers()
    with session.checkpoint() as folder:
        state = checkpoint.read_state(folder) if folder else None
        if ended(state, task):
            return
        arguments = {name: task.feed(name) for name in task.used()}
        servers.feed(arguments)
        feeds = {name: Feed(**given, shapes_only=True) for name, given in arguments.items()}
        data = feeds["train"].dataset()
        keras.utils.set_random_seed(task.sampling.seed % 2**32)
        model = task.build_model(dict(config))
        build_from_data(model, data)
        users = users_callbacks(task, session)
        states = CallbackStates(users)
        _warn_of_batches(users)
        around = [*users, *restored(folder, state, model, task, states, session)]
        report = report_callback(task, data, states, state, session.report)
        steps = None if task.steps_per_execution == "auto" else task.steps_per_execution
        trainer = EpochRunner(model, strategy, servers, feeds, task.variable_partitioner, steps)
        progress = callbacks.ProgressCallback(task.board, config["batch_size"], None) if task.board else None
        _fit(trainer, [*around, report], progress, state.epoch if state else 0, config["epochs"])


def _warn_of_batches(users: list) -> None:
    names = sorted({type(c).__name__ for c in users if callbacks_module.looks_at_batches(c)})
    if names:
        warnings.warn(
            f"With parameter servers workers make steps by themselves, and callbacks are called at epochs only: "
            f"{', '.join(names)} will see no batches",
            stacklevel=2,
        )


def _fit(trainer: EpochRunner, given: list, progress, first: int, epochs: int) -> None:
    model, steps = trainer.model, trainer.steps("train")
    shown = [progress] if progress else []
    hooks = keras.callbacks.CallbackList(
        [*given, *shown], add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
    )
    model.stop_training = False
    hooks.on_train_begin()
    for epoch in range(first, epochs):
        hooks.on_epoch_begin(epoch)
        trainer.remote.push()
        logs = trainer.epoch("train", epoch, progress and (lambda done: progress.on_train_batch_end(done - 1)))
        if trainer.steps("validation"):
            logs |= {f"val_{name}": value for name, value in trainer.epoch("validation", 0).items()}
        trainer.remote.pull()
        hooks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    hooks.on_train_end()
