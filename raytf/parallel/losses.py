"""Losses under several workers: the mean over workers, weighted with their rows, is the loss of the global batch."""

from __future__ import annotations

import contextlib
import functools
import threading

import keras
import tensorflow as tf
from keras import tree

from raytf.collectives import exchange
from raytf.collectives.communicator import all_sum
from raytf.compat import keras_objects
from raytf.compat.keras import added_to_masks, compile_utils, loss_module
from raytf.compat.patching import patch
from raytf.parallel import step as step_module


@patch((loss_module, "reduce_weighted_values"))
def reduce_weighted_values(
    original, values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
):
    """A worker's loss, such that the mean over workers weighted with their rows is the loss of the global batch."""
    step = step_module.current()
    loss = original(values, sample_weight, mask, reduction, dtype)
    if step is None or reduction in (None, "none") or len(values.shape) == 0:
        return loss
    if reduction == "sum":
        return loss * step.upscale(loss.dtype)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = loss_module.apply_mask(
            None if sample_weight is None else tf.cast(sample_weight, loss.dtype), mask, loss.dtype, reduction
        )
        divisor, added = tf.reduce_sum(tf.cast(weights, tf.float64)), 0.0
    elif mask is not None:
        divisor, added = tf.reduce_sum(tf.cast(mask, tf.float64)), added_to_masks()
    else:
        return loss
    divisor = tf.where(step.rows > 0, divisor, 0.0)
    (total,) = all_sum([divisor])
    own = tf.where(step.rows > 0, divisor + added, 0.0)  # what Keras has divided by here
    return loss * tf.cast(tf.math.divide_no_nan(own, total + added), loss.dtype) * step.upscale(loss.dtype)


def _gathered(tensor, rows, offset, total):
    """The rows of all replicas in order, with this replica's own rows in the place of its copy of them.

    Gradients flow into the own rows alone; the sum over replicas then is the gradient of the whole.
    """
    placed = tf.pad(tensor[:rows], [[offset, total - offset - rows]] + [[0, 0]] * (tensor.shape.rank - 1))
    if tensor.dtype not in exchange.SUMMABLE:
        (summed,) = all_sum([tf.cast(placed, tf.int32)])
        return tf.cast(summed, tensor.dtype)
    (summed,) = all_sum([tf.stop_gradient(placed)])
    return tf.stop_gradient(summed - placed) + placed


def _of_all_replicas(step: step_module.Step, tensors) -> list:
    """Each tensor `_gathered`; they need not have as many rows as the batch, nor as each other."""
    context = tf.distribute.get_replica_context()
    index = context.replica_id_in_sync_group
    own = tf.stack([tf.where(step.rows > 0, tf.shape(t)[0], 0) for t in tensors])
    (counts,) = all_sum([tf.one_hot(index, context.num_replicas_in_sync, dtype=tf.int32)[:, None] * own])
    offsets, totals = tf.reduce_sum(counts[:index], 0), tf.reduce_sum(counts, 0)
    return [_gathered(t, own[i], offsets[i], totals[i]) for i, t in enumerate(tensors)]


def _whole_batch_loss(step: step_module.Step, function, y_true, y_pred, sample_weight):
    """A loss that reduces its batch by itself, computed on the global batch."""
    given = (y_true, y_pred) if sample_weight is None else (y_true, y_pred, sample_weight)
    gathered = iter(_of_all_replicas(step, [tf.convert_to_tensor(t) for t in tree.flatten(given) if t is not None]))
    value = function(*tree.map_structure(lambda t: None if t is None else next(gathered), given))
    # The value stands for every replica; its gradient is this replica's own part, which must not be weighted again.
    return tf.stop_gradient(value) + (value - tf.stop_gradient(value)) * step.upscale(value.dtype)


def _has_rows(y_pred) -> bool:
    return all(len(t.shape) > 0 for t in tree.flatten(y_pred) if t is not None)


@patch((loss_module.Loss, "__call__"))
def loss_call(original, self, y_true, y_pred, sample_weight=None):
    """`Loss.__call__`; where `call` returns a scalar of its own, it is given the global batch."""
    step = step_module.current()
    if step is None or getattr(step_module.state, "whole_batch", False) or not _has_rows(y_pred):
        return original(self, y_true, y_pred, sample_weight)
    with _watched(self), step_module.within(scalar=None):
        value = original(self, y_true, y_pred, sample_weight)
        scalar = step_module.state.scalar
    if not scalar:
        return value
    with step_module.within(whole_batch=True, step=None):
        return _whole_batch_loss(step, functools.partial(original, self), y_true, y_pred, sample_weight)


_watchers: dict[int, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def _watched(loss):
    """Notes for this thread's replica whether `loss.call` gave a scalar; replicas of one process take turns in it."""
    with _lock:
        _watchers[id(loss)] = _watchers.get(id(loss), 0) + 1
        if _watchers[id(loss)] == 1:
            call = loss.call

            def noted(*args, **kwargs):
                values = call(*args, **kwargs)
                step_module.state.scalar = len(values.shape) == 0
                return values

            loss.__dict__["call"] = noted
    try:
        yield
    finally:
        with _lock:
            _watchers[id(loss)] -= 1
            if not _watchers[id(loss)]:
                del _watchers[id(loss)], loss.__dict__["call"]


class _UserLoss:
    """A loss that is no plain `Loss`: a class with its own `__call__`, or any callable."""

    def __init__(self, loss):
        self.loss = loss

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        step = step_module.current()
        value = self.loss(y_true, y_pred, sample_weight)
        if step is None or len(value.shape) > 0 or not _has_rows(y_pred):
            return value
        with step_module.within(whole_batch=True, step=None):
            return _whole_batch_loss(step, self.loss, y_true, y_pred, sample_weight)


@patch((compile_utils.CompileLoss, "build"))
def compile_loss_build(original, self, y_true, y_pred):
    """Losses that are no plain `Loss` are wrapped, so that they, too, are given the global batch."""
    original(self, y_true, y_pred)
    losses = keras_objects.flat_losses(self)
    for i, entry in enumerate(losses):
        own = type(entry.loss).__call__ is not loss_module.Loss.__call__
        if own and not isinstance(entry.loss, _UserLoss):
            losses[i] = entry._replace(loss=_UserLoss(entry.loss))


@patch((loss_module, "scale_loss_for_distribution"), (loss_module, "unscale_loss_for_distribution"))
def scale_for_distribution(original, value):
    """In a step a loss is not divided by the number of replicas: gradients are weighted with rows instead."""
    return (
        value
        if step_module.current() is not None or getattr(step_module.state, "whole_batch", False)
        else original(value)
    )


@patch((keras.metrics.Mean, "update_state"))
def mean_update_state(original, self, values, sample_weight=None):
    """`Mean.update_state`; a scalar that stands for a batch counts by the rows it stands for, and a step for one.

    As in one process, so that an epoch goes on with another number of workers where one was stopped.
    """
    step = step_module.current()
    if step is not None and sample_weight is None and len(getattr(values, "shape", (1,))) == 0:
        if step.partial:
            share = 1 / step.upscale(self.dtype)
            sample_weight = tf.where(step.rows > 0, share, tf.zeros_like(share))
        else:
            sample_weight = tf.constant(1 / tf.distribute.get_replica_context().num_replicas_in_sync, self.dtype)
    return original(self, values, sample_weight)
