"""Optimizers and seeds with several workers: gradients of the global batch, and a random stream for each replica."""

from __future__ import annotations

import functools
import threading

import keras
import numpy as np
import tensorflow as tf

from raytf.collectives.communicator import all_sum, local_replicas
from raytf.compat import keras_objects
from raytf.compat.keras import BaseOptimizer, TFOptimizer, backend_nn, seed_module
from raytf.compat.patching import patch
from raytf.compat.tensorflow import mirrored_replica_context, plain_merge_call, random_seed
from raytf.errors import ConfigError
from raytf.parallel import compiled_update, gradients, local_sgd, own_loops, reduction_probe, shards, sparse_rows
from raytf.parallel import step as step_module

# Distance of the replicas' seeds, so large that no two are equal: a seed counts up by one for each draw.
_REPLICA_SEED = 1_000_003
# TensorFlow's functions that draw from a state of the process, and the size of its seeds.
_DRAWING, _SEEDS = ("normal", "uniform", "truncated_normal", "gamma", "poisson", "categorical", "shuffle"), 2**31 - 1


@patch((BaseOptimizer, "apply"), (keras.optimizers.LossScaleOptimizer, "apply"))
def apply(original, self, grads, trainable_variables=None):
    """Replaces `Optimizer.apply`: applies the gradients of the global batch, as in one process."""
    if getattr(step_module.state, "reduced", False) or compiled_update.is_within():
        return original(self, grads, trainable_variables)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if not step_module.in_replica_of_many():
        return _updated(original, self, grads, trainable_variables)
    grads = [tf.convert_to_tensor(g) if isinstance(g, np.ndarray) else g for g in grads]
    strategy = tf.distribute.get_strategy()
    shares = shards.shares_of(self)
    if shares is not None:
        grads, trainable_variables = shares.update(grads, trainable_variables)
        if not grads:
            with step_module.override_state(inline_merge=True):
                self.iterations.assign_add(1)
            return None
    local = local_sgd.averaging_interval(strategy) > 1
    weights = trainable_variables or keras_objects.variables_of_optimizer(self)
    grads = gradients.of_this_worker(grads) if local else gradients.for_optimizer(grads, weights)
    # variables without gradients, such as `iterations`, change when all gradients are ready: see `recovery_client`
    dependencies = [] if local else [own_loops.content_of(g) for g in grads if g is not None]
    with (
        tf.control_dependencies(dependencies),
        step_module.override_state(reduced=True, inline_merge=local_replicas(strategy) == 1),
    ):
        result = _updated(original, self, grads, trainable_variables)
    if local:
        local_sgd.average_when_due(self.iterations, weights)
    return result


def _updated(original, optimizer, grads, variables):
    """Calls `apply`, compiled by XLA if possible."""
    if tf.distribute.in_cross_replica_context():
        return original(optimizer, grads, variables)
    if not optimizer.built and variables and not tf.executing_eagerly():
        with step_module.outside(), keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    update = lambda values: original(optimizer, values, variables)
    trained = variables or keras_objects.variables_of_optimizer(optimizer)
    if any(isinstance(g, tf.IndexedSlices) for g in grads):
        grads, tables = sparse_rows.prepared(optimizer, grads, trained)
        with step_module.override_state(has_rows=True, tables=tables):
            return update(grads)
    if compiled_update.compiles_per_shape(optimizer, grads):
        with step_module.override_state(compiles_per_shape=True):
            return update(grads)
    return None if compiled_update.add_compiled_update(optimizer, update, grads, trained) else update(grads)


@patch((TFOptimizer, "_distributed_tf_update_step"))
def distributed_update_step(original, self, distribution, grads_and_vars, learning_rate):
    """Replaces `TFOptimizer._distributed_tf_update_step`: compiles the update of variables with dense gradients.

    Tables with gradients of some rows are updated by Keras' operations, or see `sparse_rows`.
    """
    if not getattr(step_module.state, "has_rows", False):
        return original(self, distribution, grads_and_vars, learning_rate)
    dense = [pair for pair in grads_and_vars if not isinstance(pair[0], tf.IndexedSlices)]
    by_rows = [pair for pair in grads_and_vars if isinstance(pair[0], tf.IndexedSlices)]
    if dense:
        grads, variables = zip(*dense, strict=True)
        update = lambda values: original(self, distribution, list(zip(values, variables, strict=True)), learning_rate)
        if not compiled_update.add_compiled_update(self, update, grads, variables):
            update(grads)
    if not sparse_rows.lazy:
        return original(self, distribution, by_rows, learning_rate)
    of_rows = functools.partial(sparse_rows.update, self)
    for gradient, variable in by_rows:
        distribution.extended.update(variable, of_rows, args=(gradient, learning_rate), group=False)


@patch((keras.optimizers.LossScaleOptimizer, "_tf_apply"))
def loss_scale_apply(original, self, grads, trainable_variables=None):
    """Replaces `LossScaleOptimizer._tf_apply`: applies directly if this process has one replica.

    Keras calls the inner optimizer in other threads, without the state of this step: these would sum again.
    """
    if getattr(step_module.state, "reduced", False) and local_replicas(tf.distribute.get_strategy()) == 1:
        keras_objects.apply_scaled(self, grads, trainable_variables)
    else:
        original(self, grads, trainable_variables)


@patch((TFOptimizer, "_all_reduce_sum_gradients"))
def all_reduce_sum_gradients(original, self, grads_and_vars):
    """Skips the all-reduce if gradients are already summed, as clipping and accumulation need the sums."""
    if getattr(step_module.state, "reduced", False):
        return grads_and_vars
    return original(self, grads_and_vars)


@patch((mirrored_replica_context(), "_merge_call"))
def merge_call(original, self, fn, args, kwargs):
    """Calls `fn` directly if this process has one replica, so that it works inside a `tf.cond`, too.

    Raises:
        ConfigError: There are several replicas, and the call is inside a `tf.cond`, `tf.while_loop` or `tf.function`
            of a step.
    """
    graph = getattr(threading.current_thread(), "graph", None)
    nested = graph is not None and not tf.executing_eagerly() and graph is not tf.compat.v1.get_default_graph()
    if getattr(step_module.state, "inline_merge", False) or (nested and local_replicas(self.strategy) == 1):
        return plain_merge_call(self, fn, args, kwargs)
    if nested:
        raise ConfigError(
            "With several devices in one process an optimizer must be called in the step itself",
            f"one inside a tf.cond, tf.while_loop or tf.function of the step, with {local_replicas(self.strategy)} "
            "devices in each worker",
            "Start one worker for each device, or take it out",
        )
    return original(self, fn, args, kwargs)


@patch((keras.random.SeedGenerator, "next"))
def seed_next(original, self, ordered=True):
    """Advances seeds equally on all workers, while each replica draws from its own stream."""
    seed = original(self, ordered)
    if getattr(step_module.state, "draws_other", False):  # a trial that finds out whether a function draws
        return seed + tf.constant([_REPLICA_SEED, 0], seed.dtype)
    # a function of all rows draws on each replica what one process would draw
    if not step_module.in_replica_of_many() or getattr(step_module.state, "whole_batch", None) is not None:
        return seed
    replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, seed.dtype)
    seed += tf.stack([replica * _REPLICA_SEED, tf.zeros_like(replica)])
    gradients.note_drawn(seed)
    return seed


@patch(*((tf.random, name) for name in _DRAWING))
def draw(original, *args, **kwargs):
    """Draws a replica's rows from its own stream: all workers have the same seeds, and would draw the same rows.

    Numbers for something else, such as a weight, are one draw, as in one process.
    """
    step = step_module.current()
    if step is None or not step_module.in_replica_of_many():
        return original(*args, **kwargs)
    seeds: list = []
    with step_module.override_state(noted_seeds=seeds):
        result = original(*args, **kwargs)
    replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
    if replica == 0 or not seeds or not reduction_probe.has_rows(result, step.known_rows):
        return result
    # drawn again with the same seeds, so that later draws have the same seeds on all workers
    with step_module.override_state(given_seeds=[((a + replica * _REPLICA_SEED) % _SEEDS, b) for a, b in seeds]):
        return original(*args, **kwargs)


@patch((tf.nn, "dropout"))
def tensorflow_dropout(original, x, rate, noise_shape=None, *args, **kwargs):
    """Drops other units on each replica, see `draw`; a mask that is the same for all rows is one draw."""
    if noise_shape is not None and tf.get_static_value(noise_shape[0]) == 1:
        return original(x, rate, noise_shape, *args, **kwargs)
    return draw(original, x, rate, noise_shape, *args, **kwargs)


@patch((random_seed, "get_seed"))
def get_seed(original, op_seed):
    """Notes the seeds of a draw, or gives those of a replica, see `draw`."""
    if given := getattr(step_module.state, "given_seeds", None):
        return given.pop(0)
    seeds = original(op_seed)
    noted = getattr(step_module.state, "noted_seeds", None)
    if noted is not None and None not in seeds:
        noted.append(seeds)
    return seeds


@patch((seed_module, "global_seed_generator"))
def global_seed_generator(original):
    """Returns one generator for all replicas.

    Keras keeps one per thread, and traces each replica's function in a new thread. Each trace would draw from another
    generator, with a random seed that no checkpoint contains.
    """
    return keras_objects.shared_of_replicas() or original()


def _from_all_losses(step, *upstream):
    """Returns this replica's gradients from the losses of all replicas, each weighted: see `_sum_over_replicas`."""

    @tf.custom_gradient
    def weighted(*upstream):
        def grad(*second):
            # an already differentiated value may be a sum, without weights
            even = tf.debugging.assert_equal(
                step.global_rows(),
                tf.cast(step.rows * tf.distribute.get_strategy().num_replicas_in_sync, tf.float64),
                "Gradients of gradients through BatchNormalization(synchronized=True) need batches of which all "
                "workers have as many rows. Drop the remainder, or use another normalization.",
            )
            with tf.control_dependencies([even] if even is not None else []):
                return all_sum([tf.identity(g) for g in second])

        summed = all_sum([gradients.weighted(g, step) for g in upstream])
        return [tf.math.divide_no_nan(g, tf.cast(step.rows, g.dtype)) for g in summed], grad

    return weighted(*upstream)


def _sum_over_replicas(step, *parts):
    """Returns sums over the rows of all replicas; `parts` are this replica's sums.

    A replica's loss is the mean over its own rows, and its gradients are weighted later, see `gradients.mean`.
    Gradients from another replica's loss need that replica's weight. A placeholder row counts as none: its values,
    which may be NaN where those of rows are not, reach nothing.

    Raises:
        ConfigError: The call is inside a `tf.cond` or `tf.while_loop` of a step.
    """
    if step.is_in_control_flow():
        raise ConfigError(
            "BatchNormalization(synchronized=True) must be called in the step itself, as all workers exchange its sums",
            "a call inside a tf.cond or tf.while_loop",
            "Take it out, or pass synchronized=False",
        )

    @tf.custom_gradient
    def total(*parts):
        return all_sum([gradients.of_rows(p, step) for p in parts]), functools.partial(_from_all_losses, step)

    return total(*parts)


@patch((backend_nn, "_compute_moments_sync"))
def moments_sync(original, x, axes, keepdims):
    """Computes mean and variance over the rows of all replicas in a step of `fit`, by Keras' formula."""
    step = step_module.current()
    if step is None or not step_module.in_replica_of_many():
        return original(x, axes, keepdims)
    parts = (x, tf.square(x), tf.ones_like(x))
    value, squared, count = _sum_over_replicas(step, *(tf.reduce_sum(p, axis=axes, keepdims=True) for p in parts))
    mean = tf.math.divide_no_nan(value, count)
    variance = tf.maximum(tf.math.divide_no_nan(squared, count) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


@patch((keras.layers.BatchNormalization, "_moments"))
def masked_moments(original, self, inputs, mask):
    """Computes the moments of what is not masked over the rows of all replicas, by Keras' formula.

    Keras synchronizes moments without a mask alone.
    """
    step = step_module.current()
    if mask is None or not self.synchronized or step is None or not step_module.in_replica_of_many():
        return original(self, inputs, mask)
    axes = [i for i in range(len(inputs.shape)) if i != self.axis % len(inputs.shape)]
    shown = tf.broadcast_to(tf.cast(mask, "bool")[..., tf.newaxis], tf.shape(inputs))

    def total(*parts):
        return _sum_over_replicas(step, *(tf.reduce_sum(p, axis=axes, keepdims=True) for p in parts))

    value, count = total(tf.where(shown, inputs, 0), tf.cast(shown, inputs.dtype))
    mean = value / (count + keras.backend.epsilon())
    (squared,) = total(tf.square(tf.where(shown, inputs - mean, 0)))
    return tf.squeeze(mean), tf.squeeze(squared / (count + keras.backend.epsilon()))
