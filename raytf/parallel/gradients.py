"""Gradients of the global batch: in a step of `fit` they are summed when a tape computes them.

Later changes of gradients, such as clipping, then apply to the gradients that one process would have. The mean over the
rows of all workers is linear. The mean of values that are equal on all workers changes nothing. So an optimizer may
average any gradients that it gets: functions of summed gradients, of others, or of both. It skips gradients that are
known to be equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from raytf.collectives import gradient_ring
from raytf.collectives.communicator import all_sum, local_replicas, of_first_replica, wide
from raytf.compat import keras_objects
from raytf.compat.patching import patch
from raytf.compat.tensorflow import has_tangents, may_record, recorded_linear
from raytf.logs import warn_user
from raytf.parallel import local_sgd, own_loops, reduction_probe, shards, sparse_rows, step_logs
from raytf.parallel import step as step_module

# Operations that are searched between a gradient's sum and the optimizer; beyond them it is summed again.
_MOST_OPERATIONS = 100_000
_CALLS = ("If", "While", "Case", "StatefulPartitionedCall")


@patch((tf.GradientTape, "gradient"))
def gradient(original, self, target, sources, output_gradients=None, unconnected_gradients="none"):
    """Replaces `GradientTape.gradient`: within a step, returns gradients of weights over the global batch."""
    step = _summing_step()
    if step is None:
        grads = original(self, target, sources, output_gradients, unconnected_gradients)
        own_loops.note_taped(_of_variables(sources, grads))
        return grads
    flat = tf.nest.flatten(sources)
    indices = [i for i, source in enumerate(flat) if _is_alike(step, source)]
    if output_gradients is None and len(indices) == len(flat):
        output_gradients = _upstream(step, target)
    if indices and (shown := step_logs.seen()) is not None and shown.sums is not None:
        shown.sums.check(target)
    with step_module.override_state(differentiates=True):  # TensorFlow's backward functions contain tapes
        grads = original(self, target, sources, output_gradients, unconnected_gradients)
    optimizer_sums = shards.left_to_optimizer(step, flat, tf.nest.flatten(grads))
    return _with_sums(step, grads, [i for i in indices if i not in optimizer_sums])


@patch((tf.GradientTape, "jacobian"))
def jacobian(original, self, target, sources, *args, **kwargs):
    """Replaces `GradientTape.jacobian` in the same way, if its rows belong to values, and not to rows of the batch."""
    step = _summing_step()
    if step is None:
        return original(self, target, sources, *args, **kwargs)
    with step_module.override_state(differentiates=True):
        grads = original(self, target, sources, *args, **kwargs)
    if any(reduction_probe.has_rows(value, step.known_rows) for value in tf.nest.flatten(target)):
        return grads
    return _with_sums(step, grads, [i for i, s in enumerate(tf.nest.flatten(sources)) if _is_alike(step, s)])


@patch((tf, "map_fn"), (tf, "vectorized_map"))
def map_over_rows(original, fn, elems, *args, **kwargs):
    """Replaces `tf.map_fn` and `tf.vectorized_map` over rows: gradients in it are those of single rows, and local.

    Workers have different numbers of rows, so a sum for each row would not have as many on all.
    """
    step = _summing_step()
    if step is None or not any(reduction_probe.has_rows(leaf, step.known_rows) for leaf in tf.nest.flatten(elems)):
        return original(fn, elems, *args, **kwargs)
    with step_module.override_state(differentiates=True):
        return original(fn, elems, *args, **kwargs)


def _of_variables(sources, gradients) -> list:
    pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
    return [gradient for source, gradient in pairs if isinstance(source, (keras.Variable, tf.Variable))]


def _summing_step() -> step_module.Step | None:
    """Returns the step whose tapes sum, or None if gradients stay local."""
    step = step_module.current()
    if step is None or getattr(step_module.state, "differentiates", False) or not step_module.in_replica_of_many():
        return None
    strategy = tf.distribute.get_strategy()
    if local_sgd.averaging_interval(strategy) > 1:
        return None
    if step.is_nested() and local_replicas(strategy) > 1:  # a collective of several devices cannot be nested there
        warn_user(
            "A tape in a tf.function, tf.cond or tf.while_loop of a step gives each device's own gradients where one "
            "process has several devices; an optimizer sums them, and what is done to them before, such as clipping, "
            "is done to each device's own. Take the tape out, or start one worker for each device",
        )
        return None
    return step


def _with_sums(step: step_module.Step, gradients, indices: Sequence[int]):
    """Returns a nest of gradients with those at `indices` summed; the optimizer gets those without floats."""
    flat = tf.nest.flatten(gradients)
    indices = [i for i in indices if flat[i] is not None and flat[i].dtype.is_floating]
    if not indices:
        return gradients
    summed = _recorded_mean(step, [flat[i] for i in indices])
    for i, value in zip(indices, summed, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(gradients, flat)


def _recorded_mean(step: step_module.Step, gradients: Sequence) -> list:
    """Returns the means over the rows of all workers; differentiable if a tape may record here or outside."""
    summed = _differentiable_mean(gradients) if may_record() or step.is_nested() else mean(gradients)
    for value in summed:
        step.note_alike(own_loops.content_of(value))
    return summed


def _differentiable_mean(gradients: Sequence) -> list:
    """Returns `mean` with a gradient: with the weights of losses, the mean over workers is its own adjoint.

    For slices each worker has the values of all workers, by rank, and the gradients of its own flow back.
    """
    slices = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    local_slices = _own_slices([gradients[i].values for i in slices])
    adjoints = []

    def mean_of(contents):
        given = [
            tf.IndexedSlices(c, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else c
            for c, g in zip(contents, gradients, strict=True)
        ]
        return mean(given, merge=False)

    @tf.custom_gradient
    def means(*contents):
        averaged = mean_of(contents)

        def grad(*upstream):
            flowing = _differentiable_mean(upstream[: len(averaged)])
            for i, (start, count) in zip(slices, local_slices, strict=True):
                # all workers' ids may be there once, which are this worker's
                begin = tf.where(tf.equal(tf.shape(flowing[i])[0], count), 0, start)
                flowing[i] = flowing[i][begin : begin + count]
            return flowing

        adjoints.append(grad)
        return [*map(own_loops.content_of, averaged), *(averaged[i].indices for i in slices)], grad

    local = list(map(own_loops.content_of, gradients))
    contents = means(*local)
    averaged = list(contents[: len(gradients)])
    if not tf.executing_eagerly() and has_tangents(local):  # accumulators do not see custom gradients of a graph
        averaged = recorded_linear(
            averaged, local, adjoints[-1], lambda *tangents: [own_loops.content_of(g) for g in mean_of(tangents)]
        )
    for i, indices in zip(slices, contents[len(gradients) :], strict=True):
        averaged[i] = tf.IndexedSlices(averaged[i], indices, gradients[i].dense_shape)
    return averaged


def _own_slices(values: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns (begin among the slices of all workers, number) of this worker's slices, for each value."""
    if not values:
        return []
    context = tf.distribute.get_replica_context()
    index, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
    local_counts = tf.stack([tf.shape(value)[0] for value in values])
    (counts,) = all_sum([tf.one_hot(index, replicas, dtype=tf.int32)[:, None] * local_counts])
    offsets = tf.reduce_sum(counts[:index], 0)
    return [(offsets[i], local_counts[i]) for i in range(len(values))]


def _upstream(step: step_module.Step, target):
    """Returns upstream gradients for an unreduced loss, whose gradient is a sum over rows: they undo the later mean.

    None if no value of the loss may belong to rows. All workers decide that alike.
    """
    flat = tf.nest.flatten(target)
    if not all(isinstance(value, tf.Tensor) and value.dtype.is_floating for value in flat):
        return None
    if all(value.shape.rank in (None, 0) for value in flat):
        return None
    scale = step.upscale(tf.float64)
    upstream = [
        tf.ones_like(value) * (tf.cast(scale, value.dtype) if reduction_probe.has_rows(value, step.known_rows) else 1)
        for value in flat
    ]
    return tf.nest.pack_sequence_as(target, upstream)


# ----------------------------------------------------------------------------------------- equal values


def _is_alike(step: step_module.Step, source) -> bool:
    """Returns whether all workers have the same source: a weight, or a function of weights only."""
    if isinstance(source, (keras.Variable, tf.Variable)):
        known = getattr(source, "synchronization", None) not in ("on_read", tf.VariableSynchronization.ON_READ)
        if known:
            _note_weight(step, source)
        return known
    return isinstance(source, tf.Tensor) and known_alike(step, source)


def _note_weight(step: step_module.Step, variable) -> None:
    # `keras.Variable.handle` would be the handle of a cast value within a layer's call
    tf_variable = keras_objects.variable_of(variable) if isinstance(variable, keras.Variable) else variable
    if tf_variable is not None:
        step.note_alike(tf_variable.handle)


def known_alike(step: step_module.Step, value) -> bool:
    """Returns whether a tensor of a graph, or slices, depend only on summed gradients and weights.

    Constants are assumed to be equal on all workers, as for a learning rate.
    """
    if value is None:
        return True
    value = own_loops.content_of(value)
    alike = step.is_alike(value) or _origins(step, value) == (True, False)
    if alike:
        step.note_alike(value)
    return alike


def differs_by_draws(step: step_module.Step, value) -> bool:
    """Returns whether only random numbers make a tensor of a graph differ between workers, as noise of a gradient."""
    origins = _origins(step, value) if isinstance(value, tf.Tensor) else None
    return origins is not None and origins[1]


def note_drawn(seed: tf.Tensor) -> None:
    """Records a seed from which a replica draws random numbers of its own."""
    step = step_module.current()
    if step is not None:
        step.note_drawn(seed)
    else:
        own_loops.note_drawn(seed)


def _origins(step: step_module.Step, value) -> tuple[bool, bool] | None:
    """Returns (whether a tensor depends on equal values, whether on random numbers), or None if it depends on more."""
    seen, pending, alike, drawn = set(), [value], False, False
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if step.is_alike(tensor):
            alike = True
        elif step.is_drawn(tensor):
            drawn = True
        elif len(seen) > _MOST_OPERATIONS:
            return None
        elif not hasattr(tensor, "numpy") and tensor.op.type in own_loops.DRAWS:
            drawn = True
            pending += [t for t in tensor.op.inputs if t.dtype != tf.resource]
        else:
            inputs = _inputs_of(tensor)
            if inputs is None:
                return None
            pending += inputs
    return alike, drawn


def may_differ(step: step_module.Step, value) -> bool:
    """Returns whether a tensor may depend on a batch, or on random numbers; variables count as equal on all workers."""
    if known_alike(step, value):
        return False
    if tf.executing_eagerly():
        return True  # its origin is unknown
    return _reaches_batch(step, value)


def has_fixed_ids(step: step_module.Step | None, gradient: tf.IndexedSlices) -> bool | None:
    """Returns whether the ids of slices do not come from rows: all are equal, as for a table of positions.

    They may depend on any dimension of a batch but the first, as in `embedding(ops.arange(ops.shape(x)[1]))`. Returns
    None if their origin is unknown, as in a step that runs eagerly. It is also unknown for a fixed number of rows,
    which may be in constants.
    """
    if tf.executing_eagerly() or (step is not None and tf.get_static_value(step.rows) is not None):
        return None
    return not _reaches_batch(step, gradient.indices, _is_later_dimension, _MOST_OPERATIONS)


def _reaches_batch(
    step: step_module.Step | None, value, passes: Callable[[Any], bool] = lambda tensor: False, most: float = math.inf
) -> bool:
    """Returns whether a tensor of a graph is a function of a batch, of random numbers, or of unknown values.

    Args:
        step: The step, which knows equal values, or None.
        value: A tensor.
        passes: Whether a tensor counts as equal on all workers, whatever it is a function of.
        most: Tensors to search; beyond them the answer is True.
    """
    seen, pending = set(), [value]
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen or hasattr(tensor, "numpy") or getattr(tensor, "op", None) is None:
            continue
        seen.add(id(tensor))
        if step is not None and step.is_drawn(tensor):
            return True
        if (step is not None and step.is_alike(tensor)) or tensor.op.type in own_loops.READS or passes(tensor):
            continue
        inputs = list(tensor.op.inputs) if tensor.op.type in _CALLS else _inputs_of(tensor)
        if inputs is None or len(seen) > most:
            return True
        pending += inputs
    return False


def _is_later_dimension(tensor) -> bool:
    """Returns whether a tensor is one dimension of another tensor's shape, and not the first, in which rows are."""
    operation = tensor.op
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    begin, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape[0]
    if begin is None or rank is None or operation.get_attr("shrink_axis_mask") != 1:
        return False
    return int(begin[0]) % rank > 0


def _inputs_of(tensor) -> list | None:
    """Returns the tensors that determine a tensor, in its graph or an outer one; None if it depends on more."""
    if tf.executing_eagerly() or hasattr(tensor, "numpy"):
        return None
    operation = tensor.op
    if operation.type == "Placeholder":
        outer = [external for external, internal in getattr(tensor.graph, "captures", ()) if internal is tensor]
        return outer or None
    if operation.op_def.is_stateful and operation.type not in own_loops.READS:
        return None
    return list(operation.inputs)


# ------------------------------------------------------------------------------------------ the mean over all rows


def for_optimizer(grads: Sequence, weights: Sequence) -> list:
    """Returns the gradients of the global batch for an optimizer.

    Args:
        grads: Gradients; some may be None.
        weights: Variables with equal values on all workers.
    """
    step = step_module.current()
    if step is None:
        return own_loops.for_optimizer(grads, mean)
    for variable in weights:
        _note_weight(step, variable)
    differing = [i for i, g in enumerate(grads) if not known_alike(step, g)]
    # noise on a summed gradient is one draw, as in one process: a mean of the workers' would be smaller
    drawn = [i for i in differing if differs_by_draws(step, grads[i])]
    differing = [i for i in differing if i not in drawn]
    results = list(grads)
    for indices, joined in ((drawn, of_first_replica), (differing, mean)):
        for i, value in zip(indices, joined([grads[i] for i in indices]) if indices else [], strict=True):
            results[i] = value
    return results


def mean(grads: Sequence, merge: bool = True) -> list:
    """Returns gradients of the global batch: the mean over rows in a step of `fit`, otherwise the sum over replicas.

    Args:
        grads: Gradients; some may be None.
        merge: Whether slices may be merged, so that ids are unique.
    """
    step = step_module.current()
    fixed = [has_fixed_ids(step, g) if isinstance(g, tf.IndexedSlices) else False for g in grads]
    merge = merge and sparse_rows.lazy
    if merge:
        grads = [sparse_rows.of_this_worker(g, step) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    ring = gradient_ring.ring_of(tf.distribute.get_strategy())
    floating = [i for i, g in enumerate(grads) if ring is not None and g is not None and g.dtype.is_floating]
    in_ring = [i for i in floating if isinstance(grads[i], tf.Tensor)]
    slices = [i for i in floating if isinstance(grads[i], tf.IndexedSlices)]
    in_collectives = [i for i, g in enumerate(grads) if g is not None and i not in floating]
    reduced = list(grads)
    rows, own_rows = None, None if step is None else step.rows
    if in_ring:
        summed, rows = ring.sum([grads[i] for i in in_ring], own_rows, last=not (slices or in_collectives))
        for i, g in zip(in_ring, summed, strict=True):
            reduced[i] = g
    if slices:
        summed = ring.sum_rows([grads[i] for i in slices], own_rows, merge, [fixed[i] for i in slices])
        for i, g in zip(slices, summed, strict=True):
            reduced[i] = g
            if merge and step is not None:
                step.note_merged(g)
    if in_collectives:
        for i, g in zip(in_collectives, _in_collectives([grads[i] for i in in_collectives], step, rows), strict=True):
            reduced[i] = g if fixed[i] is False else _with_ids_once(g, unique=fixed[i] is None)
    if ring is not None and (slices or in_collectives):
        given = [i for i, g in enumerate(reduced) if g is not None]
        for i, g in zip(given, ring.commit([reduced[i] for i in given]), strict=True):
            reduced[i] = g
    return reduced


def _with_ids_once(gathered: tf.IndexedSlices, unique: bool) -> tf.IndexedSlices:
    """Returns slices of all replicas with the ids of one, and sums of values, if all have the same ids.

    Args:
        gathered: The slices of all replicas, one after the other, in any order.
        unique: Whether only several ids that are unique in each replica are summed.
    """
    replicas, count = tf.distribute.get_replica_context().num_replicas_in_sync, tf.size(gathered.indices)
    values, ids = gathered.values, gathered.indices

    def sums():
        parts = tf.reshape(values, tf.concat([[replicas, count // replicas], tf.shape(values)[1:]], 0))
        return tf.reduce_sum(parts, 0), ids[: count // replicas]

    whole = tf.reshape(ids[: count // replicas * replicas], (replicas, -1))
    are_same = tf.logical_and(count % replicas == 0, tf.reduce_all(whole == whole[:1]))
    if unique:
        several = tf.logical_and(count > replicas, tf.size(tf.unique(whole[0]).y) == count // replicas)
        are_same = tf.logical_and(are_same, several)
    values, ids = tf.cond(are_same, sums, lambda: (tf.identity(values), tf.identity(ids)))
    values.set_shape([None, *gathered.values.shape[1:]])
    return tf.IndexedSlices(values, ids, gathered.dense_shape)


def _in_collectives(grads, step, rows):
    """Returns the same through TensorFlow's collectives; `rows` is the number of all workers' rows if it is known."""
    if step is None:
        return all_sum(grads)
    # a sum over all rows may exceed float16 although their mean does not
    local = [_map_dense(lambda d: weighted(wide(d), step), g) for g in grads]
    if rows is None:
        *local, rows = all_sum([*local, tf.cast(step.rows, _wide(local))])
    else:
        local = all_sum(local)
    scale = tf.maximum(rows, 1.0)
    means = [_map_dense(lambda d: d / tf.cast(scale, d.dtype), g) for g in local]
    return [_map_dense(functools.partial(tf.cast, dtype=g.dtype), m) for g, m in zip(grads, means, strict=True)]


def _wide(grads):
    """Returns a dtype for the row count: the first gradient's, to share its collective, if it is wide enough."""
    dtype = next((g.dtype for g in grads if isinstance(g, tf.Tensor)), tf.float32)
    return dtype if dtype in (tf.float32, tf.float64) else tf.float32


def _map_dense(function, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def weighted(gradient, step: step_module.Step):
    """Returns a gradient with the weight of this replica's rows."""
    return of_rows(gradient * tf.cast(step.rows, gradient.dtype), step)


def of_rows(gradient, step: step_module.Step):
    """Returns zeros if this worker has no row. A placeholder row may produce NaN, and NaN times zero rows is NaN."""
    return tf.where(step.rows > 0, gradient, tf.zeros_like(gradient)) if step.partial else gradient


def of_this_worker(grads: Sequence) -> list:
    """Returns this worker's local gradients, zeros if it has no row."""
    step = step_module.current()
    if step is None:
        return list(grads)
    if sparse_rows.lazy:
        grads = [sparse_rows.of_this_worker(g, step) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    return [g if g is None else _map_dense(lambda d: of_rows(d, step), g) for g in grads]
