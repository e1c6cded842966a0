"""Corrects Keras 3 under a MultiWorkerMirroredStrategy: `install()` changes Keras in this process.

Then `fit`, `evaluate` and `predict` on several workers equal those of one process on the same global batches. With
other strategies only the computation of an optimizer's update changes, see `compiled_update`. In a custom loop under
`strategy.run` an optimizer sums gradients over replicas before clipping and accumulation, see `own_loops`.
docs/design/determinism.md lists what changes in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf import activity, validation
from raytf.collectives import communicator, exchange, recovery_client
from raytf.collectives.communicator import local_replicas, many_replicas, spans_workers
from raytf.compat import keras_objects, patching
from raytf.compat.keras import backend_trainer, pythonify_logs
from raytf.compat.patching import patch
from raytf.compat.tensorflow import DistributedVariable, separate_function
from raytf.errors import ConfigError, UnsupportedVersionError
from raytf.parallel import callbacks as callbacks_module
from raytf.parallel import (
    compiled_update,
    epoch_iterator,
    gradients,
    iterator_release,
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
    shards,
    sparse_rows,
    step_logs,
    verbosity,
)
from raytf.parallel import step as step_module
from raytf.parallel.step_errors import cause_first, progress_clause

# Modules that replace functions of Keras, in addition to this one.
REPLACING = (
    compiled_update,
    epoch_iterator,
    gradients,
    iterator_release,
    losses,
    metrics,
    optimizers,
    own_loops,
    python_arrays,
    shards,
    sparse_rows,
    step_module,
)
_installed: list[bool] = []


@patch((backend_trainer.TensorFlowTrainer, "_make_function"))
def _make_function(original, self, step_function):
    """Runs `step_function` on every replica; outputs stay local to this worker.

    Keras' own version nests the step in a `tf.cond` in a `tf.while_loop`, where collectives lose their instance keys.
    This version has the step in the loop itself.
    """
    strategy = self.distribute_strategy
    training = step_function == self.train_step
    step_function = observed.step_of(self, step_function, training)
    if not many_replicas(strategy):
        return _track_activity(self, original(self, step_function), training)
    _refuse_what_cannot_work(self, strategy)
    named, states = self.__dict__.setdefault("_raytf_named", set()), None
    if training:
        _refuse_float8(self)
        joined_state.report_normalization(self, named)
        states = joined_state.States(self, named)
    replica_step = step_module.one_replica_step(self, step_function, states)
    if training:
        replica_step = shards.in_step(self, own_state.passing_on(self, replica_step))

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        outputs, rows = strategy.run(replica_step, args=(data,))
        return step_logs.joined(strategy, outputs, rows, step_logs.notes_of(self).traces[training])

    one_step = keras_objects.autoconverted(self, one_step)
    if not self.run_eagerly:
        one_step = separate_function(one_step, reduce_retracing=True)

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

    compiled = None if self.run_eagerly else separate_function(steps, reduce_retracing=True)

    def eager_steps(iterator):
        for done in range(self.steps_per_execution):
            try:
                result = one_step(step_module.local_parts(strategy, next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                if done == 0:
                    raise
                break
        return result

    def fits_one_call(iterator) -> bool:
        """Returns whether one call may make all steps of an execution."""
        if compiled is None or not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return False
        if self.steps_per_execution == 1 or not spans_workers(strategy) or exchange.exchange_of(strategy) is not None:
            return True
        # TensorFlow's collectives need constant shapes within a call, and gathered rows change theirs
        compiled.get_concrete_function(iterator)
        return not step_logs.notes_of(self).gathers

    def function(iterator):
        outputs, rows = compiled(iterator) if fits_one_call(iterator) else eager_steps(iterator)
        self.__dict__["_raytf_last"] = (outputs, rows)
        if not training:
            return outputs
        recovery_client.client.close()
        if recovery_client.client.recovered:
            own_state.check_alike(self)
        recovery_client.client.steps_made()
        return metrics.global_logs(self, outputs, rows) if self.__dict__.get("_raytf_sync_batches") else outputs

    return _track_activity(self, function, training)


def _track_activity(model, function: Callable, training: bool) -> Callable:
    """Wraps an execution of steps: reports its begin and end to `activity`."""
    activity_log, notes = activity.tracker, step_logs.notes_of(model)
    if not training:

        def tested(iterator):
            notes.last = False
            location = f"{progress_clause(notes.tested, model.steps_per_execution)} of a validation"
            with activity_log.in_phase(activity.VALIDATION), cause_first(location):
                outputs = function(iterator)
            notes.tested += model.steps_per_execution
            return outputs

        return tested

    def trained(iterator):
        activity_log.enter(activity.STEP)
        notes.last = True
        own_state.send_before_execution(model)
        try:
            with (
                recovery_client.client.execution(),
                cause_first(progress_clause(activity_log.step, model.steps_per_execution)),
            ):
                outputs = function(iterator)
        except BaseException:  # also at the end of the data
            activity_log.enter(activity.CALLBACKS)
            raise
        activity_log.executed(model.steps_per_execution)
        return outputs

    return trained


def _refuse_what_cannot_work(model, strategy):
    joined_state.refuse_state_of_rows(model)
    used = []
    for optimizer in model_optimizers.optimizers_of(model).values():
        for part in model_optimizers.updating(optimizer):
            used += [n for n in ("gradient_accumulation_steps", "ema_overwrite_frequency") if getattr(part, n, None)]
        used += ["LossScaleOptimizer"] if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else []
    used = sorted(set(used))
    if used and local_sgd.averaging_interval(strategy) > 1:
        raise ConfigError(
            "With sync_every each worker makes whole steps by itself",
            f"{', '.join(used)} with sync_every={local_sgd.averaging_interval(strategy)}",
            "Leave one of them out",
        )
    for metric in observed.metrics_of(model) if local_replicas(strategy) > 1 else ():
        if any(not _has_replicas(variable) for variable in metric.variables):
            raise ConfigError(
                "With several devices in one process metrics must be created within the strategy's scope",
                f"the metric {metric.name!r}, created outside of it, whose variables the devices would overwrite",
                "Create it where the model is compiled, within strategy.scope()",
            )
    if used and local_replicas(strategy) > 1:
        raise ConfigError(
            "This optimizer option changes variables in a condition, which needs one device for each worker",
            f"{', '.join(used)} with {local_replicas(strategy)} devices in each worker",
            "Start one worker for each GPU",
        )


def _refuse_float8(model):
    """Raises ConfigError for a variable whose gradient is its new value, such as the largest number of a batch."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ConfigError(
                "Layers of float8 note the largest number of a batch, which each worker has of its own rows",
                f"the variable {variable.path!r}, with several workers",
                "Train in another precision, such as mixed_bfloat16, or on one worker",
            )


def _has_replicas(variable) -> bool:
    """Returns whether a variable was created within the scope of a strategy with several replicas."""
    return step_module.is_shared(variable) or isinstance(keras_objects.variable_of(variable), DistributedVariable)


@patch((backend_trainer.TensorFlowTrainer, "fit"))
def _fit(original, self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args, **kwargs):
    """Replaces `fit`: uses the chief's callback decisions and seed on all workers; only the chief prints progress."""
    validation.check_callbacks(callbacks)
    verbose, callbacks = verbosity.for_fit(verbose, callbacks)
    with contextlib.ExitStack() as ends:
        ends.callback(activity.tracker.enter, activity.BEGIN)  # the user's code follows
        ends.enter_context(activity.tracker.calling("model.fit()"))
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
    """Broadcasts the chief's seed if none is set: workers must shuffle the same arrays in the same order."""
    if tf.compat.v1.get_seed(None)[0] is None:
        (seed,) = communicator.broadcast_from_chief(
            strategy, [np.random.SeedSequence().generate_state(1).astype(np.int64) >> 1]
        )
        tf.random.set_seed(int(seed[0]))


@patch((backend_trainer.TensorFlowTrainer, "evaluate"))
def _evaluate(original, self, x=None, y=None, batch_size=None, verbose="auto", *args, **kwargs):
    """Replaces `evaluate`: raises ConfigError for unsupported options; only the chief prints progress."""
    with activity.tracker.calling("model.evaluate()"):
        if many_replicas(self.distribute_strategy):
            _refuse_what_cannot_work(self, self.distribute_strategy)
            if self.built:
                metrics.synchronize(self)
        notes = step_logs.notes_of(self)
        notes.tested = 0
        trained, last = notes.last, {k: v for k, v in self.__dict__.items() if k == "_raytf_last"}
        try:
            return original(self, x, y, batch_size, verbosity.for_call(verbose), *args, **kwargs)
        finally:
            if trained:  # within `fit`, whose epoch ends with the logs of its last training step
                notes.last = trained
                self.__dict__.update(last)


@patch((backend_trainer.TensorFlowTrainer, "predict"))
def _predict(original, self, x, batch_size=None, verbose="auto", *args, **kwargs):
    """Replaces `predict`: only the chief prints progress."""
    step_logs.notes_of(self).predicted = 0
    return original(self, x, batch_size, verbosity.for_call(verbose), *args, **kwargs)


@patch((backend_trainer.TensorFlowTrainer, "make_predict_function"))
def _make_predict_function(original, self, force=False):
    """Predicts a placeholder row on a worker without rows, and drops it: all workers must join the collectives."""
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
    known = self.predict_function
    original(self, force)
    if self.predict_function is not known:
        self.predict_function = _predicted(self, self.predict_function)
    return self.predict_function


def _predicted(model, function: Callable) -> Callable:
    """Wraps an execution of prediction steps: its errors name the step."""
    notes = step_logs.notes_of(model)

    def predicted(data):
        with cause_first(f"{progress_clause(notes.predicted, len(data))} of a prediction"):
            outputs = function(data)
        notes.predicted += len(data)
        return outputs

    return predicted


@patch((backend_trainer.TensorFlowTrainer, "train_on_batch"), (backend_trainer.TensorFlowTrainer, "test_on_batch"))
def _on_batch(original, self, *args, return_dict=False, **kwargs):
    """Returns logs over all workers' rows of a batch."""
    logs = original(self, *args, return_dict=True, **kwargs)
    if many_replicas(self.distribute_strategy):
        logs = pythonify_logs(metrics.global_logs(self, *self.__dict__["_raytf_last"]))
    return logs if return_dict else keras_objects.in_order(self, logs)


@patch((backend_trainer.TensorFlowTrainer, "predict_on_batch"))
def _predict_on_batch(original, self, x):
    """Predicts each row once, and not on each replica."""
    return original(self, step_module.local_parts(self.distribute_strategy, x))


@patch((DistributedVariable, "__int__"))
def variable_as_int(original, self):
    """Adds `int(optimizer.iterations)` for callbacks, which TensorFlow's variables of several replicas lack."""
    return int(self.numpy())


@patch((DistributedVariable, "__float__"))
def variable_as_float(original, self):
    """Adds `float(optimizer.learning_rate)` for callbacks, for the same reason."""
    return float(self.numpy())


def check_backend() -> None:
    """Raises UnsupportedVersionError if Keras trains with another backend."""
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedVersionError(
            f"raytf trains with Keras' TensorFlow backend; received: {keras.backend.backend()}. "
            "Unset KERAS_BACKEND or set it to tensorflow."
        )


def install() -> None:
    """Corrects Keras 3 under several workers for the lifetime of this process. A second call does nothing.

    Raises:
        UnsupportedVersionError: Keras trains with another backend.
    """
    if not _installed:
        check_backend()
        patching.install()
        _installed.append(True)
