"""The coordinator of a KerasTrainer with parameter servers; `fit.train` is its counterpart for other strategies.

Keras 3 has no `fit` for a ParameterServerStrategy. TensorFlow's ClusterCoordinator schedules steps asynchronously, each
on one worker with a whole batch. Every row is used once an epoch; only the steps of a worker that died are repeated. At
epochs' ends, checkpoints and stops the coordinator waits for all steps. Callbacks, validation and checkpoints see a
plain Keras model with the servers' values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from raytf import logs
from raytf.compat.keras import pythonify_logs
from raytf.compat.tensorflow import failed_with, separate_function
from raytf.data.feed import SUPERBATCH, Feed
from raytf.logs import warn_user
from raytf.parallel import callbacks as callbacks_module
from raytf.parallel.step_errors import cause_first, progress_clause
from raytf.parameter_server import rows
from raytf.parameter_server.remote_model import RemoteModel
from raytf.parameter_server.servers import ServerGroup, ServerLostError
from raytf.worker import checkpoint, context, loop
from raytf.worker.callbacks import ProgressCallback
from raytf.worker.fit import build_from_data, describe_build, users_callbacks
from raytf.worker.job import is_complete
from raytf.worker.part import Training, TrainingPart
from raytf.worker.parts import PARTS
from raytf.worker.step_checkpoints import StepCheckpointCallback
from raytf.worker.stop import StopTraining

logger = logs.get_logger(__name__)

# Spans of each worker in an epoch, and most steps in a span: short spans let all workers end an epoch together.
_SPANS_A_WORKER, _LONGEST_SPAN = 8, 32
_POLL_INTERVAL = 0.05
# Steps that are scheduled ahead, as a checkpoint or a stop waits for them: spans for each worker, or seconds.
_SPANS_AHEAD, _AHEAD_INTERVAL = 2, 0.5


class StepCounter(TrainingPart):
    """Counts steps instead of `callbacks.FeedCallback`, which other strategies use.

    Args:
        step: Number of steps before this training.

    Attributes:
        step: Number of steps in all.
        epoch_step: Number of steps of the current epoch.
    """

    # infinite, as metrics of an epoch that resumes after its last step need no restore: the coordinator sums them
    steps = math.inf

    def __init__(self, step: int = 0):
        super().__init__()
        self.step, self.epoch_step = step, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_step = 0

    def resume_at(self, epoch: int, step: int, skip: int = 0) -> None:
        """Resumes an epoch after some steps, see `FeedCallback.resume_at`; it skips no row: batches stay the same."""
        self.epoch_step = step

    def begin_at(self, step: int, dataset) -> None:
        """Does nothing, unlike an iterator of Keras: the coordinator requests steps by number."""

    def advance(self, step: int) -> None:
        """Sets the step of the epoch up to which all steps are complete."""
        self.step, self.epoch_step = self.step + step - self.epoch_step, step


class EpochRunner:
    """Runs epochs on the workers of a ParameterServerStrategy.

    Args:
        model: A compiled and built model, outside of the strategy.
        strategy: A `tf.distribute.ParameterServerStrategy`.
        servers: Its servers.
        feeds: `feed.Feed` by name: "train", and maybe "validation".
        partitioner: See `RemoteModel`.
        steps_per_execution: Number of steps in a span, or None to choose it.
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
            batches = iter(rows.row_span(name, feed, epoch, first, count))
            begin = epoch * feed.steps + first

            def make_step(done, *totals):
                totals = strategy.run(step, args=(batches.get_next(), begin + done, totals))
                return (done + 1, *totals)

            start = (tf.constant(0, tf.int64), *(tf.constant(value) for value in initial))
            # sequentially, as each step must read what the step before has written to the servers
            _, *totals = tf.while_loop(lambda done, *_: done < count, make_step, start, parallel_iterations=1)
            return totals

        return separate_function(span)

    def train(
        self, number: int, position: StepCounter, saver: StepCheckpointCallback | None, progress
    ) -> dict[str, float]:
        """Trains the remaining steps of an epoch.

        Args:
            number: The epoch, from 0.
            position: Counter of the steps, at the first step.
            saver: Saves checkpoints within the epoch and stops it, each after all steps that have begun; or None.
            progress: Function `progress(steps)` with the steps of the epoch so far, called now and then; or None.

        Returns:
            The metrics of the epoch, by name.

        Raises:
            ServerLostError: A parameter server died.
            StopTraining: The run was requested to stop.
        """
        logs = self._logs()
        while position.epoch_step < self.steps("train"):
            results, stood_since = self._run_span(number, position, saver, progress)
            logs = self._add(results)
            if saver is not None:
                self.pull()
                saver.stood = time.monotonic() - stood_since
                saver.on_train_batch_end(position.epoch_step - 1, logs)
        return logs

    def _run_span(self, number: int, position: StepCounter, saver, progress) -> tuple[list, float]:
        """Returns (metrics of the spans up to the next checkpoint or stop, time after which no more were scheduled)."""
        begin = first = position.epoch_step
        last = self.steps("train")
        if saver is not None:
            last = int(min(last, begin + saver.steps_to_next(position.step)))
        results, began = [], time.monotonic()
        with self._lost_servers(), cause_first(lambda error: _location(error, results, position.step - begin)):
            initial = self.remote.steps()
            while first < last:
                steps_made = self.remote.steps() - initial
                if saver is not None and first > begin and saver.wants(position.step + steps_made):
                    break
                scheduled_until = (
                    steps_made + self._steps_ahead(steps_made / (time.monotonic() - began))
                    if saver is not None
                    else last
                )
                while first < min(last, begin + scheduled_until):
                    first = self._begin("train", number, first, last, results)
                self._poll(progress, begin, initial)
            stood_since = time.monotonic()
            totals = self._finish(results, progress, begin, initial)
        position.advance(first)
        return totals, stood_since

    def _steps_ahead(self, rate: float) -> int:
        """Returns how many steps to schedule ahead: enough for all workers, and few enough to end soon."""
        return int(max(_SPANS_AHEAD * self._longest("train") * self._servers.plan.num_workers, rate * _AHEAD_INTERVAL))

    def validate(self) -> dict[str, float]:
        """Runs all steps of the validation, and returns the metrics by name.

        Raises:
            ServerLostError: A parameter server died.
        """
        results, first, last = [], 0, self.steps("validation")
        self.model.reset_metrics()
        with self._lost_servers(), cause_first(lambda error: _location(error, results, 0, " of a validation")):
            while first < last:
                first = self._begin("validation", 0, first, last, results)
            totals = self._finish(results, None, 0, 0)
        return self._add(totals)

    def push(self) -> None:
        """Copies changes of the model to the servers, see `RemoteModel.push`; raises ServerLostError."""
        with self._lost_servers():
            self.remote.push()

    def pull(self) -> None:
        """Copies the servers' values to the model, see `RemoteModel.pull`; raises ServerLostError."""
        with self._lost_servers():
            self.remote.pull()
        self._servers.check()  # a server that is dead to Ray may still answer for a moment

    def _begin(self, name: str, epoch: int, first: int, last: int, results: list) -> int:
        """Schedules a span of steps from `first` to at most `last`; returns the step after it."""
        chunk = self._feeds[name].chunk_steps
        end = min(last, first + self._longest(name), (first // chunk + 1) * chunk)
        arguments = [tf.constant(value, tf.int64) for value in (epoch, first, end - first)]
        results.append((first, end, self._coordinator.schedule(self._spans[name], args=tuple(arguments))))
        return end

    def _longest(self, name: str) -> int:
        """Returns the largest number of steps of a span."""
        feed = self._feeds[name]
        longest = self._steps or min(_LONGEST_SPAN, feed.steps // (_SPANS_A_WORKER * self._servers.plan.num_workers))
        return max(1, min(longest, int(SUPERBATCH // max(1, feed.shape.row_bytes * feed.global_batch))))

    def _add(self, totals: list[list[np.ndarray]]) -> dict[str, float]:
        """Adds the sums of the spans' steps to the model's metrics, and returns their results."""
        for i, (variable, initial) in enumerate(zip(self.model.metrics_variables, self._initial, strict=True)):
            variable.assign(np.array(variable) + sum(total[i] - initial for total in totals))
        return self._logs()

    def _logs(self) -> dict[str, float]:
        return pythonify_logs(self.model.get_metrics_result())

    def _finish(self, results: list, progress, begin: int, first_count: int) -> list[list[np.ndarray]]:
        """Waits for all spans that have begun, and returns the metrics of each."""
        while not self._coordinator.done():
            self._poll(progress, begin, first_count)
        return [[np.asarray(v) for v in result.fetch()] for _, _, result in results]

    def _poll(self, progress, begin: int, first_count: int) -> None:
        self._servers.changed.wait(_POLL_INTERVAL)
        self._servers.check()
        if progress:
            progress(begin + self.remote.steps() - first_count)

    @contextlib.contextmanager
    def _lost_servers(self):
        """Translates TensorFlow's many errors for a lost server into one."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.InternalError):
            self._servers.changed.wait(10.0)
            self._servers.check()
            raise

    def steps(self, name: str) -> int:
        """Returns the number of steps of an epoch; 0 without such a dataset."""
        return self._feeds[name].steps if name in self._feeds else 0


def _location(error: tf.errors.OpError, results: list, before: int, more: str = "") -> str:
    """Returns the steps and the worker in which an error occurred, as a clause.

    Args:
        error: The error.
        results: (first step, step after the last one, its `RemoteValue`) of each span, from the first one on.
        before: Number of steps before step 0 of the spans.
        more: End of the clause's first part.
    """
    failed = [(first, end) for first, end, value in results if failed_with(value, error)]
    first, end = failed[0] if failed else (results[0][0], results[-1][1])
    worker = re.search(r"/job:worker/replica:\d+/task:(\d+)", str(error))
    return f"{progress_clause(before + first, end - first)}{more}{f', on worker {worker[1]}' if worker else ''}"


def train(task, session) -> dict[str, int] | None:
    """Trains on the coordinator; see `fit.train`.

    If a server dies, its variables are lost, and TensorFlow cannot replace it under a running coordinator. Functions
    and resources of the ClusterCoordinator refer to the dead server. So the coordinator's process ends, and the driver
    starts another one, with new servers and workers. It resumes from the copy in memory (`memory_every`), or else from
    the last checkpoint. Another process has that copy, so that it survives the coordinator. Such a copy is of all
    servers at once, while no step runs. So only rows of repeated steps are used again.
    """
    strategy, servers = context.get_strategy(), context.servers()
    with session.checkpoint() as folder:
        state = checkpoint.read_state(folder) if folder else None
        if is_complete(state, task):
            return None
        arguments = {name: task.feed(name) for name in task.used()}
        servers.feed(arguments)
        feeds = {name: Feed(**given, shapes_only=True) for name, given in arguments.items()}
        data = feeds["train"].dataset()
        keras.utils.set_random_seed(task.sampling.seed % 2**32)
        model = task.build_model(dict(task.config))
        build_from_data(model, data)
        users = users_callbacks(task, session)
        _warn_of_batches(users)
        training = CoordinatorTraining(
            options=task,
            seed=task.sampling.seed,
            session=session,
            folder=folder,
            state=state,
            model=model,
            feeds=feeds,
            datasets={},
            users=users,
            position=StepCounter(state.step if state else 0),
            waited=None,
            epochs=task.config["epochs"],
            build=describe_build(task, data),
            workers=servers.plan.num_workers,
            strategy=strategy,
            servers=servers,
        )
        try:
            loop.run_training(training, PARTS)
        except StopTraining as stop:
            return {"step": stop.step}
        except ServerLostError as error:
            why = f"{error}. {_restored_from(training.position, training.parts.get(StepCheckpointCallback))}"
            logger.error(why)
            raise ServerLostError(why) from error
    return None


@dataclasses.dataclass(kw_only=True, eq=False)
class CoordinatorTraining(Training):
    """A training whose steps are made by the workers of a ParameterServerStrategy.

    Args:
        strategy: The `tf.distribute.ParameterServerStrategy`.
        servers: Its servers.
    """

    strategy: tf.distribute.Strategy
    servers: ServerGroup

    def iterator(self) -> StepCounter:
        """Returns the counter of steps, by which the coordinator requests them."""
        return self.position

    def fit(self, callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.History:
        """Runs the remaining epochs, and calls callbacks at epochs."""
        task, model, position = self.options, self.model, self.position
        steps = None if task.steps_per_execution == "auto" else task.steps_per_execution
        runner = EpochRunner(model, self.strategy, self.servers, self.feeds, task.variable_partitioner, steps)
        saver, progress = self.parts.get(StepCheckpointCallback), self.parts.get(ProgressCallback)
        report_progress = progress and (lambda done: progress.on_train_batch_end(done - 1))
        hooks = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            model=model,
            epochs=self.epochs,
            steps=runner.steps("train"),
            verbose=0,
        )
        model.stop_training = False
        hooks.on_train_begin()
        for epoch in range(self.initial_epoch, self.epochs):
            model.reset_metrics()
            hooks.on_epoch_begin(epoch)
            runner.push()
            logs = runner.train(epoch, position, saver, report_progress)
            validated: dict[str, float] = {}
            if runner.steps("validation"):
                hooks.on_test_begin()
                validated = runner.validate()
            runner.pull()
            if validated:
                hooks.on_test_end(validated)
            logs |= {f"val_{name}": value for name, value in validated.items()}
            hooks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        hooks.on_train_end()
        return model.history


def _restored_from(position: StepCounter, saver: StepCheckpointCallback | None) -> str:
    """Returns the source from which new servers restore variables of a lost one, as a sentence without a full stop."""
    began = position.step - position.epoch_step
    stored, memory_step = max(began, saver.saved_step if saver else 0), saver.memory_step if saver else 0
    source = f"the checkpoint of step {stored}" if stored else "the beginning of the run, as there is no checkpoint yet"
    if memory_step > stored:
        source = f"the copy of step {memory_step} in the coordinator's memory"
    return (
        f"Other servers get them from {source}, where FailureConfig(max_failures=...) allows another start; the steps "
        "after it are repeated"
    )


def _warn_of_batches(users: list) -> None:
    names = sorted({type(c).__name__ for c in users if callbacks_module.reads_batches(c)})
    if names:
        warn_user(
            f"With parameter servers workers make steps by themselves, and callbacks are called at epochs only: "
            f"{', '.join(names)} will see no batches",
        )
