"""Updates users' metrics in a step with several workers: one that is no sum over rows gets all rows."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf.collectives import exchange
from raytf.collectives.communicator import all_sum
from raytf.logs import warn_user
from raytf.parallel import reduction_probe, whole_batch
from raytf.parallel import step as step_module

# Metrics of Keras with an axis, which may be the one of rows.
_OVER_AN_AXIS = (keras.metrics.CosineSimilarity, keras.metrics.PearsonCorrelation, keras.metrics.ConcordanceCorrelation)

# Operations of a sum, or of an entry of a shape, and those that keep one a sum.
_SUMS, _PASSED = ("Sum", "StridedSlice"), ("Cast", "Identity", "Mul", "Neg", "Reshape", "Squeeze")


def may_compare(metric) -> bool:
    """Returns whether a metric may compare rows: it is a user's, wraps a function, or has an axis."""
    of_keras = type(metric).__module__.startswith("keras.")
    return not of_keras or type(metric) is keras.metrics.MeanMetricWrapper or isinstance(metric, _OVER_AN_AXIS)


def update_sum(metric, named: set[str], original, values, *args, **kwargs):
    """Replaces `update_state` of a `keras.metrics.Sum`: warns once of a number, which each worker adds for itself.

    Args:
        metric: The metric.
        named: Names of metrics that were named already; its own is added.
        original: Its own `update_state`.
        values, args, kwargs: The arguments; weights may be of rows, whose sum is right.
    """
    weighted = any(value is not None for value in (*args, *kwargs.values()))
    if step_module.current() is not None and metric.name not in named and not weighted and _is_no_sum(values):
        named.add(metric.name)
        warn_user(
            f"The metric {metric.name!r}, a keras.metrics.Sum, gets a number, which each worker adds for itself. "
            "Unless it is a sum over rows, the result is too large by the number of workers: use keras.metrics.Mean "
            "for a mean, and optimizer.iterations for a count of steps",
        )
    return original(values, *args, **kwargs)


def _is_no_sum(values) -> bool:
    """Returns whether a value of a graph is a number, and not visibly a sum over rows or their count."""
    tensor = tf.convert_to_tensor(values)
    pending = [] if tf.executing_eagerly() or tensor.shape.rank != 0 else [tensor]
    is_number = bool(pending)
    while pending:
        operation = getattr(pending.pop(), "op", None)  # a constant from outside has none
        if operation is not None and operation.type in _SUMS:
            return False
        if operation is not None and operation.type in _PASSED:
            pending += operation.inputs
    return is_number


def update_state(metric, original, *args, **kwargs):
    """Replaces `update_state` of a user's metric: one that is no sum over rows gets the rows of all replicas.

    Then one replica counts, for all.
    """
    step = step_module.current()
    given, rows = (args, kwargs), None if step is None else step.known_rows
    if step is None or not any(reduction_probe.has_rows(leaf, rows) for leaf in tree.flatten(given)):
        return original(*args, **kwargs)

    def added(arguments):
        """Returns what an update adds to the metric's variables, from zeros and from other values."""
        variables = list(metric.variables)
        zeros = [tf.zeros(v.shape, v.dtype) for v in variables]
        return [
            change for before in (zeros, _any_values(variables)) for change in _changes(variables, before, arguments)
        ]

    def _changes(variables, before, arguments):
        with keras.StatelessScope(state_mapping=list(zip(variables, before, strict=True))) as scope:
            original(*arguments[0], **arguments[1])
        return [scope.get_current_value(v) - old for v, old in zip(variables, before, strict=True)]

    outcome = reduction_probe.probe_cached(step, metric, added, given, rows)
    if (reduction_probe.SUM in outcome.ways and not outcome.zeros) or outcome.unknown:
        if outcome.why:
            warn_user(
                f"The metric {metric.name!r} could not be tried with synthetic rows ({outcome.why}), and is treated as "
                "one that sums over rows. Otherwise its value is of each worker's own rows: let its variables be sums "
                "over rows",
            )
        return original(*args, **kwargs)
    return whole_batch.compute_on_global_batch(
        step, lambda arguments: _updated(metric, step, original, *arguments), given, rows
    )


def _any_values(variables: Sequence) -> list[tf.Tensor]:
    """Returns values other than zeros, from which only what adds changes as it does from zeros."""
    random = np.random.default_rng(0)
    return [tf.cast(tf.constant(random.integers(1, 5, v.shape) / 4 + 1), v.dtype) for v in variables]


def _updated(metric, step: step_module.Step, original, args, kwargs):
    """Updates a metric with the rows of all replicas, from its state of all replicas.

    One replica has the new state. The others have zeros, as the state is read as a sum.
    """
    counts, variables = whole_batch.current_context().counts, list(metric.variables)
    if any(step_module.is_shared(v) for v in variables):
        return original(*args, **kwargs)
    adds_up = lambda v: v.aggregation == "sum" and tf.as_dtype(v.dtype) in exchange.SUMMABLE
    added = [v for v in variables if adds_up(v)]
    totals = all_sum([tf.convert_to_tensor(v.value) for v in added]) if added else []
    with keras.StatelessScope(state_mapping=list(zip(added, totals, strict=True))) as scope:
        value = original(*args, **kwargs)
    with step_module.override_state(whole_batch=None):
        for variable in added:
            state = scope.get_current_value(variable)
            variable.assign(tf.where(counts, state, tf.zeros_like(state)))
            step.note_complete(variable)
        for variable in (v for v in variables if not adds_up(v)):
            if (state := scope.get_current_value(variable)) is not None:
                variable.assign(state)
    return value
