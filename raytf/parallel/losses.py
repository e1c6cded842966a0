"""Losses with several workers: the mean over workers, weighted by their rows, is the loss of the global batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from raytf.collectives.communicator import all_sum
from raytf.compat import keras_objects
from raytf.compat.keras import added_to_masks, compile_utils, loss_module
from raytf.compat.patching import patch
from raytf.logs import warn_user
from raytf.parallel import compiled_call, reduction_probe, step_logs, whole_batch
from raytf.parallel import step as step_module

# Functions of Keras' losses that compare rows, at least with some arguments.
_COMPARING = ("circle", "dice", "tversky")


@patch((loss_module, "reduce_weighted_values"))
def reduce_weighted_values(
    original, values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
):
    """Scales a worker's loss so that the mean over workers, weighted by rows, is the loss of the global batch."""
    step = step_module.current()
    loss = original(values, sample_weight, mask, reduction, dtype)
    if step is not None and len(values.shape) == 0:
        step_module.state.scalar = True
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
    local_divisor = tf.where(step.rows > 0, divisor + added, 0.0)  # divisor that Keras used in this process
    return loss * tf.cast(tf.math.divide_no_nan(local_divisor, total + added), loss.dtype) * step.upscale(loss.dtype)


def _has_rows(y_pred) -> bool:
    return all(len(t.shape) > 0 for t in tree.flatten(y_pred) if t is not None)


@patch((loss_module.Loss, "__call__"))
def loss_call(original, self, y_true, y_pred, sample_weight=None):
    """Replaces `Loss.__call__`: if `call` compares rows, or returns its own scalar, it gets the global batch."""
    step = step_module.current()
    if step is None or not _has_rows(y_pred):
        return original(self, y_true, y_pred, sample_weight)
    given = y_true, y_pred, sample_weight
    call = lambda args: original(self, *args)
    outcome = _tried(step, self, y_true, y_pred)
    if outcome.unknown or outcome.rows:
        with step_module.override_state(scalar=False):
            value = original(self, *given)
            scalar = step_module.state.scalar
        if not scalar:
            _warn_if_unknown(outcome, f"The loss {self.name!r}")
            return value
    return whole_batch.compute_on_global_batch(step, call, given)


def _tried(step: step_module.Step, loss, y_true, y_pred) -> reduction_probe.ProbeResult:
    """Returns whether a loss has a value for each row that needs no other row."""
    function = getattr(loss, "fn", None)
    keras_own = lambda value: (getattr(value, "__module__", None) or "").startswith("keras.")
    known = keras_own(type(loss)) and (function is None or keras_own(function))
    if known and getattr(function, "__name__", "") not in _COMPARING and not _is_over_rows(loss, y_pred):
        return reduction_probe.ProbeResult(rows=True)
    as_tensor = lambda t: None if t is None else keras.ops.convert_to_tensor(t, dtype=loss.dtype)

    def call(given):
        return loss.call(*tree.map_structure(as_tensor, given))

    masked = reduction_probe.MaskedLabels(y_true, [loss, loss.call, function])
    return reduction_probe.probe_cached(step, loss, call, (y_true, y_pred), masked=masked)


def _is_over_rows(loss, y_pred) -> bool:
    """Returns whether a loss of Keras is along the axis of rows, as by axis=0."""
    axes = tree.flatten(keras_objects.loss_arguments(loss).get("axis")) if hasattr(loss, "fn") else []
    ranks = [len(t.shape) for t in tree.flatten(y_pred) if t is not None]
    # -1 is the default, also for rows of single numbers, whose scalar loss is seen as such
    return any(axis != -1 and axis in (0, -rank) for axis in axes for rank in ranks)


def _warn_if_unknown(outcome: reduction_probe.ProbeResult, subject: str) -> None:
    if outcome.why:
        warn_user(
            f"{subject} could not be tried with synthetic rows ({outcome.why}), so that it is not known whether it "
            "compares rows. Each worker computes it from its own rows. Let it end with a mean (keras.ops.mean), and it "
            "is computed on the rows of all workers",
        )


class _UserLoss:
    """A loss that is no plain `Loss`: a class with its own `__call__`, or any callable."""

    def __init__(self, loss):
        self.loss = loss

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        step = step_module.current()
        given = y_true, y_pred, sample_weight
        if step is None or not _has_rows(y_pred):
            return self.loss(*given)
        function = lambda args: self.loss(*args)
        masked = reduction_probe.MaskedLabels(y_true, [self.loss, type(self.loss).__call__])
        result = reduction_probe.probe_cached(step, self.loss, function, given, masked=masked)
        if not result.unknown and not result.rows:
            return whole_batch.compute_on_global_batch(step, function, given)
        value = self.loss(*given)
        if len(value.shape) == 0:
            return whole_batch.compute_on_global_batch(step, function, given)
        _warn_if_unknown(result, f"The loss {getattr(self.loss, 'name', None) or type(self.loss).__name__!r}")
        return value


@patch((compile_utils.CompileLoss, "build"))
def compile_loss_build(original, self, y_true, y_pred):
    """Wraps losses that are no plain `Loss`, so that they get the global batch, too."""
    original(self, y_true, y_pred)
    losses = keras_objects.flat_losses(self)
    for i, entry in enumerate(losses):
        has_own_call = type(entry.loss).__call__ is not loss_module.Loss.__call__
        if has_own_call and not isinstance(entry.loss, _UserLoss):
            losses[i] = entry._replace(loss=_UserLoss(entry.loss))


@patch((loss_module, "scale_loss_for_distribution"), (loss_module, "unscale_loss_for_distribution"))
def scale_for_distribution(original, value):
    """Leaves a loss undivided by the number of replicas in a step: gradients are weighted by rows instead."""
    return value if _is_in_step() else original(value)


def _is_in_step() -> bool:
    return step_module.current() is not None or whole_batch.current_context() is not None or step_module.is_trial()


@patch((tf.nn, "compute_average_loss"))
def compute_average_loss(original, per_example_loss, sample_weight=None, global_batch_size=None):
    """Replaces `tf.nn.compute_average_loss`, whose gradients replicas would sum: a step takes their mean over rows."""
    loss = original(per_example_loss, sample_weight, global_batch_size)
    if not _is_in_step():
        return loss
    if global_batch_size is None:
        return loss * tf.distribute.get_strategy().num_replicas_in_sync
    has_all_rows = step_module.is_trial() or whole_batch.current_context() is not None
    return loss if has_all_rows else loss * step_module.current().upscale(loss.dtype)


@patch((tf.nn, "scale_regularization_loss"))
def scale_regularization_loss(original, regularization_loss):
    """Replaces `tf.nn.scale_regularization_loss`: in a step it divides by nothing, as gradients are not summed."""
    loss = original(regularization_loss)
    return loss * tf.distribute.get_strategy().num_replicas_in_sync if _is_in_step() else loss


# ---------------------------------------------------------------------------------------------- compute_loss


def compute_loss(model, original: Callable, *args, **kwargs) -> Any:
    """Calls the user's `compute_loss`; if it is no mean over rows, it is computed on the rows of all replicas."""
    step = step_module.current()
    if step is None:
        return original(*args, **kwargs)
    call = lambda arguments: original(*arguments[0], **arguments[1])
    given, rows = (args, kwargs), step.known_rows
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    labels = [arguments.get("y"), *reduction_probe.whole_numbers(arguments.get("x"))]  # tokens mark what is masked
    result = reduction_probe.probe_cached(
        step, model, call, given, rows, masked=reduction_probe.MaskedLabels(labels, [original, model])
    )
    is_mean = reduction_probe.MEAN in result.ways and not result.zeros
    if not is_mean and not result.rows and not result.unknown:
        return whole_batch.compute_on_global_batch(step, call, _needed(original, call, given, rows), rows)
    if result.why:
        warn_user(
            f"{type(model).__name__}.compute_loss could not be tried with synthetic rows ({result.why}), and is "
            "treated as a mean over rows. If it is something else, compute it from the arguments of compute_loss "
            "alone, and it is computed on the rows of all workers",
        )
    return original(*args, **kwargs)


def _needed(original: Callable, call: Callable, given: tuple, rows: int | None) -> tuple:
    """Returns the arguments without unused inputs, so that those are not gathered."""
    bound = inspect.signature(original).bind(*given[0], **given[1])
    if bound.arguments.get("x") is None:
        return given
    bound.arguments["x"] = None
    needed = bound.args, bound.kwargs
    return given if reduction_probe.probe(call, needed, rows).unknown else needed


# -------------------------------------------------------------------------------------------------- add_loss


@patch((keras.layers.Layer, "__call__"))
def layer_call(original, self, *args, **kwargs):
    """Replaces `Layer.__call__`: keeps the arguments for `add_loss` during the call."""
    if step_module.current() is None:
        return original(self, *args, **kwargs)
    calls = getattr(step_module.state, "calls", None) or []
    with step_module.override_state(calls=[*calls, _LayerCall(self, original, args, kwargs)]):
        return original(self, *args, **kwargs)


class _LayerCall:
    """A call of a layer, and the number of losses that it has added."""

    def __init__(self, layer, original: Callable, args, kwargs):
        self.layer, self._original, self.given, self.added = layer, original, (args, kwargs), 0

    def losses(self, given, training: bool | None = None) -> list:
        """Returns the losses that the layer adds for other arguments."""
        args, kwargs = given
        if training is not None and keras_objects.takes_training(self.layer):
            kwargs = kwargs | {"training": training}
        losses: list = []
        with step_module.override_state(adding=(self.layer, losses)):
            self._original(self.layer, *args, **kwargs)
        return losses


@patch((keras.layers.Layer, "add_loss"))
def add_loss(original, self, loss):
    """Replaces `Layer.add_loss`: scales a sum over rows, so that the mean over workers is the sum over all rows.

    Each replica has its own list: Keras keeps one for all, which replicas that take turns would clear.
    """
    if compiled_call.is_within():
        compiled_call.refuse(self, "add_loss, or an activity_regularizer")
    if step_module.is_trial():
        layer, trial_losses = getattr(step_module.state, "adding", None) or (None, None)
        if layer is self:
            trial_losses += [keras.ops.sum(item) for item in tree.flatten(loss)]
        return
    original(self, loss)
    step, shown = step_module.current(), step_logs.seen()
    if step is None or shown is None:
        return
    call = next(
        (item for item in reversed(getattr(step_module.state, "calls", None) or []) if item.layer is self), None
    )
    for item in tree.flatten(loss):
        added = item if call is None else _added(step, call, item)
        shown.added.setdefault(id(self), []).append(added)


@patch((keras.layers.Layer, "_clear_losses"))
def clear_losses(original, self):
    """Replaces `Layer._clear_losses`, which begins each call of a model; a trial clears nothing."""
    if step_module.is_trial():
        return
    original(self)
    if step_logs.seen() is not None:
        step_logs.seen().added.pop(id(self), None)


@patch((keras.layers.Layer, "_get_own_losses"))
def own_losses(original, self):
    """Replaces `Layer._get_own_losses`: returns this replica's losses, or means over all rows in functions of those."""
    shown, whole = step_logs.seen(), whole_batch.current_context()
    if shown is None or (whole is None and step_module.current() is None and not step_module.is_trial()):
        return original(self)
    added = shown.added.get(id(self), [])
    if step_module.is_trial():
        return [tf.zeros((), part.dtype) for part in added]
    return list(added) if whole is None else [whole_batch.mean_over_replicas(whole.step, part) for part in added]


def _added(step: step_module.Step, call: _LayerCall, loss: tf.Tensor) -> tf.Tensor:
    index = call.added
    call.added += 1

    def added_loss(given):
        # without noise and batch statistics, unless it is added in training only
        inference_losses = call.losses(given, training=False)
        return inference_losses[index] if index < len(inference_losses) else call.losses(given, training=True)[index]

    masked = reduction_probe.MaskedLabels(
        reduction_probe.whole_numbers(call.given), [type(call.layer).call, call.layer]
    )
    result = reduction_probe.probe_cached(
        step, call.layer, added_loss, call.given, step.known_rows, index=index, masked=masked
    )
    if result.ways & {reduction_probe.IDENTICAL, reduction_probe.MEAN} or (result.unknown and not result.why):
        return loss
    if reduction_probe.SUM in result.ways:
        return keras.ops.sum(loss) * step.upscale(loss.dtype)
    fault = f"could not be tried with synthetic rows ({result.why})" if result.why else "is neither a mean nor a sum"
    warn_user(
        f"A loss that the layer {call.layer.name!r} adds {fault}: each worker computes it from its own rows, and their "
        "mean is taken. Add a mean or a sum over rows, or compute it in compute_loss, from y_pred",
    )
    return loss


@patch((keras.metrics.Mean, "update_state"))
def mean_update_state(original, self, values, sample_weight=None):
    """Replaces `Mean.update_state`: a scalar for a batch counts by its rows, and all scalars of a step count as one.

    This equals one process, so an epoch can resume with another number of workers.
    """
    step = step_module.current()
    if step is not None and sample_weight is None and len(getattr(values, "shape", (1,))) == 0:
        if step.partial:
            share = 1 / step.upscale(self.dtype)
            sample_weight = tf.where(step.rows > 0, share, tf.zeros_like(share))
        else:
            sample_weight = tf.constant(1 / tf.distribute.get_replica_context().num_replicas_in_sync, self.dtype)
    return original(self, values, sample_weight)
