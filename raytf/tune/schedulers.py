"""Ray's schedulers, for which NaN is the worst value, and its synchronous HyperBand without its endless waits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import numpy as np
from ray.tune import schedulers
from ray.tune.experiment import Trial
from ray.tune.schedulers import HyperBandScheduler, TrialScheduler

from raytf.compat import ray_tune
from raytf.compat.patching import overrides, patched, replacing


class HyperBand(HyperBandScheduler):
    """Halves or ends a bracket only once its trials are paused and no checkpoint is being saved.

    Ray's class (2.60) does so at the last trial's report, which has two defects. A trial about to pause is not ended
    with a finished bracket, or its last checkpoint does not count. After a bracket's first halving, an error in the
    last awaited trial leaves the others paused.
    """

    @overrides(HyperBandScheduler)
    def _process_bracket(self, tune_controller, bracket) -> str:
        if any(trial.is_saving for trial in bracket.current_trials()):
            return TrialScheduler.PAUSE
        return super()._process_bracket(tune_controller, bracket)

    def choose_trial_to_run(self, tune_controller):
        for bracket in ray_tune.brackets_of(self):
            trials = bracket.current_trials()
            waits = all(t.status == Trial.PAUSED and t not in bracket.trials_to_unpause for t in trials)
            if trials and waits and bracket.cur_iter_done():
                self._process_bracket(tune_controller, bracket)
        return super().choose_trial_to_run(tune_controller)


def with_fixed_hyperband(scheduler: HyperBandScheduler) -> HyperBandScheduler:
    """Returns a `HyperBand` with the settings of a HyperBandScheduler; returns a user's subclass unchanged."""
    if type(scheduler) is not HyperBandScheduler:
        return scheduler
    scheduler = copy.copy(scheduler)
    scheduler.__class__ = HyperBand
    return scheduler


@contextlib.contextmanager
def nan_is_worst(metric: str, mode: str) -> Iterator[None]:
    """Ranks a trial whose metric is NaN or infinite last, until the context ends.

    Ray's schedulers (2.60) never stop such a trial. HyperBand sorts by the metric, which has no order with NaN.

    Args:
        metric: Name of the metric.
        mode: "min" or "max".
    """
    worst = float(np.finfo(np.float32).max) * (1 if mode == "min" else -1)

    def with_number(original, scheduler, controller, trial, result):
        if metric in result and not np.isfinite(result[metric]):
            result = {**result, metric: worst}
        return original(scheduler, controller, trial, result)

    with contextlib.ExitStack() as ends:
        for kind in {kind for kind in vars(schedulers).values() if isinstance(kind, type)}:
            for name in {"on_trial_result", "on_trial_complete"} & vars(kind).keys():
                ends.enter_context(patched(kind, name, replacing(vars(kind)[name], with_number)))
        yield
