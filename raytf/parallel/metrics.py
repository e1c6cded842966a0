"""Metrics and moving statistics with several workers.

They are local during an epoch, and joined at its end or for a checkpoint within it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from raytf import activity
from raytf.collectives import exchange
from raytf.collectives.communicator import all_sum, local_replicas, many_replicas, wide
from raytf.compat import keras_objects
from raytf.compat.keras import backend_core, backend_trainer
from raytf.compat.patching import patch
from raytf.compat.tensorflow import separate_function
from raytf.errors import RaytfError
from raytf.parallel import assigned, joined_state, local_sgd, step_logs, whole_batch
from raytf.parallel import step as step_module


def _averaged_variables(model) -> list:
    """Returns floating-point state that workers update from their own rows, such as moving statistics."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in step_module.step_variables(model) if id(v) not in metrics]


def synchronize(model):
    """Averages moving statistics over workers and returns [(metric variable, global value)]: one collective a dtype."""
    return _totals(model, assign=True)[0]


def _totals(model, assign: bool) -> tuple[list, list]:
    """Returns ([(metric variable, global value)], [(moving statistic, mean over workers)]); may assign the means."""
    strategy = model.distribute_strategy
    metrics = [v for v in model.metrics_variables if tf.as_dtype(v.dtype) in exchange.SUMMABLE]
    averaged = [*_averaged_variables(model), *local_sgd.averaged_at_ends(model)]
    key = [assign, *(id(v) for v in (*metrics, *averaged))]
    functions = model.__dict__.setdefault("_raytf_synchronize", {})
    known, function = functions.get(assign, (None, None))
    if known != key:
        function = _synchronize_function(strategy, metrics, averaged, assign)
        functions[assign] = (key, function)
    with activity.tracker.collective(activity.COLLECTIVE):
        totals, means = function()
    return list(zip(metrics, totals, strict=True)), list(zip(averaged, means, strict=True))


def collect_metrics(model, logs, assign: bool) -> tuple[list[list[np.ndarray]], list, dict]:
    """Returns the state of an epoch after some of its steps; every worker calls it at the same step.

    Args:
        model: A model in `fit`.
        logs: Result of the last step on this worker.
        assign: Whether to assign moving statistics their mean over workers, as at the end of an epoch.

    Returns:
        A tuple of three. The first has the variables of each metric over the rows of all workers, for `restore_sums`.
        The second is [(moving statistic, its mean)], if they were not assigned. The third has the logs of the epoch, if
        this were its last step.
    """
    variable_groups = [list(metric.variables) for metric in model.metrics]
    if not many_replicas(model.distribute_strategy):
        return (
            [[np.asarray(v) for v in group] for group in variable_groups],
            [],
            dict(keras_objects.epoch_logs(model, logs)),
        )
    totals, means = _totals(model, assign)
    local, rows = model.__dict__.get("_raytf_last", (logs, 1))
    sums = {id(v): np.asarray(total) for v, total in totals}
    values = [[sums[id(v)] if id(v) in sums else _local_value(model, v) for v in group] for group in variable_groups]
    return values, [] if assign else means, _logs(model, local, rows, totals, epoch=True)


def merge_states(
    model, variables: Sequence, worker_values: Sequence[Sequence[np.ndarray]], older: Collection[int] = ()
) -> list[np.ndarray]:
    """Returns the joined values of all workers, as at an epoch's end, if a worker cannot reach the others.

    Args:
        model: A model in `fit`, with one replica for each worker.
        variables: Variables of metrics, moving statistics and others.
        worker_values: Their values on each worker, by rank.
        older: Ranks whose values are one step older.

    Returns:
        Sums of metrics, means of moving statistics, and for others the values of the first worker not in `older`.
    """
    counted = {id(v) for v in model.metrics_variables if tf.as_dtype(v.dtype) in exchange.SUMMABLE}
    averaged = {id(v) for v in _averaged_variables(model)}
    first = next(rank for rank in range(len(worker_values)) if rank not in older)
    joined = []
    for variable, *values in zip(variables, *worker_values, strict=True):
        counts_once = variable.aggregation in ("only_first_replica", "none")
        if id(variable) in averaged:
            whole = sum(np.asarray(wide(tf.convert_to_tensor(value))) for value in values)
            joined.append((whole / len(values)).astype(values[0].dtype))
        elif id(variable) in counted and not counts_once:
            whole = sum(values)
            joined.append((whole / len(values) if variable.aggregation == "mean" else whole).astype(values[0].dtype))
        else:
            joined.append(values[0 if id(variable) in counted else first])
    return joined


def logs_of(model, values: Mapping[int, np.ndarray]) -> dict[str, float]:
    """Returns the epoch's logs as if the last step ended it, for a worker that cannot reach the others.

    Args:
        model: A model in `fit`.
        values: Values of the metrics' variables over the rows of all workers, by the variables' ids.

    Raises:
        RaytfError: A user's `train_step` returns other values, which are local to each worker.
    """
    last_logs(model, model.__dict__["_raytf_last"])  # raises if the logs have other values
    pairs = [(v, tf.convert_to_tensor(values[id(v)])) for v in model.metrics_variables]
    with keras.StatelessScope(state_mapping=pairs):
        return {name: float(value) for name, value in model.get_metrics_result().items()}


def _local_value(model, variable) -> np.ndarray:
    """Returns this process's value of a variable that cannot be summed; a read outside of a replica would sum it."""
    strategy = model.distribute_strategy
    value = strategy.run(lambda: tf.identity(variable.value))
    return np.asarray(strategy.experimental_local_results(value)[0])


def described(model) -> list[str]:
    """Returns a description of a model's metrics: classes, and names without the number that Keras increments."""

    def describe(metric) -> str:
        parts = [describe(part) for part in getattr(metric, "metrics", ())]
        return f"{type(metric).__name__} {re.sub(r'_[0-9]+$', '', metric.name)}" + (f" {parts}" if parts else "")

    return [describe(metric) for metric in model.metrics]


def restore_sums(model, values: Sequence[Sequence[np.ndarray]], names: Sequence[str]) -> list[int]:
    """Restores reset metrics from the values of `collect_metrics`, so that sums over any number of workers continue.

    The first replica gets the sums, and the others keep the values of the reset. All get means, and values that count
    once.

    Args:
        model: A model in `fit`, at the beginning of an epoch.
        values: Variables of each metric; the last metrics may be omitted if they have no variables.
        names: Result of `described`.

    Returns:
        The indices of metrics without variables, which are built with the first step; see `add`.

    Raises:
        ValueError: The model has other metrics.
    """
    metrics, description = list(model.metrics), described(model)
    if description != list(names) or len(metrics) < len(values):
        raise ValueError(f"{', '.join(description)}, after {', '.join(names)}")
    unbuilt, pairs = [], []
    for i, metric in enumerate(metrics):
        variables, saved = list(metric.variables), values[i] if i < len(values) else []
        if saved and not variables:
            unbuilt.append(i)
        elif [v.shape for v in saved] != [tuple(v.shape) for v in variables]:
            raise ValueError(f"a metric {metric.name!r} with other variables")
        else:
            pairs += zip(variables, saved, strict=True)
    _replace(model, pairs, added=False)
    return unbuilt


def add(model, values: Mapping[int, Sequence[np.ndarray]]) -> None:
    """Adds earlier sums to metrics that were built by the first step; see `restore_sums`."""
    metrics = list(model.metrics)
    _replace(
        model, [p for i, saved in values.items() for p in zip(metrics[i].variables, saved, strict=True)], added=True
    )


def _replace(model, pairs: Sequence[tuple], added: bool) -> None:
    strategy = model.distribute_strategy
    if not many_replicas(strategy):
        for variable, value in pairs:
            variable.assign(variable.value + value if added else value)
        return
    shared = [(v, value) for v, value in pairs if step_module.is_shared(v)]
    for variable, value in shared:
        variable.assign(variable.value + value if added else value)
    local = [(v, value) for v, value in pairs if not step_module.is_shared(v)]

    def replica():
        first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        for variable, value in local:
            old = tf.convert_to_tensor(variable.value)
            total = tf.cast(value, old.dtype)
            summed = variable.aggregation == "sum" and old.dtype in exchange.SUMMABLE
            if added:
                total = old + total
            elif summed:  # subtracts the reset values of the other replicas
                total = total - old * tf.cast(strategy.num_replicas_in_sync - 1, old.dtype)
            variable.assign(tf.where(first, total, old) if summed else total)

    if local:
        separate_function(lambda: strategy.run(replica), autograph=False)()


def last_logs(model, last: tuple) -> tuple[dict[str, float], int]:
    """Returns the last step's (logs by metric name, with zeros; number of rows), for a worker without that step.

    Args:
        model: A model in `fit`.
        last: (logs, rows) of the step, as recorded by the model's execution.

    Raises:
        RaytfError: A user's `train_step` returns other values, which are local to another worker.
    """
    logs, rows = last
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    with keras.StatelessScope(state_mapping=zeros):  # avoids a read, which would sum them over workers
        names = list(model.get_metrics_result())
        trace, variables = step_logs.notes_of(model).last_trace, _variables_of_names(model)
    if not isinstance(logs, dict) or step_logs.by_metrics(trace, logs, variables) != set(names):
        raise RaytfError("the logs of the last step are no metrics: each worker has its own")
    return dict.fromkeys(names, 0.0), int(rows)


def finish_logs(model, logs: Mapping) -> None:
    """Makes an epoch without remaining steps end with the logs that `collect_metrics` returned after its last step."""
    model.__dict__["_raytf_logs"] = dict(logs)


def _is_read_as_a_sum(tf_variable) -> bool:
    return getattr(tf_variable, "synchronization", None) == tf.VariableSynchronization.ON_READ


@patch((backend_core.Variable, "_direct_assign"))
def direct_assign(original, self, value):
    """Replaces `Variable._direct_assign`: with CentralStorageStrategy, each replica adds its part to shared variables.

    Keras' metrics write their old value plus a change. TensorFlow adds the writes of all replicas, so the old value
    would count once for each of them. Values other than sums become the mean. A replica without rows changes nothing.
    """
    assigned.note_assignment(self)
    tf_variable = keras_objects.variable_of(self)
    shown, whole = step_logs.seen(), whole_batch.current_context()
    if shown is not None:
        shown.written.add(id(self))
    if whole is not None and self.aggregation == "sum" and _is_read_as_a_sum(tf_variable):
        old = tf.convert_to_tensor(tf_variable)
        value = tf.where(whole.counts, tf.cast(value, old.dtype), old)
    written = getattr(step_module.state, "written", None)
    if written is not None and not getattr(step_module.state, "reduced", False):
        written[id(self)] = self
    if tf.distribute.in_cross_replica_context() and _is_read_as_a_sum(tf_variable):
        # a read, which is not needed, would be a collective for each variable of each metric
        tf_variable.assign(tf.cast(value, tf_variable.dtype), read_value=False)
        return
    if tf.distribute.in_cross_replica_context():
        original(self, value)
        return
    if step_module.is_shared(self) and not step_module.in_replica_of_many():
        original(self, value)  # Keras resets metrics out of any scope: what is NaN would stay that by a difference
        return
    if not step_module.is_shared(self):
        if not joined_state.assigned(self, value):
            original(self, value)
        return
    old = tf.convert_to_tensor(tf_variable)
    value = tf.cast(value, old.dtype)
    step = step_module.current()
    if step is not None:
        value = joined_state.of_shared(step, self, old, value)
    if self.aggregation == "sum":
        tf_variable.assign_add(value - old)
    elif self.aggregation == "none":
        tf.distribute.get_replica_context().merge_call(functools.partial(_assign_mean, tf_variable), args=(value,))
    else:
        original(self, value)


def _assign_mean(variable, strategy, value):
    local = strategy.experimental_local_results(value)
    return variable.get().assign(tf.reduce_mean(tf.stack(local), 0) if local[0].dtype.is_floating else local[0])


def _synchronize_function(strategy, metrics, averaged, assign):
    def replica():
        values = [tf.convert_to_tensor(variable.value) for variable in metrics]
        wider = [wide(tf.convert_to_tensor(variable.value)) for variable in averaged]
        totals, summed = _summed(metrics, values, wider)
        replicas = strategy.num_replicas_in_sync
        means = [
            tf.cast(value / tf.cast(replicas, value.dtype), variable.dtype)
            for variable, value in zip(averaged, summed, strict=True)
        ]
        for variable, value in zip(averaged, means, strict=True) if assign else ():
            with step_module.override_state(inline_merge=local_replicas(strategy) == 1):
                variable.assign(value)
        return totals, means

    def synchronize():
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], strategy.run(replica))

    return separate_function(synchronize, autograph=False)


def _summed(metrics: Sequence, values: Sequence[tf.Tensor], others: Sequence[tf.Tensor] = ()) -> tuple[list, list]:
    """Returns (the values of metrics' variables over all replicas, the sums of others), in a replica."""
    context = tf.distribute.get_replica_context()
    first = tf.equal(context.replica_id_in_sync_group, 0)
    local = [
        tf.where(first, value, tf.zeros_like(value)) if _counts_once(variable) else value
        for variable, value in zip(metrics, values, strict=True)
    ]
    summed = all_sum([*local, *others]) if (local or others) else []
    replicas = context.num_replicas_in_sync
    totals = [
        t / tf.cast(replicas, t.dtype) if v.aggregation == "mean" and not step_module.is_shared(v) else t
        for v, t in zip(metrics, summed, strict=False)
    ]
    return totals, summed[len(local) :]


def _counts_once(variable) -> bool:
    return step_module.is_shared(variable) or variable.aggregation in ("only_first_replica", "none")


# -------------------------------------------------------------------------------------------------- in a step


def result(metric, original):
    """Replaces `Metric.result` in a step: records the metric of each result; in eager mode it covers all rows."""
    shown, step = step_logs.seen(), step_module.current()
    if shown is None:
        return original()
    value = original()
    if step is not None and tf.executing_eagerly():
        value = _over_all_rows(metric, step, shown, original)
    flat = value.items() if isinstance(value, dict) else [(None, value)]
    for key, part in flat:
        shown.results[id(part)] = part, step_logs.Origin(metric, key)
    return value


def before_step(model, shown: step_logs.StepObservations) -> None:
    """Saves the values of metrics before a step in which this replica may have no rows."""
    step = step_module.current()
    if step is not None and step.partial:
        shown.initial_values = {id(v): tf.identity(v.value) for v in model.metrics_variables}


def result_in_step(origin: step_logs.Origin) -> tf.Tensor:
    """Returns a metric's result over the rows of all replicas, in a step, after its updates."""
    metric = origin.metric
    value = _over_all_rows(metric, step_module.current(), step_logs.seen(), metric.result)
    return value if origin.key is None else value[origin.key]


def _over_all_rows(metric, step: step_module.Step, shown: step_logs.StepObservations, function):
    variables = [v for v in metric.variables if tf.as_dtype(v.dtype) in exchange.SUMMABLE]
    values = [tf.convert_to_tensor(v.value) for v in variables]
    values = [
        tf.where(step.rows > 0, value, shown.initial_values[id(v)])
        if id(v) in shown.initial_values and not step.is_complete(v)
        else value
        for v, value in zip(variables, values, strict=True)
    ]
    totals, _ = _summed(variables, values)
    with (
        step_module.override_state(seen=None),
        keras.StatelessScope(state_mapping=list(zip(variables, totals, strict=True))),
    ):
        return _values_of(function())


def _values_of(results):
    """Returns a nest of results with the values of variables: those of the scope in which it is called."""
    read = lambda value: tf.convert_to_tensor(value.value) if isinstance(value, keras.Variable) else value
    return tree.map_structure(read, results)


# ---------------------------------------------------------------------------------------------------- of logs


def global_logs(model, logs, rows, epoch: bool = False):
    """Returns the logs that one process would have for an execution of steps or an epoch; see `step_logs`."""
    return _logs(model, logs, rows, synchronize(model), epoch)


def _logs(model, logs, rows, totals, epoch: bool):
    trace = step_logs.notes_of(model).last_trace
    logs = logs if isinstance(logs, dict) else {}
    with keras.StatelessScope(state_mapping=[(v, tf.convert_to_tensor(t)) for v, t in totals]):
        results = _values_of(dict(model.get_metrics_result()))
        named = set()
        if epoch or all(origin.metric is not None for origin in trace.origins):
            named = step_logs.by_metrics(trace, logs, _variables_of_names(model))
        if named == set(results) == set(logs):
            return results
        whole = step_logs.of_all_workers(model.distribute_strategy, logs, rows, trace, _result_of)
        return whole | {name: results[name] for name in named}


def _result_of(origin: step_logs.Origin):
    value = _values_of(origin.metric.result())
    return value if origin.key is None else value[origin.key]


def _variables_of_names(model) -> dict[str, list]:
    """Returns the variables of each metric result, by the name of the result."""
    variables = {}
    for metric in model.metrics:
        value = metric.result()
        variables |= dict.fromkeys(value if isinstance(value, dict) else [metric.name], metric.variables)
    return variables


@patch((backend_trainer.TensorFlowTrainer, "_get_metrics_result_or_logs"))
def get_metrics_result_or_logs(original, self, logs):
    """Returns an epoch's logs over the rows of all workers; for an epoch without remaining steps, the saved logs."""
    known = self.__dict__.pop("_raytf_logs", None)
    if known is not None:
        return known
    if not many_replicas(self.distribute_strategy):
        results, notes = original(self, logs), step_logs.notes_of(self)
        values = _values_of(results)  # the next validation would change variables
        if results is logs or notes.last is None:
            return values
        named = step_logs.by_metrics(notes.last_trace, logs, _variables_of_names(self))
        return {name: values[name] if name in named else value for name, value in logs.items()}
    local, rows = self.__dict__.get("_raytf_last", (logs, 1))
    return global_logs(self, local, rows, epoch=True)
