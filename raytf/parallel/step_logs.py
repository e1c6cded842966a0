"""Logs of a step as in one process, for any `train_step` or `test_step` of the user.

* The `result()` of a metric becomes its result over the rows of all workers; values computed from results follow.
* Other numbers count as a mean over this worker's rows, and become the mean weighted by rows. Return no sum over rows,
  but its mean, or use a `keras.metrics.Sum`.
* Values for each row become the values of all workers' rows, in order.
* As in Keras, updated metrics replace a step's logs at an epoch's end, if both have the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree

from raytf.collectives import communicator, exchange
from raytf.compat.tensorflow import rank as rank_of
from raytf.parallel import reduction_probe
from raytf.parallel import step as step_module


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value in logs.

    Args:
        metric: The metric whose result it is, or None.
        key: Key of the value, if results are a dict.
        by_row: Whether it has a value for each row.
    """

    metric: Any = None
    key: str | None = None
    by_row: bool = False


@dataclasses.dataclass
class StepTrace:
    """The result of a step's trace.

    Args:
        origins: Origins of the flat values that it returns.
        written: Ids of the variables that it assigns.
    """

    origins: Sequence[Origin] = ()
    written: frozenset[int] = frozenset()


@dataclasses.dataclass
class Notes:
    """Facts about the functions of a model, from their traces.

    Args:
        trials: Outcomes of trials, see `reduction_probe.probe_cached`.
        traces: Traces of the train step (True) and the test step (False).
        last: Key in `traces` of the step that ran last.
        gathers: Whether a step gathers the rows of all replicas.
        tested: Number of steps of the running evaluation so far.
        predicted: Number of steps of the running prediction so far.
    """

    trials: dict = dataclasses.field(default_factory=dict)
    traces: dict[bool, StepTrace] = dataclasses.field(default_factory=dict)
    last: bool | None = None
    gathers: bool = False
    tested: int = 0
    predicted: int = 0

    @property
    def last_trace(self) -> StepTrace:
        """The trace of the step that ran last."""
        return self.traces.get(self.last, StepTrace())


@dataclasses.dataclass
class StepObservations:
    """The observations so far in a step that is traced or runs.

    Args:
        notes: Notes of its model.
        results: By id of a tensor: (the tensor, its origin).
        written: Ids of assigned variables, see `StepTrace`.
        initial_values: By id of a metric's variable: its value when the step began, if a replica may have no rows.
        added: By id of a layer: its losses from `add_loss`.
        sums: The check of the losses that tapes differentiate, a `row_sums.RowSums`, or None.
    """

    notes: Notes
    results: dict[int, tuple[tf.Tensor, Origin]] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)
    initial_values: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    added: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    sums: Any = None


def notes_of(model) -> Notes:
    """Returns the notes of a model."""
    return model.__dict__.setdefault("_raytf_notes", Notes())


def seen() -> StepObservations | None:
    """Returns the observations of the step that this thread traces or runs, or None outside of one."""
    return getattr(step_module.state, "seen", None)


# --------------------------------------------------------------------------------------------------- in a step


def resolved(outputs: Any, shown: StepObservations, result: Callable[[Origin], tf.Tensor]) -> tuple[Any, list[Origin]]:
    """Returns (outputs of a replica's step, the origins of its flat values).

    Args:
        outputs: Outputs of the user's function.
        shown: Observations of the step.
        result: result(origin) -> a metric's result over the rows of all replicas.
    """
    step = step_module.current()
    leaves, origins = tree.flatten(outputs), []
    copies: dict[int, tf.Tensor] = {}
    for i, leaf in enumerate(leaves):
        known = shown.results.get(id(leaf))
        origin = known[1] if known is not None else Origin()
        if known is None and tf.is_tensor(leaf) and step is not None:
            leaves[i] = leaf = _from_results_of_all(leaf, shown, result, copies)
            if reduction_probe.has_rows(leaf, step.known_rows):
                origin = Origin(by_row=True)
                leaves[i] = leaf[: tf.where(step.rows > 0, tf.shape(leaf)[0], 0)] if step.partial else leaf
        origins.append(origin)
    return tree.pack_sequence_as(outputs, leaves), origins


def _from_results_of_all(leaf: tf.Tensor, shown: StepObservations, result: Callable, copies: dict) -> tf.Tensor:
    """Returns a graph's tensor, computed from the metrics' results over all rows instead of local ones."""
    if hasattr(leaf, "numpy") or not hasattr(leaf, "op"):
        return leaf  # in eager mode the results cover all rows already
    from_results = _ancestors(leaf)
    given = [(t, origin) for t, origin in shown.results.values() if getattr(t, "op", None) in from_results]
    if not given:
        return leaf
    for tensor, origin in given:
        if id(tensor) not in copies:
            copies[id(tensor)] = result(origin)
    return _copied(leaf, copies)


def _ancestors(tensor: tf.Tensor) -> set:
    """Returns the operations of its graph that compute a tensor."""
    operations, pending = set(), [tensor.op]
    while pending:
        op = pending.pop()
        if op not in operations:
            operations.add(op)
            pending += [given.op for given in op.inputs]
    return operations


def _copied(tensor: tf.Tensor, copies: dict[int, tf.Tensor]) -> tf.Tensor:
    """Returns a tensor, computed from `copies` instead of some of its sources."""
    done: dict[Any, list] = {}

    def copy_of(source):
        if id(source) in copies:
            return copies[id(source)]
        return done[source.op][source.value_index]

    pending = [tensor.op]
    while pending:
        op = pending[-1]
        missing = [t.op for t in op.inputs if id(t) not in copies and t.op not in done]
        if op in done or missing:
            pending += missing if op not in done else []
            if op in done:
                pending.pop()
            continue
        pending.pop()
        given = [copy_of(t) for t in op.inputs]
        if all(a is b for a, b in zip(given, op.inputs, strict=True)):
            done[op] = list(op.outputs)
            continue
        attributes = {name: op.node_def.attr[name] for name in op.node_def.attr}
        made = op.graph.create_op(op.type, given, [t.dtype for t in op.outputs], attrs=attributes, op_def=op.op_def)
        done[op] = list(made.outputs)
    return copy_of(tensor)


def joined(strategy, outputs: Any, rows: Any, trace: StepTrace) -> tuple[Any, tf.Tensor]:
    """Returns (joined outputs of the replicas of this process, the number of their rows)."""
    local = strategy.experimental_local_results
    counts = local(rows)
    total = counts[0] if len(counts) == 1 else tf.add_n(counts)
    leaves = tree.flatten(outputs)
    for i, (leaf, origin) in enumerate(zip(leaves, trace.origins, strict=True)):
        values = local(leaf)
        if len(values) == 1 or not _is_number(values[0]):
            leaves[i] = values[0]
        elif origin.by_row:
            leaves[i] = tf.concat(values, 0)
        else:
            leaves[i] = _weighted([tf.convert_to_tensor(v) for v in values], counts, total)
    return tree.pack_sequence_as(outputs, leaves), total


def _weighted(values: Sequence[tf.Tensor], rows: Sequence[tf.Tensor], total: tf.Tensor) -> tf.Tensor:
    """Returns the mean over replicas, weighted by their rows; in float64 for integers."""
    kind = values[0].dtype if values[0].dtype.is_floating else tf.float64
    wide = [tf.cast(v, tf.float64) * tf.cast(n, tf.float64) for v, n in zip(values, rows, strict=True)]
    wide = [tf.where(n > 0, v, tf.zeros_like(v)) for v, n in zip(wide, rows, strict=True)]
    return tf.cast(tf.add_n(wide) / tf.cast(tf.maximum(total, 1), tf.float64), kind)


# ------------------------------------------------------------------------------------------------- at its end


def by_metrics(trace: StepTrace, logs: Mapping, names: Mapping[str, Sequence]) -> set[str]:
    """Returns the names in logs that metrics replace, if a step returns the names of all of them.

    Args:
        trace: Trace of the step.
        logs: Logs that it returned.
        names: Variables of each metric result, by the name of the result.
    """
    if set(logs) != set(names):
        return set()
    if not trace.origins:  # another process ran the step
        return set(names)
    results = {name for name, value in _by_name(logs, trace).items() if value.metric is not None}
    return results | {name for name, group in names.items() if not group or any(id(v) in trace.written for v in group)}


def _by_name(logs: Mapping, trace: StepTrace) -> dict[str, Origin]:
    """Returns the origins of values that are no nests."""
    paths = [path for path, _ in tree.flatten_with_path(dict(logs))]
    return {path[0]: origin for path, origin in zip(paths, trace.origins, strict=False) if len(path) == 1}


def of_all_workers(strategy, logs: Mapping, rows: Any, trace: StepTrace, result: Callable[[Origin], Any]) -> dict:
    """Returns the logs over the rows of all workers, see the module's docstring.

    Args:
        logs: Logs of the last step in this process.
        rows: Number of this worker's rows in it.
        trace: Trace of that step.
        result: result(origin) -> a metric's result over all rows.
    """
    leaves = tree.flatten(dict(logs))
    origins = [*trace.origins, *[Origin()] * len(leaves)][: len(leaves)]
    numbers = [i for i, leaf in enumerate(leaves) if origins[i].metric is None and _is_number(leaf)]
    whole = [i for i in numbers if origins[i].by_row]
    means = [i for i in numbers if not origins[i].by_row]
    rows = float(rows)
    values = [np.asarray(leaves[i], np.float64) * rows if rows else np.zeros(np.shape(leaves[i])) for i in means]
    if numbers:
        *sums, total = communicator.sum_over_workers(strategy, [*values, np.float64(rows)])
        for i, value in zip(means, sums, strict=True):
            leaves[i] = value / total
        for i, value in zip(whole, _gathered(strategy, [np.asarray(leaves[i]) for i in whole]), strict=True):
            leaves[i] = value
    for i, origin in enumerate(origins):
        if origin.metric is not None:
            leaves[i] = result(origin)
    return tree.pack_sequence_as(dict(logs), leaves)


def _is_number(leaf: Any) -> bool:
    if leaf is None or isinstance(leaf, (str, bytes)):
        return False
    dtype = getattr(leaf, "dtype", None)
    return dtype is None or tf.as_dtype(dtype) not in (tf.string, tf.variant, tf.resource)


def _gathered(strategy, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the rows of each array of all workers, by rank."""
    if not values or not communicator.spans_workers(strategy):
        return list(values)
    rank = rank_of(strategy)
    row_counts = np.zeros(
        (strategy.num_replicas_in_sync // communicator.local_replicas(strategy), len(values)), np.int64
    )
    row_counts[rank] = [len(v) for v in values]
    (counts,) = communicator.sum_over_workers(strategy, [row_counts])
    placed = []
    for value, lengths in zip(values, counts.T, strict=True):
        kind = value.dtype if tf.as_dtype(value.dtype) in exchange.SUMMABLE else np.int32
        whole = np.zeros((lengths.sum(), *value.shape[1:]), kind)
        start = lengths[:rank].sum()
        whole[start : start + len(value)] = value
        placed.append(whole)
    sums = communicator.sum_over_workers(strategy, placed)
    return [total.astype(value.dtype) for total, value in zip(sums, values, strict=True)]
