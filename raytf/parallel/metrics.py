"""Metrics and moving statistics under several workers: local during an epoch, global at its end."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.collectives import communicator
from raytf.collectives.communicator import all_sum, local_replicas, many_replicas, wide
from raytf.compat import keras_objects
from raytf.compat.keras import backend_core, backend_trainer
from raytf.compat.patching import patch
from raytf.parallel import local_sgd
from raytf.parallel import step as step_module


def _averaged_variables(model) -> list:
    """Floating-point state that workers update from their own rows, such as moving statistics."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in step_module.step_variables(model) if id(v) not in metrics]


def synchronize(model):
    """Averages moving statistics over workers and returns [(metric variable, global value)]: one collective a dtype."""
    strategy = model.distribute_strategy
    metrics = [v for v in model.metrics_variables if tf.as_dtype(v.dtype) in communicator.SUMMABLE]
    averaged = [*_averaged_variables(model), *local_sgd.averaged_at_ends(model)]
    key = [id(v) for v in (*metrics, *averaged)]
    known, function = model.__dict__.get("_raytf_synchronize", (None, None))
    if known != key:
        function = _synchronize_function(strategy, metrics, averaged)
        model.__dict__["_raytf_synchronize"] = (key, function)
    return list(zip(metrics, function(), strict=True))


@patch((backend_core.Variable, "_direct_assign"))
def direct_assign(original, self, value):
    """`Variable._direct_assign`; under CentralStorageStrategy, where replicas share variables, each changes its part.

    Keras' metrics write what they read and something more, and TensorFlow adds what all replicas write, so that what
    was there before counted once for each of them. What is no sum becomes the mean. A replica without rows changes
    nothing.
    """
    if tf.distribute.in_cross_replica_context() or not step_module.is_shared(self):
        original(self, value)
        return
    held = keras_objects.held_by(self)
    before = tf.convert_to_tensor(held)
    value = tf.cast(value, before.dtype)
    step = step_module.current()
    if step is not None and id(self) in step.shared:
        value = tf.where(step.rows > 0, value, before)
    if self.aggregation == "sum":
        held.assign_add(value - before)
    elif self.aggregation == "none":
        tf.distribute.get_replica_context().merge_call(functools.partial(_assign_mean, held), args=(value,))
    else:
        original(self, value)


def _assign_mean(variable, strategy, value):
    local = strategy.experimental_local_results(value)
    return variable.get().assign(tf.reduce_mean(tf.stack(local), 0) if local[0].dtype.is_floating else local[0])


def _synchronize_function(strategy, metrics, averaged):
    replicas = strategy.num_replicas_in_sync

    def replica():
        context = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group, 0)
        local = []
        for variable in (*metrics, *averaged):
            value = tf.convert_to_tensor(variable.value)
            once = step_module.is_shared(variable) or variable.aggregation in ("only_first_replica", "none")
            if once and len(local) < len(metrics):
                value = tf.where(first, value, tf.zeros_like(value))
            local.append(value if len(local) < len(metrics) else wide(value))
        summed = all_sum(local) if local else []
        for variable, value in zip(averaged, summed[len(metrics) :], strict=True):
            with step_module.within(inline_merge=local_replicas(strategy) == 1):
                variable.assign(tf.cast(value / tf.cast(replicas, value.dtype), variable.dtype))
        totals = summed[: len(metrics)]
        return [
            t / tf.cast(replicas, t.dtype) if v.aggregation == "mean" and not step_module.is_shared(v) else t
            for v, t in zip(metrics, totals, strict=True)
        ]

    @tf.function
    def synchronize():
        return [strategy.experimental_local_results(v)[0] for v in strategy.run(replica)]

    return synchronize


def global_logs(model, logs, rows):
    """The logs that one process would have: from global metrics, or the mean over rows of what a step returned."""
    totals = synchronize(model)
    logs = logs if isinstance(logs, dict) else {}
    with keras.StatelessScope(state_mapping=[(v, tf.convert_to_tensor(t)) for v, t in totals]):
        metrics = dict(model.get_metrics_result())
        if set(logs) == set(metrics):
            return metrics
        named = {m.name: m.result() for m in model.metrics if m.name in logs}
    others = {name: value for name, value in logs.items() if name not in named}
    values = [np.asarray(v, np.float64) * float(rows) for v in tree.flatten(others)]
    *sums, total = communicator.sum_over_workers(model.distribute_strategy, [*values, np.float64(rows)])
    return named | tree.pack_sequence_as(others, [v / total for v in sums])


@patch((backend_trainer.TensorFlowTrainer, "_get_metrics_result_or_logs"))
def get_metrics_result_or_logs(original, self, logs):
    """Logs of an epoch are those of all workers' rows."""
    if not many_replicas(self.distribute_strategy):
        return original(self, logs)
    local, rows = self.__dict__.get("_raytf_last", (logs, 1))
    return global_logs(self, local, rows)
