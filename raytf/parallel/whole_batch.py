"""Computes functions on the rows of all replicas, in each replica.

Each replica has the same value. Its gradient reaches the replica's own rows, as in one process. It also reaches all
else that the function depends on, such as its own weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from raytf.collectives import exchange
from raytf.collectives.communicator import all_sum, spans_workers
from raytf.compat.keras import get_keras_mask, logits_of, set_keras_mask, set_logits
from raytf.parallel import reduction_probe
from raytf.parallel import step as step_module


@dataclasses.dataclass(frozen=True)
class GlobalBatchContext:
    """The context of a function that gets the rows of all replicas.

    Args:
        step: Step of this replica.
        counts: bool scalar, whether this replica's metrics count: it is the first that has rows.
    """

    step: step_module.Step
    counts: tf.Tensor


def current_context() -> GlobalBatchContext | None:
    """Returns the context of the running function of all rows, or None."""
    return getattr(step_module.state, "whole_batch", None)


def compute_on_global_batch(
    step: step_module.Step, function: Callable, given: Any, rows: int | None = reduction_probe.ANY_ROWS
) -> Any:
    """Returns function(given) for the rows of all replicas.

    In a step the gradient of a value is weighted by this replica's share of the rows. So the part of the gradient for
    the rows is scaled up first. Other dependencies get in total the gradient that one process would have.

    Args:
        given: Nest of tensors and other values; tensors with rows are gathered.
        rows: Number of rows, see `reduction_probe.has_rows`.

    Returns:
        Scalars unchanged. Of values for each row, this replica's own. A sum of these has the gradient of the sum over
        all rows.
    """
    leaves = tree.flatten(given)
    indices = [i for i, leaf in enumerate(leaves) if reduction_probe.has_rows(leaf, rows)]
    if step.notes is not None:
        step.notes.gathers = True
    gathered, extent, counts = _of_all_replicas(step, [tf.convert_to_tensor(leaves[i]) for i in indices])
    for i, whole in zip(indices, gathered, strict=True):
        leaves[i] = whole
    with step_module.override_state(whole_batch=GlobalBatchContext(step, counts), step=None):
        value = function(tree.pack_sequence_as(given, leaves))
    value = tree.map_structure(lambda v: _own_part(step, v, extent) if _is_by_row(v) else v, value)
    for part in tree.flatten(value):
        step.note_whole(part)
    return value


def _is_by_row(value: Any) -> bool:
    return tf.is_tensor(value) and value.shape.rank != 0 and value.dtype.is_floating


def _own_part(step: step_module.Step, values: tf.Tensor, extent: tuple) -> tf.Tensor:
    """Returns this replica's part of values for each row, or for some rows, see `compute_on_global_batch`."""
    offset, total = extent
    complete = tf.equal(tf.shape(values)[0], total)  # otherwise the values are for some rows, whose replica is unknown
    begin, count = tf.where(complete, offset, 0), tf.where(complete, step.rows, tf.shape(values)[0])
    local_rows = values[begin : begin + count]
    shares = tf.reduce_sum(values) * tf.cast(
        tf.math.divide_no_nan(
            tf.cast(step.rows, tf.float64), step.global_rows() * tf.cast(tf.size(local_rows), tf.float64)
        ),
        values.dtype,
    )
    return tf.stop_gradient(local_rows) + (shares - tf.stop_gradient(shares))


def _of_all_replicas(step: step_module.Step, tensors: list) -> tuple[list, tuple, tf.Tensor]:
    """Returns (tensors of all replicas, (begin of own rows, number of all rows) of the first one, `counts`).

    The tensors may have other numbers of rows than the batch, and than each other.
    """
    context = tf.distribute.get_replica_context()
    index = context.replica_id_in_sync_group
    local_counts = tf.stack([tf.where(step.rows > 0, tf.shape(t)[0], 0) for t in tensors])
    (counts,) = all_sum([tf.one_hot(index, context.num_replicas_in_sync, dtype=tf.int32)[:, None] * local_counts])
    offsets, totals = tf.reduce_sum(counts[:index], 0), tf.reduce_sum(counts, 0)
    first = tf.equal(tf.cast(index, tf.int64), tf.argmax(tf.cast(counts[:, 0] > 0, tf.int32)))
    scale = step.upscale(tf.float64)
    results = []
    for i, tensor in enumerate(tensors):
        whole = _gathered(tensor, local_counts[i], offsets[i], totals[i], scale)
        for read, write in ((get_keras_mask, set_keras_mask), (logits_of, set_logits)):
            noted = read(tensor)
            if noted is not None:
                write(whole, _gathered(noted, local_counts[i], offsets[i], totals[i], scale))
        results.append(whole)
    return results, (offsets[0], totals[0]), first


def _gathered(tensor: tf.Tensor, rows, offset, total, scale) -> tf.Tensor:
    """Returns the rows of all replicas in order; gradients reach only the own rows, scaled."""
    if not tensor.dtype.is_floating:
        return _with_rows(_joined(tensor, rows, offset, total), tensor)

    @tf.custom_gradient
    def joined(local_value):
        def grad(upstream):
            upstream = tf.convert_to_tensor(upstream)  # IndexedSlices, if rows were selected
            own_gradient = upstream[offset : offset + rows] * tf.cast(scale, upstream.dtype)
            return tf.pad(
                own_gradient, [[0, tf.shape(local_value)[0] - rows]] + [[0, 0]] * (local_value.shape.rank - 1)
            )

        return _joined(local_value, rows, offset, total), grad

    return _with_rows(joined(tensor), tensor)


def _joined(local_value: tf.Tensor, rows, offset, total) -> tf.Tensor:
    """Returns the rows of all replicas in order."""
    local_value = tf.identity(local_value)  # `row_sums` looks for slices of the batch itself
    if not spans_workers(tf.distribute.get_strategy()):
        return tf.distribute.get_replica_context().merge_call(_concatenated, args=(local_value, rows))
    placed = tf.pad(local_value[:rows], [[offset, total - offset - rows]] + [[0, 0]] * (local_value.shape.rank - 1))
    if placed.dtype in exchange.SUMMABLE:
        return all_sum([placed])[0]
    return tf.cast(all_sum([tf.cast(placed, tf.int32)])[0], placed.dtype)


def _concatenated(strategy, value, rows) -> tf.Tensor:
    """Returns the same in one process: TensorFlow's collectives cannot change shapes within an execution of steps."""
    local = strategy.experimental_local_results
    return tf.concat([part[:count] for part, count in zip(local(value), local(rows), strict=True)], 0)


def _with_rows(whole: tf.Tensor, local_value: tf.Tensor) -> tf.Tensor:
    if not tf.executing_eagerly():
        whole.set_shape([None, *local_value.shape[1:]])
    return whole


def mean_over_replicas(step: step_module.Step, value: tf.Tensor) -> tf.Tensor:
    """Returns the mean over all rows, from a mean over each replica's rows; with the gradient of the own value."""

    @tf.custom_gradient
    def joined(local_mean):
        wide = tf.cast(local_mean, tf.float64) * tf.cast(step.rows, tf.float64)
        (total,) = all_sum([tf.where(step.rows > 0, wide, tf.zeros_like(wide))])
        return tf.cast(total / step.global_rows(), local_mean.dtype), tf.identity

    return joined(value)
