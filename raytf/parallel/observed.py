"""Runs a user's `train_step` or `test_step` with raytf's replacements of the model's functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from raytf.collectives.communicator import many_replicas
from raytf.compat.keras import compile_utils
from raytf.compat.patching import patched_of
from raytf.parallel import compiled_call, losses, metric_updates, metrics, model_optimizers, row_sums, step_logs
from raytf.parallel import step as step_module


def step_of(model, function: Callable, training: bool) -> Callable:
    """Returns a model's step that records the origin of its logs, and computes functions that compare rows on all rows.

    Args:
        model: The model of the step.
        function: `train_step` or `test_step` of the model.
        training: Whether it is the train step.
    """
    notes = step_logs.notes_of(model)
    many = many_replicas(model.distribute_strategy)
    function = _without_graph(function) if many else function
    if training in notes.traces:  # made again, as a callback may have changed what the user's functions do
        notes.trials.clear()

    @functools.wraps(function)
    def step(data):
        shown = step_logs.StepObservations(notes)
        shown.sums = row_sums.RowSums.create(model, data) if many and training else None
        with contextlib.ExitStack() as stack, step_module.override_state(seen=shown):
            for metric in metrics_of(model):
                stack.enter_context(patched_of(metric, "result", functools.partial(metrics.result, metric)))
                if many and metric_updates.may_compare(metric):
                    update = functools.partial(metric_updates.update_state, metric)
                    stack.enter_context(patched_of(metric, "update_state", update))
                elif many and type(metric) is keras.metrics.Sum:
                    named = model.__dict__.setdefault("_raytf_named", set())
                    add = functools.partial(metric_updates.update_sum, metric, named)
                    stack.enter_context(patched_of(metric, "update_state", add))
            if many and model_optimizers.is_own(model, "compute_loss"):
                compute = functools.partial(losses.compute_loss, model)
                stack.enter_context(patched_of(model, "compute_loss", compute))
            if many and compiled_call.is_due(model):
                stack.enter_context(patched_of(model, "call", functools.partial(compiled_call.call, model)))
            metrics.before_step(model, shown)
            outputs = function(data)
            outputs, origins = step_logs.resolved(outputs, shown, metrics.result_in_step)
        notes.traces[training] = step_logs.StepTrace(origins, frozenset(shown.written))
        return outputs

    return step


def _without_graph(function: Callable) -> Callable:
    """Returns the Python function of a user's `tf.function`, for the step's graph, with AutoGraph as it had.

    In a graph of its own it would keep tensors of the step's first trace. Its logs would be copies without origin.
    """
    inner = getattr(function, "python_function", None)
    autograph = tf.__internal__.autograph
    return function if inner is None else autograph.tf_convert(inner, autograph.control_status_ctx())


def metrics_of(model) -> Iterator:
    """Yields the metrics of a model; those of `compile` one by one."""
    for metric in model.metrics:
        yield from metric.metrics if isinstance(metric, compile_utils.CompileMetrics) else [metric]
