"""What Keras 3 needs to be right under a MultiWorkerMirroredStrategy.

Stock Keras 3 `fit` fails under several workers. `install()` changes Keras in this process so that `fit`, `evaluate`
and `predict` of several workers equal those of one process on the same global batches. For any other strategy nothing
changes but how an optimizer's update is computed, see `compiled_update`. In a step of `fit` or `evaluate`:

* A loss is the mean over this worker's rows. Gradients are weighted with the number of rows, summed over workers
  where a tape gives them, before clipping, accumulation, loss scaling and averaging see them, and divided by the rows
  of all workers.
* Losses that are no mean over rows (sums, masked or weighted means, functions of the whole batch) are corrected with
  the global divisor, or computed on the gathered global batch; so are a user's metrics that are no sum over rows. What
  a user's function does with its rows is found out on halves of a batch, see `halves`.
* Logs are those of all workers' rows, whatever a step of the user's returns, see `step_logs`.
* A worker that got no row for a step computes on a placeholder row and contributes nothing.
* Metric variables are local until the end of an epoch; then they are summed, once, and moving statistics averaged.
* What callbacks decide is the chief's decision; files are written by the chief.

In a custom loop under `strategy.run` an optimizer sums gradients over replicas as TensorFlow's guides say, before
clipping and accumulation, its own and what a compiled loop does before (`own_loops`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf import activity, validation
from raytf.collectives import communicator, exchange, healing
from raytf.collectives.communicator import local_replicas, many_replicas, spans_workers
from raytf.compat import keras_objects, patching
from raytf.compat.keras import backend_trainer, pythonify_logs
from raytf.compat.patching import patch
from raytf.compat.tensorflow import DistributedVariable, traced_apart
from raytf.errors import ConfigError, UnsupportedVersionError, with_cause
from raytf.parallel import callbacks as callbacks_module
from raytf.parallel import (
    epoch_iterator,
    gradients,
    iterator_ends,
    joined_state,
    local_sgd,
    losses,
    metrics,
    model_optimizers,
    observed,
    optimizers,
    own_loops,
    own_state,
    python_arrays,
    step_logs,
    verbosity,
)
from raytf.parallel import step as step_module

# Those that say what stands in the place of Keras' functions, beside this one.
REPLACING = (
    epoch_iterator,
    gradients,
    iterator_ends,
    losses,
    metrics,
    optimizers,
    own_loops,
    python_arrays,
    step_module,
)
_installed: list[bool] = []


@patch((backend_trainer.TensorFlowTrainer, "_make_function"))
def _make_function(original, self, step_function):
    """Runs `step_function` on every replica; outputs stay local to this worker.

    Keras' own version puts the step into a `tf.cond` into a `tf.while_loop`, and collectives lose their instance keys
    on the way; here the step lies in the loop itself.
    """
    strategy = self.distribute_strategy
    training = step_function == self.train_step
    step_function = observed.step_of(self, step_function, training)
    if not many_replicas(strategy):
        return _told(self, original(self, step_function), training)
    _refuse_what_cannot_work(self, strategy)
    states = joined_state.States(self, self.__dict__.setdefault("_raytf_named", set())) if training else None
    replica_step = step_module.one_replica_step(self, step_function, states)
    if training:
        replica_step = own_state.passing_on(self, replica_step)

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        outputs, rows = strategy.run(replica_step, args=(data,))
        return step_logs.joined(strategy, outputs, rows, step_logs.notes_of(self).of[training])

    one_step = keras_objects.autoconverted(self, one_step)
    if not self.run_eagerly:
        one_step = traced_apart(one_step, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def steps(iterator):
        result = one_step(iterator.get_next())
        if self.steps_per_execution == 1:
            return result

        def body(done, upcoming, _):
            outputs = one_step(upcoming.get_value())
            more = done + 1 < self.steps_per_execution
            following = tf.cond(more, iterator.get_next_as_optional, lambda: upcoming)
            return done + 1, following, outputs

        _, _, result = tf.while_loop(
            lambda done, upcoming, _: tf.logical_and(done < self.steps_per_execution, upcoming.has_value()),
            body,
            (tf.constant(1), iterator.get_next_as_optional(), result),
            parallel_iterations=1,
        )
        return result

    compiled = None if self.run_eagerly else traced_apart(steps, reduce_retracing=True)

    def eager_steps(iterator):
        for done in range(self.steps_per_execution):
            try:
                result = one_step(step_module.local_parts(strategy, next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                if done == 0:
                    raise
                break
        return result

    def together(iterator) -> bool:
        """Whether all steps of an execution may be made by one call."""
        if compiled is None or not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return False
        if self.steps_per_execution == 1 or not spans_workers(strategy) or exchange.of(strategy) is not None:
            return True
        # TensorFlow's collectives cannot change their shapes within a call, as rows that are gathered do
        compiled.get_concrete_function(iterator)
        return not step_logs.notes_of(self).gathers

    def function(iterator):
        outputs, rows = compiled(iterator) if together(iterator) else eager_steps(iterator)
        self.__dict__["_raytf_last"] = (outputs, rows)
        if not training:
            return outputs
        healing.here.close()
        if healing.here.healed:
            own_state.check_alike(self)
        healing.here.steps_made()
        return metrics.global_logs(self, outputs, rows) if self.__dict__.get("_raytf_sync_batches") else outputs

    return _told(self, function, training)


def _told(model, function: Callable, training: bool) -> Callable:
    """An execution of steps that tells `activity` when it begins and ends."""
    here, notes = activity.here, step_logs.notes_of(model)
    if not training:

        def tested(iterator):
            notes.last = False
            with here.within(activity.VALIDATION), _cause_first("in a step of a validation"):
                return function(iterator)

        return tested

    def trained(iterator):
        here.at(activity.STEP)
        notes.last = True
        own_state.resumes(model)
        try:
            with healing.here.execution(), _cause_first(_steps_behind(here.step, model.steps_per_execution)):
                outputs = function(iterator)
        except BaseException:  # the data has ended, too
            here.at(activity.CALLBACKS)
            raise
        here.executed(model.steps_per_execution)
        return outputs

    return trained


def _steps_behind(done: int, count: int) -> str:
    """Names the steps of an execution, of which so many are made in this start."""
    return f"in step {done + 1}" if count == 1 else f"in one of the steps {done + 1} to {done + count}"


# What ends data, and what follows from the loss of another process: others look for these.
_OF_OTHERS = (
    tf.errors.OutOfRangeError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)


@contextlib.contextmanager
def _cause_first(where: str):
    """Within it an error of TensorFlow's begins with its cause, which stands below some 50 lines of a graph's."""
    try:
        yield
    except tf.errors.OpError as error:
        text = str(error)
        said = with_cause(text, where)
        if isinstance(error, _OF_OTHERS) or said == text:
            raise
        try:
            raised = type(error)(error.node_def, error.op, said)
        except TypeError:  # of a class with other arguments
            raise error from error.__cause__
        raise raised.with_traceback(error.__traceback__) from error.__cause__


def _refuse_what_cannot_work(model, strategy):
    used = []
    for optimizer in model_optimizers.of(model).values():
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        used += [n for n in ("gradient_accumulation_steps", "ema_overwrite_frequency") if getattr(inner, n, None)]
        used += ["LossScaleOptimizer"] if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else []
    used = sorted(set(used))
    if used and local_sgd.every(strategy) > 1:
        raise ConfigError(
            "With sync_every each worker makes whole steps by itself",
            f"{', '.join(used)} with sync_every={local_sgd.every(strategy)}",
            "Leave one of them out",
        )
    if used and local_replicas(strategy) > 1:
        raise ConfigError(
            "This optimizer option changes variables in a condition, which needs one device for each worker",
            f"{', '.join(used)} with {local_replicas(strategy)} devices in each worker",
            "Start one worker for each GPU",
        )


@patch((backend_trainer.TensorFlowTrainer, "fit"))
def _fit(original, self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args, **kwargs):
    """Callbacks and seeds are agreed on with the other workers; the chief alone shows what `verbose` asks for."""
    validation.check_callbacks(callbacks)
    verbose, callbacks = verbosity.for_fit(verbose, callbacks)
    with contextlib.ExitStack() as ends:
        ends.callback(activity.here.at, activity.BEGIN)  # what follows is the user's own
        ends.enter_context(activity.here.calling("model.fit()"))
        return _agreed_fit(original, self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)


def _agreed_fit(original, self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs):
    strategy = self.distribute_strategy
    if not many_replicas(strategy):
        return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
    keras_objects.check_compiled(self, "fit")
    _refuse_what_cannot_work(self, strategy)
    if verbose == "auto" and not communicator.is_chief(strategy):
        verbose = 0
    _agree_on_seed(strategy)
    with callbacks_module.prepared(self, callbacks) as (callbacks, sync_batches):
        listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        self.__dict__.update(_raytf_sync_batches=sync_batches, _raytf_callbacks=listed)
        try:
            return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
        finally:
            for name in ("_raytf_sync_batches", "_raytf_callbacks"):
                self.__dict__.pop(name, None)


def _agree_on_seed(strategy):
    """Workers that shuffle the same arrays must shuffle them alike."""
    if tf.compat.v1.get_seed(None)[0] is None:
        (seed,) = communicator.from_chief(strategy, [np.random.SeedSequence().generate_state(1).astype(np.int64) >> 1])
        tf.random.set_seed(int(seed[0]))


@patch((backend_trainer.TensorFlowTrainer, "evaluate"))
def _evaluate(original, self, x=None, y=None, batch_size=None, verbose="auto", *args, **kwargs):
    """Refused where it cannot be right; the chief alone shows what `verbose` asks for."""
    with activity.here.calling("model.evaluate()"):
        if many_replicas(self.distribute_strategy):
            _refuse_what_cannot_work(self, self.distribute_strategy)
            if self.built:
                metrics.synchronize(self)
        notes = step_logs.notes_of(self)
        trained, last = notes.last, {k: v for k, v in self.__dict__.items() if k == "_raytf_last"}
        try:
            return original(self, x, y, batch_size, verbosity.for_call(verbose), *args, **kwargs)
        finally:
            if trained:  # within `fit`, whose epoch ends with the logs of its own last step
                notes.last = trained
                self.__dict__.update(last)


@patch((backend_trainer.TensorFlowTrainer, "predict"))
def _predict(original, self, x, batch_size=None, verbose="auto", *args, **kwargs):
    """Shown by the chief alone."""
    return original(self, x, batch_size, verbosity.for_call(verbose), *args, **kwargs)


@patch((backend_trainer.TensorFlowTrainer, "make_predict_function"))
def _make_predict_function(original, self, force=False):
    """A worker without a row of the last batch predicts one that is left out, so that all take part in its sums."""
    if many_replicas(self.distribute_strategy) and "predict_step" not in self.__dict__:
        predict_step = self.predict_step

        def padded(data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            rows, partial = step_module.count_rows(step_module.first_leaf(x))
            if not partial:
                return predict_step(data)
            outputs = predict_step(step_module.with_placeholder(data, rows))
            return tree.map_structure(lambda t: t[:rows], outputs)

        self.__dict__["predict_step"] = padded
    return original(self, force)


@patch((backend_trainer.TensorFlowTrainer, "train_on_batch"), (backend_trainer.TensorFlowTrainer, "test_on_batch"))
def _on_batch(original, self, *args, return_dict=False, **kwargs):
    """Logs of a batch are those of all workers' rows."""
    logs = original(self, *args, return_dict=True, **kwargs)
    if many_replicas(self.distribute_strategy):
        logs = pythonify_logs(metrics.global_logs(self, *self.__dict__["_raytf_last"]))
    return logs if return_dict else keras_objects.in_order(self, logs)


@patch((backend_trainer.TensorFlowTrainer, "predict_on_batch"))
def _predict_on_batch(original, self, x):
    """Each row is predicted once, and not by each replica."""
    return original(self, step_module.local_parts(self.distribute_strategy, x))


@patch((DistributedVariable, "__int__"))
def variable_as_int(original, self):
    """Callbacks read `int(optimizer.iterations)`; TensorFlow's variables of several replicas have no such method."""
    return int(self.numpy())


@patch((DistributedVariable, "__float__"))
def variable_as_float(original, self):
    """Callbacks read `float(optimizer.learning_rate)`, see above."""
    return float(self.numpy())


def check_backend() -> None:
    """Raises UnsupportedVersionError if Keras trains with another backend."""
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedVersionError(
            f"raytf trains with Keras' TensorFlow backend; received: {keras.backend.backend()}. "
            "Unset KERAS_BACKEND or set it to tensorflow."
        )


def install() -> None:
    """Makes Keras 3 right under several workers, in this process, until it ends. A second call does nothing.

    Raises:
        UnsupportedVersionError: Keras trains with another backend.
    """
    if not _installed:
        check_backend()
        patching.install()
        _installed.append(True)
