"""The coordinator of a KerasTrainer with parameter servers: what `fit.train` is for strategies that train in step.

Keras 3 has no `fit` for a ParameterServerStrategy. Steps are made asynchronously, each by one worker on a whole batch,
through TensorFlow's ClusterCoordinator. Every row is used once an epoch; only the few steps that a worker had when it
died are given to another, and those of them that it had made are made again. At the end of an epoch the coordinator
waits for all steps, and callbacks, validation and the checkpoint see a plain Keras model with the servers' values; so
it does for a checkpoint within an epoch, and for an end.

A server that dies takes variables with it, and TensorFlow cannot give them to another one under a coordinator that
lives: its ClusterCoordinator raises an error, says that the job must start again from a checkpoint, and holds functions
and resources that name the dead server's. So the coordinator ends, its process with it, and Ray Train starts another
one, with servers and workers of its own, which goes on from the copy that the old one held in memory
(`memory_every`; another process has it, so that it outlives the coordinator, too), or else from the last checkpoint.
Such a copy is of all servers at once, when no step is being made: rows of steps behind it are used again by the steps
that are made again, and no others.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from raytf import logs
from raytf.compat.keras import pythonify_logs
from raytf.compat.tensorflow import traced_apart
from raytf.data.feed import SUPERBATCH, Feed
from raytf.parallel import callbacks as callbacks_module
from raytf.parameter_server import rows
from raytf.parameter_server.remote_model import RemoteModel
from raytf.parameter_server.servers import ServerGroup, ServerLostError
from raytf.worker import callbacks, checkpoint, context, epoch_checks, figures
from raytf.worker.callback_state import CallbackStates
from raytf.worker.ending import StopTraining
from raytf.worker.fit import build_from_data, report_callback, restored, resumed, users_callbacks, within_epochs
from raytf.worker.job import ended
from raytf.worker.within_epoch import StepCheckpointCallback

logger = logs.get_logger(__name__)

# Steps that a worker is given at once: few enough that all workers end an epoch at about the same time.
_SPANS_A_WORKER, _LONGEST_SPAN = 8, 32
_POLL_INTERVAL = 0.05
# What is begun ahead of what is made: little, as a checkpoint or an end waits for it. Spans of each worker, or seconds.
_SPANS_AHEAD, _AHEAD_INTERVAL = 2, 0.5


class StepCounter:
    """Counts steps, for what `callbacks.FeedCallback` is with other strategies.

    Args:
        step: steps that were made before.

    Attributes:
        step: steps that are made in all.
        epoch_step: of these, those of the epoch that goes on.
    """

    # where an epoch goes on after its last step nobody has to keep its metrics: the coordinator sums them
    steps = math.inf

    def __init__(self, step: int = 0):
        self.step, self.epoch_step = step, 0

    def go_on(self, epoch: int, step: int, skip: int = 0) -> None:
        """Has an epoch go on after some steps, see `FeedCallback.go_on`; no row is skipped, as batches stay alike."""
        self.epoch_step = step

    def begin_at(self, step: int, dataset) -> None:
        """What an iterator of Keras is told; here steps are asked for by their number."""

    def advance(self, step: int) -> None:
        """Says up to which step of the epoch all are made."""
        self.step, self.epoch_step = self.step + step - self.epoch_step, step


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
        self._initial = [np.array(v) for v in model.metrics_variables]
        self._spans = {name: self._span(name, feed, strategy) for name, feed in feeds.items()}
        self._steps = steps_per_execution

    def _span(self, name: str, feed: Feed, strategy):
        step = self.remote.train_step if name == "train" else self.remote.test_step
        initial = self._initial

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

        return traced_apart(span)

    def train(
        self, number: int, position: StepCounter, kept: StepCheckpointCallback | None, progress
    ) -> dict[str, float]:
        """The steps of an epoch that are left.

        Args:
            number: of the epoch, from 0.
            position: where it begins; counts the steps.
            kept: keeps checkpoints within it, and ends it, each when all steps that have begun have ended; or None.
            progress: progress(steps of the epoch that are done), called now and then; or None.

        Returns:
            The metrics, by name, of all its steps.

        Raises:
            ServerLostError: a parameter server died.
            StopTraining: the run was told to stop.
        """
        logs = self._logs()
        while position.epoch_step < self.steps("train"):
            results, stood_since = self._some(number, position, kept, progress)
            logs = self._add(results)
            if kept is not None:
                self.pull()
                kept.stood = time.monotonic() - stood_since
                kept.on_train_batch_end(position.epoch_step - 1, logs)
        return logs

    def _some(self, number: int, position: StepCounter, kept, progress) -> tuple[list, float]:
        """(the metrics of the spans of steps up to the next checkpoint or end, since when no more were begun)."""
        begin = first = position.epoch_step
        last = self.steps("train")
        if kept is not None:
            last = int(min(last, begin + kept.steps_to_next(position.step)))
        results, began = [], time.monotonic()
        with self._lost_servers():
            before = self.remote.steps()
            while first < last:
                made = self.remote.steps() - before
                if kept is not None and first > begin and kept.wants(position.step + made):
                    break
                ahead = made + self._ahead(made / (time.monotonic() - began)) if kept is not None else last
                while first < min(last, begin + ahead):
                    first = self._begin("train", number, first, last, results)
                self._look(progress, begin, before)
            stood_since = time.monotonic()
            totals = self._finish(results, progress, begin, before)
        position.advance(first)
        return totals, stood_since

    def _ahead(self, rate: float) -> int:
        """Steps that may wait or be made at once: all workers have some, and they end soon after the last has begun."""
        return int(max(_SPANS_AHEAD * self._longest("train") * self._servers.plan.num_workers, rate * _AHEAD_INTERVAL))

    def validate(self) -> dict[str, float]:
        """All steps of the validation: the metrics, by name.

        Raises:
            ServerLostError: a parameter server died.
        """
        results, first, last = [], 0, self.steps("validation")
        self.model.reset_metrics()
        with self._lost_servers():
            while first < last:
                first = self._begin("validation", 0, first, last, results)
            totals = self._finish(results, None, 0, 0)
        return self._add(totals)

    def push(self) -> None:
        """`RemoteModel.push`; raises ServerLostError."""
        with self._lost_servers():
            self.remote.push()

    def pull(self) -> None:
        """`RemoteModel.pull`; raises ServerLostError."""
        with self._lost_servers():
            self.remote.pull()
        self._servers.check()  # one that Ray says is dead may answer a moment longer

    def _begin(self, name: str, epoch: int, first: int, last: int, results: list) -> int:
        """Gives a worker the span that begins with a step and ends at `last` or before; the step behind it."""
        chunk = self._feeds[name].chunk_steps
        end = min(last, first + self._longest(name), (first // chunk + 1) * chunk)
        arguments = [tf.constant(value, tf.int64) for value in (epoch, first, end - first)]
        results.append(self._coordinator.schedule(self._spans[name], args=tuple(arguments)))
        return end

    def _longest(self, name: str) -> int:
        """Steps that a worker may be given at once."""
        feed = self._feeds[name]
        longest = self._steps or min(_LONGEST_SPAN, feed.steps // (_SPANS_A_WORKER * self._servers.plan.num_workers))
        return max(1, min(longest, int(SUPERBATCH // max(1, feed.shape.row_bytes * feed.global_batch))))

    def _add(self, totals: list[list[np.ndarray]]) -> dict[str, float]:
        """Adds what the spans' steps have summed to the model's metrics; their results."""
        for i, (variable, initial) in enumerate(zip(self.model.metrics_variables, self._initial, strict=True)):
            variable.assign(np.array(variable) + sum(total[i] - initial for total in totals))
        return self._logs()

    def _logs(self) -> dict[str, float]:
        return pythonify_logs(self.model.get_metrics_result())

    def _finish(self, results: list, progress, begin: int, before: int) -> list[list[np.ndarray]]:
        """Waits for the spans that have begun: the metrics of each."""
        while not self._coordinator.done():
            self._look(progress, begin, before)
        return [[np.asarray(v) for v in result.fetch()] for result in results]

    def _look(self, progress, begin: int, before: int) -> None:
        self._servers.changed.wait(_POLL_INTERVAL)
        self._servers.check()
        if progress:
            progress(begin + self.remote.steps() - before)

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


def train(task, session) -> dict[str, int] | None:
    """Runs on the coordinator; see `fit.train`."""
    config, strategy, servers = task.config, context.get_strategy(), context.servers()
    with session.checkpoint() as folder:
        state = checkpoint.read_state(folder) if folder else None
        if ended(state, task):
            return None
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
        position = StepCounter(state.step if state else 0)
        checks = epoch_checks.EpochChecks(task.nan, users)
        around = [*users, checks, *restored(folder, state, model, task, states, session)]
        workers = servers.plan.num_workers
        around += figures.of_run(session.storage, position, config["batch_size"], 0, workers, users, None)
        report = report_callback(task, data, states, state, session.report, steps=lambda: position.step)
        before, after = resumed(folder, state, states, position, feeds["train"].order, lambda: position)
        kept = within_epochs(task, feeds, position, report, session)
        steps = None if task.steps_per_execution == "auto" else task.steps_per_execution
        trainer = EpochRunner(model, strategy, servers, feeds, task.variable_partitioner, steps)
        progress = callbacks.ProgressCallback(task.board, config["batch_size"], None) if task.board else None
        hooks = [*before, *around, *after, report, *kept]
        try:
            _fit(trainer, hooks, position, progress, state.epoch if state else 0, config["epochs"])
        except StopTraining as told:
            return {"step": told.step}
        except ServerLostError as error:
            why = f"{error}. {_restored_from(position, kept[0] if kept else None)}"
            logger.error(why)
            raise ServerLostError(why) from error
    return None


def _restored_from(position: StepCounter, kept: StepCheckpointCallback | None) -> str:
    """From where other servers get what a lost one held, as a sentence without a full stop."""
    began = position.step - position.epoch_step
    stored, held = max(began, kept.kept_step if kept else 0), kept.held_step if kept else 0
    source = f"the checkpoint of step {stored}" if stored else "the beginning of the run, as there is no checkpoint yet"
    if held > stored:
        source = f"the copy of step {held} in the coordinator's memory"
    return (
        f"Other servers get them from {source}, where FailureConfig(max_failures=...) allows another start; the steps "
        "after it are made again"
    )


def _warn_of_batches(users: list) -> None:
    names = sorted({type(c).__name__ for c in users if callbacks_module.looks_at_batches(c)})
    if names:
        warnings.warn(
            f"With parameter servers workers make steps by themselves, and callbacks are called at epochs only: "
            f"{', '.join(names)} will see no batches",
            stacklevel=2,
        )


def _fit(trainer: EpochRunner, given: list, position: StepCounter, progress, first: int, epochs: int) -> None:
    kept = given[-1] if isinstance(given[-1], StepCheckpointCallback) else None
    model, steps = trainer.model, trainer.steps("train")
    shown = [progress] if progress else []
    hooks = keras.callbacks.CallbackList(
        [*given, *shown], add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
    )
    model.stop_training = False
    hooks.on_train_begin()
    for epoch in range(first, epochs):
        position.epoch_step = 0
        model.reset_metrics()
        hooks.on_epoch_begin(epoch)
        trainer.push()
        told = progress and (lambda done: progress.on_train_batch_end(done - 1))
        logs = trainer.train(epoch, position, kept, told)
        validated: dict[str, float] = {}
        if trainer.steps("validation"):
            hooks.on_test_begin()
            validated = trainer.validate()
        trainer.pull()
        if validated:
            hooks.on_test_end(validated)
        logs |= {f"val_{name}": value for name, value in validated.items()}
        hooks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    hooks.on_train_end()
