"""A user's `train_step` or `test_step` with what raytf looks at and replaces in the model's own functions meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from raytf.collectives.communicator import many_replicas
from raytf.compat.keras import compile_utils
from raytf.compat.patching import patched_of
from raytf.parallel import compiled_call, losses, metrics, step_logs
from raytf.parallel import step as step_module


def step_of(model, function: Callable, training: bool) -> Callable:
    """A step of a model that notes where its logs come from, and computes on all rows what compares rows.

    Args:
        model: of the step.
        function: its `train_step` or `test_step`.
        training: which of them.
    """
    notes = step_logs.notes_of(model)
    many = many_replicas(model.distribute_strategy)

    @functools.wraps(function)
    def step(data):
        shown = step_logs.StepObservations(notes)
        with contextlib.ExitStack() as within, step_module.within(seen=shown):
            for metric in _metrics_of(model):
                within.enter_context(patched_of(metric, "result", functools.partial(metrics.result, metric)))
                if many and metrics.may_compare(metric):
                    update = functools.partial(metrics.update_state, metric)
                    within.enter_context(patched_of(metric, "update_state", update))
            if many and losses.own_compute_loss(model):
                compute = functools.partial(losses.compute_loss, model)
                within.enter_context(patched_of(model, "compute_loss", compute))
            if many and compiled_call.is_due(model):
                within.enter_context(patched_of(model, "call", functools.partial(compiled_call.call, model)))
            metrics.before_step(model, shown)
            outputs = function(data)
            outputs, origins = step_logs.resolved(outputs, shown, metrics.result_in_step)
        notes.of[training] = step_logs.StepTrace(origins, frozenset(shown.written))
        return outputs

    return step


def _metrics_of(model) -> Iterator:
    """The metrics of a model; those that `compile` got one by one."""
    for metric in model.metrics:
        yield from metric.metrics if isinstance(metric, compile_utils.CompileMetrics) else [metric]
