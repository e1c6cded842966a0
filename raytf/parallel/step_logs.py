"""Logs of a step as one process has them, whatever a `train_step` or `test_step` of the user's returns.

* What a metric's `result()` gave is that metric's result over the rows of all workers, whatever name it has.
* What was computed from such results is computed from those over all rows.
* Any other number is taken for a mean over this worker's rows: the mean over workers, weighted with their rows. So a
  mean over rows is exact, and what is alike on all workers stays. A sum over rows is none: return its mean, or keep a
  `keras.metrics.Sum`.
* What has a value for each row has those of the rows of all workers, in their order.

A name alone says nothing, but as in Keras: where a step returns the names of all metrics and no other, the metrics that
the step has updated stand for them at the end of an epoch. One that nothing has updated does not.
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
from raytf.parallel import halves
from raytf.parallel import step as step_module


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value of logs comes from.

    Args:
        metric: whose result it is, or None.
        key: of the value, where results are a dict.
        by_row: whether it has a value for each row.
    """

    metric: Any = None
    key: str | None = None
    by_row: bool = False


@dataclasses.dataclass
class StepTrace:
    """What a step's trace has shown.

    Args:
        origins: of the flat values that it returns.
        written: ids of the variables that it assigns.
    """

    origins: Sequence[Origin] = ()
    written: frozenset[int] = frozenset()


@dataclasses.dataclass
class Notes:
    """What is known of the functions of a model, by their traces.

    Args:
        trials: see `halves.known`.
        of: what the train step (True) and the test step (False) have shown.
        last: which of them ran last.
        gathers: whether a step gathers the rows of all replicas.
    """

    trials: dict = dataclasses.field(default_factory=dict)
    of: dict[bool, StepTrace] = dataclasses.field(default_factory=dict)
    last: bool | None = None
    gathers: bool = False

    @property
    def found(self) -> StepTrace:
        """Of the step that ran last."""
        return self.of.get(self.last, StepTrace())


@dataclasses.dataclass
class StepObservations:
    """What a step that is traced, or runs, has shown so far.

    Args:
        notes: of its model.
        results: by id of a tensor: (the tensor, its origin).
        written: see `StepTrace`.
        before: by id of a metric's variable: its value when the step began, where a replica may have no rows.
        added: by id of a layer: what it has added with `add_loss`.
    """

    notes: Notes
    results: dict[int, tuple[tf.Tensor, Origin]] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)
    before: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    added: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)


def notes_of(model) -> Notes:
    """The notes of a model."""
    return model.__dict__.setdefault("_raytf_notes", Notes())


def seen() -> StepObservations | None:
    """What the step that this thread traces or runs has shown, or None outside of one."""
    return getattr(step_module.state, "seen", None)


# --------------------------------------------------------------------------------------------------- in a step


def resolved(outputs: Any, shown: StepObservations, result: Callable[[Origin], tf.Tensor]) -> tuple[Any, list[Origin]]:
    """(what a replica's step returns, the origins of its flat values).

    Args:
        outputs: of the user's function.
        shown: by it.
        result: result(origin) -> what a metric has over the rows of all replicas.
    """
    step = step_module.current()
    leaves, origins = tree.flatten(outputs), []
    copies: dict[int, tf.Tensor] = {}
    for i, leaf in enumerate(leaves):
        known = shown.results.get(id(leaf))
        origin = known[1] if known is not None else Origin()
        if known is None and tf.is_tensor(leaf) and step is not None:
            leaves[i] = leaf = _from_results_of_all(leaf, shown, result, copies)
            if halves.has_rows(leaf, step.known_rows):
                origin = Origin(by_row=True)
                leaves[i] = leaf[: tf.where(step.rows > 0, tf.shape(leaf)[0], 0)] if step.partial else leaf
        origins.append(origin)
    return tree.pack_sequence_as(outputs, leaves), origins


def _from_results_of_all(leaf: tf.Tensor, shown: StepObservations, result: Callable, copies: dict) -> tf.Tensor:
    """A tensor of a graph as it would be, had the metrics' results in it been those over all rows."""
    if hasattr(leaf, "numpy") or not hasattr(leaf, "op"):
        return leaf  # in eager mode the results were those of all from the start
    from_results = _ancestors(leaf)
    given = [(t, origin) for t, origin in shown.results.values() if getattr(t, "op", None) in from_results]
    if not given:
        return leaf
    for tensor, origin in given:
        if id(tensor) not in copies:
            copies[id(tensor)] = result(origin)
    return _copied(leaf, copies)


def _ancestors(tensor: tf.Tensor) -> set:
    """The operations of its graph that a tensor is computed by."""
    found, ahead = set(), [tensor.op]
    while ahead:
        op = ahead.pop()
        if op not in found:
            found.add(op)
            ahead += [given.op for given in op.inputs]
    return found


def _copied(tensor: tf.Tensor, copies: dict[int, tf.Tensor]) -> tf.Tensor:
    """A tensor, computed from others in the place of some that it is computed from."""
    done: dict[Any, list] = {}

    def of(one):
        if id(one) in copies:
            return copies[id(one)]
        return done[one.op][one.value_index]

    ahead = [tensor.op]
    while ahead:
        op = ahead[-1]
        missing = [t.op for t in op.inputs if id(t) not in copies and t.op not in done]
        if op in done or missing:
            ahead += missing if op not in done else []
            if op in done:
                ahead.pop()
            continue
        ahead.pop()
        given = [of(t) for t in op.inputs]
        if all(a is b for a, b in zip(given, op.inputs, strict=True)):
            done[op] = list(op.outputs)
            continue
        attributes = {name: op.node_def.attr[name] for name in op.node_def.attr}
        made = op.graph.create_op(op.type, given, [t.dtype for t in op.outputs], attrs=attributes, op_def=op.op_def)
        done[op] = list(made.outputs)
    return of(tensor)


def joined(strategy, outputs: Any, rows: Any, found: StepTrace) -> tuple[Any, tf.Tensor]:
    """(what the replicas of this process return together, the number of their rows)."""
    local = strategy.experimental_local_results
    each = local(rows)
    total = each[0] if len(each) == 1 else tf.add_n(each)
    leaves = tree.flatten(outputs)
    for i, (leaf, origin) in enumerate(zip(leaves, found.origins, strict=True)):
        values = local(leaf)
        if len(values) == 1 or not _is_number(values[0]):
            leaves[i] = values[0]
        elif origin.by_row:
            leaves[i] = tf.concat(values, 0)
        else:
            leaves[i] = _weighted([tf.convert_to_tensor(v) for v in values], each, total)
    return tree.pack_sequence_as(outputs, leaves), total


def _weighted(values: Sequence[tf.Tensor], rows: Sequence[tf.Tensor], total: tf.Tensor) -> tf.Tensor:
    """The mean over replicas, weighted with their rows; in float64 of what is no float."""
    kind = values[0].dtype if values[0].dtype.is_floating else tf.float64
    wide = [tf.cast(v, tf.float64) * tf.cast(n, tf.float64) for v, n in zip(values, rows, strict=True)]
    wide = [tf.where(n > 0, v, tf.zeros_like(v)) for v, n in zip(wide, rows, strict=True)]
    return tf.cast(tf.add_n(wide) / tf.cast(tf.maximum(total, 1), tf.float64), kind)


# ------------------------------------------------------------------------------------------------- at its end


def by_metrics(found: StepTrace, logs: Mapping, names: Mapping[str, Sequence]) -> set[str]:
    """The names of logs that metrics stand for, where a step returns the names of all of them.

    Args:
        found: what the step has shown.
        logs: what it returned.
        names: the variables behind each name of the metrics' results.
    """
    if set(logs) != set(names):
        return set()
    if not found.origins:  # a step of another process
        return set(names)
    results = {name for name, value in _by_name(logs, found).items() if value.metric is not None}
    return results | {name for name, its in names.items() if not its or any(id(v) in found.written for v in its)}


def _by_name(logs: Mapping, found: StepTrace) -> dict[str, Origin]:
    """The origins of what is no nest."""
    paths = [path for path, _ in tree.flatten_with_path(dict(logs))]
    return {path[0]: origin for path, origin in zip(paths, found.origins, strict=False) if len(path) == 1}


def of_all_workers(strategy, logs: Mapping, rows: Any, found: StepTrace, result: Callable[[Origin], Any]) -> dict:
    """The logs over the rows of all workers, see the head of this module.

    Args:
        logs: what the last step returned here.
        rows: of this worker in it.
        found: what that step has shown.
        result: result(origin) -> what a metric has over all rows.
    """
    leaves = tree.flatten(dict(logs))
    origins = [*found.origins, *[Origin()] * len(leaves)][: len(leaves)]
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
    """The rows of each array of all workers, in the order of their ranks."""
    if not values or not communicator.spans_workers(strategy):
        return list(values)
    rank = rank_of(strategy)
    mine = np.zeros((strategy.num_replicas_in_sync // communicator.local_replicas(strategy), len(values)), np.int64)
    mine[rank] = [len(v) for v in values]
    (counts,) = communicator.sum_over_workers(strategy, [mine])
    placed = []
    for value, lengths in zip(values, counts.T, strict=True):
        kind = value.dtype if tf.as_dtype(value.dtype) in exchange.SUMMABLE else np.int32
        whole = np.zeros((lengths.sum(), *value.shape[1:]), kind)
        start = lengths[:rank].sum()
        whole[start : start + len(value)] = value
        placed.append(whole)
    sums = communicator.sum_over_workers(strategy, placed)
    return [found.astype(value.dtype) for found, value in zip(sums, values, strict=True)]
