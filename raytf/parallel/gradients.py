"""Gradients of the global batch: in a step of `fit` they are summed where a tape gives them.

What the user does with them then, as clipping, is done to what one process would have. The mean over the rows of all
workers is linear, and the mean of what is alike on all workers is the same again. So an optimizer may take the mean
of whatever it is given: a function of gradients that were summed, of others, or of both; it leaves out what is known
to be alike.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import keras
import tensorflow as tf

from raytf.collectives import gradient_ring
from raytf.collectives.communicator import all_sum, local_replicas, wide
from raytf.compat import keras_objects
from raytf.compat.patching import patch
from raytf.compat.tensorflow import may_record
from raytf.parallel import local_sgd, own_loops
from raytf.parallel import step as step_module

# Operations between a gradient's sum and the optimizer that are looked at; beyond them it is summed once more.
_MOST_OPERATIONS = 100_000
_READS = ("ReadVariableOp", "ResourceGather")
_CALLS = ("If", "While", "Case", "StatefulPartitionedCall")


@patch((tf.GradientTape, "gradient"))
def gradient(original, self, target, sources, output_gradients=None, unconnected_gradients="none"):
    """`GradientTape.gradient`; of weights, in a step, those of the global batch."""
    step = _summing_step()
    if step is None:
        found = original(self, target, sources, output_gradients, unconnected_gradients)
        own_loops.note_taped(_of_variables(sources, found))
        return found
    flat = tf.nest.flatten(sources)
    places = [i for i, source in enumerate(flat) if _is_alike(step, source)]
    if output_gradients is None and len(places) == len(flat):
        output_gradients = _upstream(step, target)
    with step_module.within(differentiates=True):  # TensorFlow's own backward functions have tapes within them
        found = original(self, target, sources, output_gradients, unconnected_gradients)
    return _with_sums(step, found, places)


@patch((tf.GradientTape, "jacobian"))
def jacobian(original, self, target, sources, *args, **kwargs):
    """`GradientTape.jacobian`; likewise, where a row of it is that of a value, and not that of a row of the batch."""
    step = _summing_step()
    if step is None:
        return original(self, target, sources, *args, **kwargs)
    with step_module.within(differentiates=True):
        found = original(self, target, sources, *args, **kwargs)
    if any(_is_of_rows(step, one) for one in tf.nest.flatten(target)):
        return found
    return _with_sums(step, found, [i for i, s in enumerate(tf.nest.flatten(sources)) if _is_alike(step, s)])


def _of_variables(sources, found) -> list:
    pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True)
    return [gradient for source, gradient in pairs if isinstance(source, (keras.Variable, tf.Variable))]


def _summing_step() -> step_module.Step | None:
    """The step whose tapes sum; None where gradients are a worker's own."""
    step = step_module.current()
    if step is None or getattr(step_module.state, "differentiates", False) or not step_module.in_replica_of_many():
        return None
    strategy = tf.distribute.get_strategy()
    if local_sgd.every(strategy) > 1:
        return None
    if step.is_nested() and local_replicas(strategy) > 1:  # what joins several devices of a process cannot stand there
        warnings.warn(
            "A tape in a tf.function, tf.cond or tf.while_loop of a step gives each device's own gradients where one "
            "process has several devices; an optimizer sums them, and what is done to them before, such as clipping, "
            "is done to each device's own. Take the tape out, or start one worker for each device",
            stacklevel=2,
        )
        return None
    return step


def _with_sums(step: step_module.Step, found, places: Sequence[int]):
    """A nest of gradients, of which those at some places are summed; what has no floats is left to the optimizer."""
    flat = tf.nest.flatten(found)
    places = [i for i in places if flat[i] is not None and flat[i].dtype.is_floating]
    if not places:
        return found
    summed = _recorded_mean(step, [flat[i] for i in places])
    for i, value in zip(places, summed, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(found, flat)


def _recorded_mean(step: step_module.Step, gradients: Sequence) -> list:
    """Means over the rows of all, through which a tape can differentiate that may record here, or around here."""
    summed = _differentiable_mean(gradients) if may_record() or step.is_nested() else mean(gradients)
    for value in summed:
        step.note_alike(_content(value))
    return summed


def _differentiable_mean(gradients: Sequence) -> list:
    """`mean` with a gradient: with the weights that losses have, the mean over workers is its own adjoint.

    Of slices each worker has the values of all, one worker's after the other's, and those of its own flow back.
    """
    slices = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    own = _own_slices([gradients[i].values for i in slices])

    @tf.custom_gradient
    def means(*contents):
        given = [
            tf.IndexedSlices(c, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else c
            for c, g in zip(contents, gradients, strict=True)
        ]
        found = mean(given)

        def back(*upstream):
            flowing = _differentiable_mean(upstream[: len(found)])
            for i, (start, count) in zip(slices, own, strict=True):
                flowing[i] = flowing[i][start : start + count]
            return flowing

        return [*map(_content, found), *(found[i].indices for i in slices)], back

    contents = means(*map(_content, gradients))
    found = list(contents[: len(gradients)])
    for i, indices in zip(slices, contents[len(gradients) :], strict=True):
        found[i] = tf.IndexedSlices(found[i], indices, gradients[i].dense_shape)
    return found


def _own_slices(values: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Where this worker's slices begin among those of all, and how many they are."""
    if not values:
        return []
    context = tf.distribute.get_replica_context()
    index, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    own = tf.stack([tf.shape(value)[0] for value in values])
    (counts,) = all_sum([tf.one_hot(index, replicas, dtype=tf.int32)[:, None] * own])
    before = tf.reduce_sum(counts[:index], 0)
    return [(before[i], own[i]) for i in range(len(values))]


def _upstream(step: step_module.Step, target):
    """Upstream gradients for a loss that is not reduced: it is a sum over rows, and the mean over rows that of sums.

    None where no value of the loss may stand for rows. All workers decide that alike.
    """
    flat = tf.nest.flatten(target)
    if not all(isinstance(one, tf.Tensor) and one.dtype.is_floating for one in flat):
        return None
    if all(one.shape.rank in (None, 0) for one in flat):
        return None
    scale = step.upscale(tf.float64)
    found = [tf.ones_like(one) * (tf.cast(scale, one.dtype) if _is_of_rows(step, one) else 1) for one in flat]
    return tf.nest.pack_sequence_as(target, found)


def _is_of_rows(step: step_module.Step, value) -> bool:
    """Whether a value of the loss has as many numbers as there are rows, as far as its shape says."""
    if not value.shape.rank:
        return False
    rows = tf.get_static_value(step.rows)
    return value.shape[0] is None or (rows is not None and value.shape[0] == max(int(rows), 1))


# ------------------------------------------------------------------------------------------ what is alike


def _is_alike(step: step_module.Step, source) -> bool:
    """Whether what is differentiated by is the same on all workers: a weight, or a function of weights alone."""
    if isinstance(source, (keras.Variable, tf.Variable)):
        known = getattr(source, "synchronization", None) not in ("on_read", tf.VariableSynchronization.ON_READ)
        if known:
            _note_weight(step, source)
        return known
    return isinstance(source, tf.Tensor) and known_alike(step, source)


def _note_weight(step: step_module.Step, variable) -> None:
    # `keras.Variable.handle` would be that of a cast value within a layer's call
    held = keras_objects.held_by(variable) if isinstance(variable, keras.Variable) else variable
    if held is not None:
        step.note_alike(held.handle)


def known_alike(step: step_module.Step, value) -> bool:
    """Whether a tensor, or slices, of a graph are a function of summed gradients and weights alone.

    That a constant is the same on all workers is taken for granted, as that of a learning rate is.
    """
    if value is None:
        return True
    value = _content(value)
    if step.is_alike(value):
        return True
    seen, left, found = set(), [value], False
    while left:
        tensor = left.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if step.is_alike(tensor):
            found = True
        elif len(seen) > _MOST_OPERATIONS:
            return False
        else:
            inputs = _inputs_of(tensor)
            if inputs is None:
                return False
            left += inputs
    if found:
        step.note_alike(value)
    return found


def follows_rows(value) -> bool:
    """Whether a tensor may be a function of a batch, or of chance; variables count as the same everywhere."""
    if tf.executing_eagerly():
        return True  # where it comes from is not known
    seen, left = set(), [value]
    while left:
        tensor = left.pop()
        if id(tensor) in seen or hasattr(tensor, "numpy") or getattr(tensor, "op", None) is None:
            continue
        seen.add(id(tensor))
        operation = tensor.op
        if operation.type in _READS:
            continue
        inputs = list(operation.inputs) if operation.type in _CALLS else _inputs_of(tensor)
        if inputs is None:
            return True
        left += inputs
    return False


def _inputs_of(tensor) -> list | None:
    """The tensors that one is a function of, in this graph or one around it; None where it is more than that."""
    if tf.executing_eagerly() or hasattr(tensor, "numpy"):
        return None
    operation = tensor.op
    if operation.type == "Placeholder":
        outer = [external for external, internal in getattr(tensor.graph, "captures", ()) if internal is tensor]
        return outer or None
    if operation.op_def.is_stateful and operation.type not in _READS:
        return None
    return list(operation.inputs)


def _content(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


# ------------------------------------------------------------------------------------------ the mean over all rows


def for_optimizer(grads: Sequence, weights: Sequence) -> list:
    """What an optimizer is given, as gradients of the global batch.

    Args:
        grads: gradients, some of which may be None.
        weights: variables that all workers have alike.
    """
    step = step_module.current()
    if step is None:
        return own_loops.for_optimizer(grads, mean)
    for variable in weights:
        _note_weight(step, variable)
    left = [i for i, g in enumerate(grads) if not known_alike(step, g)]
    found = list(grads)
    for i, value in zip(left, mean([grads[i] for i in left]) if left else [], strict=True):
        found[i] = value
    return found


def mean(grads: Sequence) -> list:
    """Gradients of the global batch: in a step of `fit` the mean over rows, elsewhere the sum over replicas."""
    step = step_module.current()
    ring = gradient_ring.of(tf.distribute.get_strategy())
    in_ring = [i for i, g in enumerate(grads) if ring is not None and isinstance(g, tf.Tensor) and g.dtype.is_floating]
    in_collectives = [i for i, g in enumerate(grads) if g is not None and i not in in_ring]
    reduced = list(grads)
    rows = None
    if in_ring:
        summed, rows = ring.sum(
            [grads[i] for i in in_ring], None if step is None else step.rows, last=not in_collectives
        )
        for i, g in zip(in_ring, summed, strict=True):
            reduced[i] = g
    if in_collectives:
        for i, g in zip(in_collectives, _in_collectives([grads[i] for i in in_collectives], step, rows), strict=True):
            reduced[i] = g
    if ring is not None and in_collectives:
        given = [i for i, g in enumerate(reduced) if g is not None]
        for i, g in zip(given, ring.commit([reduced[i] for i in given]), strict=True):
            reduced[i] = g
    return reduced


def _in_collectives(grads, step, rows):
    """The same through TensorFlow's collectives; `rows` are those of all workers where they are known already."""
    if step is None:
        return all_sum(grads)
    # a sum over the rows of all may be larger than float16 can be, where their mean is not
    local = [_map_dense(lambda d: _weighted(wide(d), step), g) for g in grads]
    if rows is None:
        *local, rows = all_sum([*local, tf.cast(step.rows, _wide(local))])
    else:
        local = all_sum(local)
    scale = tf.maximum(rows, 1.0)
    means = [_map_dense(lambda d: d / tf.cast(scale, d.dtype), g) for g in local]
    return [_map_dense(functools.partial(tf.cast, dtype=g.dtype), m) for g, m in zip(grads, means, strict=True)]


def _wide(grads):
    """A dtype for the row count: that of the first gradient, so that it shares its collective, unless too narrow."""
    dtype = next((g.dtype for g in grads if isinstance(g, tf.Tensor)), tf.float32)
    return dtype if dtype in (tf.float32, tf.float64) else tf.float32


def _map_dense(function, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def _weighted(gradient, step: step_module.Step):
    return _of_rows(gradient * tf.cast(step.rows, gradient.dtype), step)


def _of_rows(gradient, step: step_module.Step):
    """Zeros where this worker has no row; a placeholder row may give NaN, and NaN times zero rows is NaN."""
    return tf.where(step.rows > 0, gradient, tf.zeros_like(gradient)) if step.partial else gradient


def of_this_worker(grads: Sequence) -> list:
    """This worker's gradients alone, zeros where it has no row."""
    step = step_module.current()
    if step is None:
        return list(grads)
    return [g if g is None else _map_dense(lambda d: _of_rows(d, step), g) for g in grads]
