"""What Keras 3 needs to be right under a MultiWorkerMirroredStrategy.

Stock Keras 3 `fit` fails under several workers. `install()` changes Keras in this process so that `fit`, `evaluate`
and `predict` of several workers equal those of one process on the same global batches. Nothing changes for any other
strategy. In a step of `fit` or `evaluate`:

* A loss is the mean over this worker's rows. Gradients are weighted with the number of rows, summed over workers
  once, before clipping, accumulation, loss scaling and averaging see them, and divided by the rows of all workers.
* Losses that are no mean over rows (sums, masked or weighted means, functions of the whole batch) are corrected with
  the global divisor, or computed on the gathered global batch.
* A worker that got no row for a step computes on a placeholder row and contributes nothing.
* Metric variables are local until the end of an epoch; then they are summed, once, and moving statistics averaged.
* What callbacks decide is the chief's decision; files are written by the chief.

In a custom loop under `strategy.run` an optimizer sums gradients over replicas as TensorFlow's guides say, before
clipping and accumulation.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.metrics.reduction_metrics import Mean
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.utils.python_utils import pythonify_logs
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute import values as distribute_values

from raytf.collectives import communicator
from raytf.collectives.communicator import local_replicas, many_replicas
from raytf.errors import ConfigError, UnsupportedVersionError
from raytf.parallel import callbacks as callbacks_module
from raytf.parallel import epoch_iterator, local_sgd, losses, metrics, model_optimizers, verbosity
from raytf.parallel import optimizers as optimizers_module
from raytf.parallel import step as step_module
from raytf.parallel.step import originals

TESTED = {"keras": ("3.15",), "tensorflow": ("2.21",)}


def _make_function(self, step_function):
    """Runs `step_function` on every replica; outputs stay local to this worker.

    Keras' own version puts the step into a `tf.cond` into a `tf.while_loop`, and collectives lose their instance keys
    on the way; here the step lies in the loop itself.
    """
    strategy = self.distribute_strategy
    if not many_replicas(strategy):
        return originals["_make_function"](self, step_function)
    _refuse_what_cannot_work(self, strategy)
    replica_step = step_module.one_replica_step(self, step_function)
    training = step_function == self.train_step

    @tf.autograph.experimental.do_not_convert
    def one_step(data):
        outputs, rows = strategy.run(replica_step, args=(data,))
        local = strategy.experimental_local_results
        mean = lambda v: local(v)[0] if local_replicas(strategy) == 1 else tf.reduce_mean(local(v), axis=0)
        return tree.map_structure(mean, outputs), tf.reduce_sum(local(rows))

    one_step = self._autoconvert_optionals(one_step)
    if not self.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)

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

    compiled = None if self.run_eagerly else tf.function(steps, reduce_retracing=True)

    def eager_steps(iterator):
        for step in range(self.steps_per_execution):
            try:
                result = one_step(next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if step == 0:
                    raise
                break
        return result

    def function(iterator):
        is_tf = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
        outputs, rows = compiled(iterator) if is_tf and compiled else eager_steps(iterator)
        self.__dict__["_raytf_last"] = (outputs, rows)
        if training and self.__dict__.get("_raytf_sync_batches"):
            return metrics.global_logs(self, outputs, rows)
        return outputs

    return function


def _refuse_what_cannot_work(model, strategy):
    if model.jit_compile and not tf.config.list_physical_devices("GPU"):
        raise ConfigError(
            "jit_compile needs GPUs when there are several workers: TensorFlow has no collectives in XLA on CPUs",
            "jit_compile=True",
            "Compile the model with jit_compile=False, or give each worker a GPU",
        )
    used = []
    for optimizer in model_optimizers.of(model).values():
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        used += [n for n in ("gradient_accumulation_steps", "ema_overwrite_frequency") if getattr(inner, n, None)]
        used += ["LossScaleOptimizer"] if isinstance(optimizer, LossScaleOptimizer) else []
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


def _fit(self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args, **kwargs):
    original = originals["fit"]
    verbose, callbacks = verbosity.for_fit(verbose, callbacks)
    strategy = self.distribute_strategy
    if not many_replicas(strategy):
        return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
    self._assert_compile_called("fit")
    _refuse_what_cannot_work(self, strategy)
    if verbose == "auto" and not communicator.is_chief(strategy):
        verbose = 0
    _agree_on_seed(strategy)
    with callbacks_module.prepared(self, callbacks) as (callbacks, sync_batches):
        self.__dict__["_raytf_sync_batches"] = sync_batches
        try:
            return original(self, x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)
        finally:
            self.__dict__.pop("_raytf_sync_batches", None)


def _agree_on_seed(strategy):
    """Workers that shuffle the same arrays must shuffle them alike."""
    if tf.compat.v1.get_seed(None)[0] is None:
        (seed,) = communicator.from_chief(strategy, [np.random.SeedSequence().generate_state(1).astype(np.int64) >> 1])
        tf.random.set_seed(int(seed[0]))


def _evaluate(self, x=None, y=None, batch_size=None, verbose="auto", *args, **kwargs):
    if many_replicas(self.distribute_strategy):
        _refuse_what_cannot_work(self, self.distribute_strategy)
        if self.built:
            metrics.synchronize(self)
    return originals["evaluate"](self, x, y, batch_size, verbosity.for_call(verbose), *args, **kwargs)


def _predict(self, x, batch_size=None, verbose="auto", *args, **kwargs):
    return originals["predict"](self, x, batch_size, verbosity.for_call(verbose), *args, **kwargs)


def _make_predict_function(self, force=False):
    if many_replicas(self.distribute_strategy) and "predict_step" not in self.__dict__:
        predict_step = self.predict_step

        def padded(data):
            x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
            rows, partial = step_module.count_rows(step_module.first_leaf(x))
            if not partial:
                return predict_step(data)
            outputs = predict_step(step_module.with_placeholder(data, rows))
            return tree.map_structure(lambda t: t[:rows], outputs)

        self.__dict__["predict_step"] = padded
    return originals["make_predict_function"](self, force)


def _on_batch(name):
    def wrapper(self, *args, return_dict=False, **kwargs):
        logs = originals[name](self, *args, return_dict=True, **kwargs)
        if many_replicas(self.distribute_strategy):
            logs = pythonify_logs(metrics.global_logs(self, *self.__dict__["_raytf_last"]))
        return logs if return_dict else self._flatten_metrics_in_order(logs)

    return wrapper


def check_versions() -> None:
    """Raises UnsupportedVersionError unless Keras and TensorFlow are versions that the tests of raytf run with."""
    installed = {"keras": keras.__version__, "tensorflow": tf.__version__}
    wrong = {k: v for k, v in installed.items() if not any(v.startswith(f"{t}.") for t in TESTED[k])}
    if wrong:
        works = ", ".join(f"{k} {'/'.join(f'{v}.*' for v in versions)}" for k, versions in TESTED.items())
        raise UnsupportedVersionError(
            f"raytf's multi-worker support is tested with {works}; received: "
            f"{', '.join(f'{k} {v}' for k, v in wrong.items())}. Install one of these versions, or pass "
            "allow_untested_keras=True to go on at your own risk."
        )
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedVersionError(
            f"raytf trains with Keras' TensorFlow backend; received: {keras.backend.backend()}. "
            "Unset KERAS_BACKEND or set it to tensorflow."
        )


def install(allow_untested: bool = False) -> None:
    """Makes Keras 3 right under several workers, in this process, until it ends. A second call does nothing.

    Args:
        allow_untested: go on with versions of Keras or TensorFlow that raytf is not tested with.

    Raises:
        UnsupportedVersionError: such a version is installed and `allow_untested` is False.
    """
    if originals:
        return
    if not allow_untested:
        check_versions()

    def replace(owner, name, new, key=None):
        originals[key or name] = getattr(owner, name)
        setattr(owner, name, new)

    trainer = tf_trainer.TensorFlowTrainer
    for name, new in {
        "_make_function": _make_function,
        "_maybe_symbolic_build": epoch_iterator.maybe_symbolic_build,
        "fit": _fit,
        "evaluate": _evaluate,
        "predict": _predict,
        "make_predict_function": _make_predict_function,
        "_get_metrics_result_or_logs": metrics.get_metrics_result_or_logs,
        "train_on_batch": _on_batch("train_on_batch"),
        "test_on_batch": _on_batch("test_on_batch"),
    }.items():
        replace(trainer, name, functools.wraps(getattr(trainer, name))(new))
    replace(tf_trainer, "TFEpochIterator", epoch_iterator.epoch_iterator)
    replace(loss_module, "reduce_weighted_values", losses.reduce_weighted_values)
    replace(loss_module.Loss, "__call__", losses.loss_call, "Loss.__call__")
    replace(compile_utils.CompileLoss, "build", losses.compile_loss_build, "CompileLoss.build")
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        replace(loss_module, name, functools.partial(losses.scale_for_distribution, getattr(loss_module, name)))
    replace(Mean, "update_state", losses.mean_update_state, "Mean.update_state")
    for kind in (BaseOptimizer, LossScaleOptimizer):
        original = kind.apply
        kind.apply = functools.wraps(original)(
            lambda self, grads, trainable_variables=None, original=original: optimizers_module.apply(
                original, self, grads, trainable_variables
            )
        )
    replace(tf_core.Variable, "_direct_assign", metrics.direct_assign, "Variable._direct_assign")
    replace(
        tf_core.Variable,
        "_initialize_with_initializer",
        step_module.initialize,
        "Variable._initialize_with_initializer",
    )
    replace(LossScaleOptimizer, "_tf_apply", optimizers_module.loss_scale_apply)
    replace(TFOptimizer, "_all_reduce_sum_gradients", optimizers_module.all_reduce_sum_gradients)
    replace(mirrored_run._MirroredReplicaContext, "_merge_call", optimizers_module.merge_call)
    replace(tf_nn, "_compute_moments_sync", optimizers_module.moments_sync)
    replace(SeedGenerator, "next", optimizers_module.seed_next, "SeedGenerator.next")
    for number in (int, float):  # callbacks read `float(model.optimizer.learning_rate)`
        name = f"__{number.__name__}__"
        setattr(distribute_values.DistributedVariable, name, lambda self, number=number: number(self.numpy()))
