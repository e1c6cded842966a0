"""Metrics and moving statistics under several workers: local during an epoch, global at its end, and where a part of it
is kept."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf import activity
from raytf.collectives import communicator, exchange
from raytf.collectives.communicator import all_sum, local_replicas, many_replicas, wide
from raytf.compat import keras_objects
from raytf.compat.keras import backend_core, backend_trainer
from raytf.compat.patching import patch
from raytf.errors import RaytfError
from raytf.parallel import assigned, joined_state, local_sgd
from raytf.parallel import step as step_module


def _averaged_variables(model) -> list:
    """Floating-point state that workers update from their own rows, such as moving statistics."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in step_module.step_variables(model) if id(v) not in metrics]


def synchronize(model):
    """Averages moving statistics over workers and returns [(metric variable, global value)]: one collective a dtype."""
    return _totals(model, assign=True)[0]


def _totals(model, assign: bool) -> tuple[list, list]:
    """([(metric variable, global value)], [(moving statistic, its mean over workers)]), which are assigned or not."""
    strategy = model.distribute_strategy
    metrics = [v for v in model.metrics_variables if tf.as_dtype(v.dtype) in exchange.SUMMABLE]
    averaged = [*_averaged_variables(model), *local_sgd.averaged_at_ends(model)]
    key = [assign, *(id(v) for v in (*metrics, *averaged))]
    functions = model.__dict__.setdefault("_raytf_synchronize", {})
    known, function = functions.get(assign, (None, None))
    if known != key:
        function = _synchronize_function(strategy, metrics, averaged, assign)
        functions[assign] = (key, function)
    with activity.here.meeting(activity.COLLECTIVE):
        totals, means = function()
    return list(zip(metrics, totals, strict=True)), list(zip(averaged, means, strict=True))


def standing(model, logs, assign: bool) -> tuple[list[list[np.ndarray]], list, dict]:
    """Where an epoch stands after some of its steps; every worker calls it at the same step.

    Args:
        model: a model in `fit`.
        logs: what the last step returned here.
        assign: give moving statistics their mean over workers, as at the end of an epoch.

    Returns:
        The variables of each metric over the rows of all workers, for `go_on`; [(moving statistic, its mean)], where
        they were not assigned; and the logs that the epoch would have, were this its last step.
    """
    own = [list(metric.variables) for metric in model.metrics]
    if not many_replicas(model.distribute_strategy):
        return [[np.asarray(v) for v in its] for its in own], [], dict(keras_objects.epoch_logs(model, logs))
    totals, means = _totals(model, assign)
    local, rows = model.__dict__.get("_raytf_last", (logs, 1))
    known = {id(v): np.asarray(total) for v, total in totals}
    values = [[known[id(v)] if id(v) in known else _chiefs_own(model, v) for v in its] for its in own]
    return values, [] if assign else means, _logs(model, local, rows, totals)


def together(
    model, variables: Sequence, each: Sequence[Sequence[np.ndarray]], behind: Collection[int] = ()
) -> list[np.ndarray]:
    """What workers would have together, as at the end of an epoch; for one that cannot reach the others.

    Args:
        model: a model in `fit`, with one replica a worker.
        variables: metrics', moving statistics and others.
        each: their values on each worker, by rank.
        behind: ranks whose values are those of a step before.

    Returns:
        Sums of metrics, means of moving statistics, and of all else the values of the first worker that is not behind.
    """
    counted = {id(v) for v in model.metrics_variables if tf.as_dtype(v.dtype) in exchange.SUMMABLE}
    averaged = {id(v) for v in _averaged_variables(model)}
    first = next(rank for rank in range(len(each)) if rank not in behind)
    found = []
    for variable, *values in zip(variables, *each, strict=True):
        once = variable.aggregation in ("only_first_replica", "none")
        if id(variable) in averaged:
            whole = sum(np.asarray(wide(tf.convert_to_tensor(value))) for value in values)
            found.append((whole / len(values)).astype(values[0].dtype))
        elif id(variable) in counted and not once:
            whole = sum(values)
            found.append((whole / len(values) if variable.aggregation == "mean" else whole).astype(values[0].dtype))
        else:
            found.append(values[0 if id(variable) in counted else first])
    return found


def logs_of(model, values: Mapping[int, np.ndarray]) -> dict[str, float]:
    """The logs that the epoch would have, were its last step the last one; for a worker that cannot reach the others.

    Args:
        model: in `fit`.
        values: of the metrics' variables, by their ids, over the rows of all workers.

    Raises:
        RaytfError: a `train_step` of the user's returns something else, of which each worker knows its own.
    """
    last_logs(model, model.__dict__["_raytf_last"])  # raises where they are others
    pairs = [(v, tf.convert_to_tensor(values[id(v)])) for v in model.metrics_variables]
    with keras.StatelessScope(state_mapping=pairs):
        return {name: float(value) for name, value in model.get_metrics_result().items()}


def _chiefs_own(model, variable) -> np.ndarray:
    """The value of a variable that cannot be summed, in this process; a read from outside would sum it."""
    strategy = model.distribute_strategy
    value = strategy.run(lambda: tf.identity(variable.value))
    return np.asarray(strategy.experimental_local_results(value)[0])


def described(model) -> list[str]:
    """What tells a model's metrics from others: classes, and names without the number that Keras counts up."""

    def told(metric) -> str:
        within = [told(each) for each in getattr(metric, "metrics", ())]
        return f"{type(metric).__name__} {re.sub(r'_[0-9]+$', '', metric.name)}" + (f" {within}" if within else "")

    return [told(metric) for metric in model.metrics]


def go_on(model, values: Sequence[Sequence[np.ndarray]], names: Sequence[str]) -> list[int]:
    """Gives metrics that were reset what `standing` said, so that sums over any number of workers go on from there.

    The first replica gets sums, and the others keep what they were reset to; means, and what counts once, all get.

    Args:
        model: in `fit`, at the beginning of an epoch.
        values: of each metric; the last ones may be left out where they have no variables.
        names: what `described` gave.

    Returns:
        The places of metrics that have no variables yet, as these are made with the first step; see `add`.

    Raises:
        ValueError: the model has other metrics.
    """
    metrics, mine = list(model.metrics), described(model)
    if mine != list(names) or len(metrics) < len(values):
        raise ValueError(f"{', '.join(mine)}, after {', '.join(names)}")
    late, pairs = [], []
    for i, metric in enumerate(metrics):
        own, its = list(metric.variables), values[i] if i < len(values) else []
        if its and not own:
            late.append(i)
        elif [v.shape for v in its] != [tuple(v.shape) for v in own]:
            raise ValueError(f"a metric {metric.name!r} with other variables")
        else:
            pairs += zip(own, its, strict=True)
    _replace(model, pairs, added=False)
    return late


def add(model, values: Mapping[int, Sequence[np.ndarray]]) -> None:
    """Adds to metrics that were made by the first step what they had summed before; see `go_on`."""
    metrics = list(model.metrics)
    _replace(model, [p for i, its in values.items() for p in zip(metrics[i].variables, its, strict=True)], added=True)


def _replace(model, pairs: Sequence[tuple], added: bool) -> None:
    strategy = model.distribute_strategy
    if not many_replicas(strategy):
        for variable, value in pairs:
            variable.assign(variable.value + value if added else value)
        return
    shared = [(v, value) for v, value in pairs if step_module.is_shared(v)]
    for variable, value in shared:
        variable.assign(variable.value + value if added else value)
    each = [(v, value) for v, value in pairs if not step_module.is_shared(v)]

    def replica():
        first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        for variable, value in each:
            before = tf.convert_to_tensor(variable.value)
            total = tf.cast(value, before.dtype)
            summed = variable.aggregation == "sum" and before.dtype in exchange.SUMMABLE
            if added:
                total = before + total
            elif summed:  # what the others were reset to, too
                total = total - before * tf.cast(strategy.num_replicas_in_sync - 1, before.dtype)
            variable.assign(tf.where(first, total, before) if summed else total)

    if each:
        tf.function(lambda: strategy.run(replica), autograph=False)()


def last_logs(model, last: tuple) -> tuple[dict[str, float], int]:
    """What a step returned here, by the names of metrics, for a worker that has not made it.

    Args:
        model: in `fit`.
        last: (logs, rows) of the step, as the model's execution has noted them.

    Raises:
        RaytfError: a `train_step` of the user's returns something else, which is another worker's own.
    """
    logs, rows = last
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    with keras.StatelessScope(state_mapping=zeros):  # a read would sum them over workers
        names = list(model.get_metrics_result())
    if not isinstance(logs, dict) or set(logs) != set(names):
        raise RaytfError("the logs of its last step were its own")
    return dict.fromkeys(names, 0.0), int(rows)


def finish_logs(model, logs: Mapping) -> None:
    """Has an epoch whose steps were all made before end with the logs that `standing` gave after the last of them."""
    model.__dict__["_raytf_logs"] = dict(logs)


def _is_read_as_a_sum(held) -> bool:
    return getattr(held, "synchronization", None) == tf.VariableSynchronization.ON_READ


@patch((backend_core.Variable, "_direct_assign"))
def direct_assign(original, self, value):
    """`Variable._direct_assign`; under CentralStorageStrategy, where replicas share variables, each changes its part.

    Keras' metrics write what they read and something more, and TensorFlow adds what all replicas write, so that what
    was there before counted once for each of them. What is no sum becomes the mean. A replica without rows changes
    nothing.
    """
    assigned.tell(self)
    held = keras_objects.held_by(self)
    written = getattr(step_module.state, "written", None)
    if written is not None and not getattr(step_module.state, "reduced", False):
        written[id(self)] = self
    if tf.distribute.in_cross_replica_context() and _is_read_as_a_sum(held):
        # with a read of it, which nobody asks for, all workers would meet for each variable of each metric
        held.assign(tf.cast(value, held.dtype), read_value=False)
        return
    if tf.distribute.in_cross_replica_context():
        original(self, value)
        return
    if not step_module.is_shared(self):
        if not joined_state.assigned(self, value):
            original(self, value)
        return
    before = tf.convert_to_tensor(held)
    value = tf.cast(value, before.dtype)
    step = step_module.current()
    if step is not None:
        value = joined_state.of_shared(step, self, before, value)
    if self.aggregation == "sum":
        held.assign_add(value - before)
    elif self.aggregation == "none":
        tf.distribute.get_replica_context().merge_call(functools.partial(_assign_mean, held), args=(value,))
    else:
        original(self, value)


def _assign_mean(variable, strategy, value):
    local = strategy.experimental_local_results(value)
    return variable.get().assign(tf.reduce_mean(tf.stack(local), 0) if local[0].dtype.is_floating else local[0])


def _synchronize_function(strategy, metrics, averaged, assign):
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
        means = [
            tf.cast(value / tf.cast(replicas, value.dtype), variable.dtype)
            for variable, value in zip(averaged, summed[len(metrics) :], strict=True)
        ]
        for variable, value in zip(averaged, means, strict=True) if assign else ():
            with step_module.within(inline_merge=local_replicas(strategy) == 1):
                variable.assign(value)
        totals = summed[: len(metrics)]
        return [
            t / tf.cast(replicas, t.dtype) if v.aggregation == "mean" and not step_module.is_shared(v) else t
            for v, t in zip(metrics, totals, strict=True)
        ], means

    @tf.function(autograph=False)
    def synchronize():
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], strategy.run(replica))

    return synchronize


def global_logs(model, logs, rows):
    """The logs that one process would have: from global metrics, or the mean over rows of what a step returned."""
    return _logs(model, logs, rows, synchronize(model))


def _logs(model, logs, rows, totals):
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
    """Logs of an epoch are those of all workers' rows; of one that had no steps left, those of the steps before."""
    known = self.__dict__.pop("_raytf_logs", None)
    if known is not None:
        return known
    if not many_replicas(self.distribute_strategy):
        return original(self, logs)
    local, rows = self.__dict__.get("_raytf_last", (logs, 1))
    return global_logs(self, local, rows)
