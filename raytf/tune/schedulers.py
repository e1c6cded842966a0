"""Ray's synchronous HyperBand, without its ways of waiting for ever."""

from __future__ import annotations

import copy

from ray.tune.experiment import Trial
from ray.tune.schedulers import HyperBandScheduler, TrialScheduler

from raytf.compat import ray_tune
from raytf.compat.patching import overrides


class HyperBand(HyperBandScheduler):
    """A bracket is halved, or ended, once its trials are paused, and not while the checkpoint of one is being saved.

    Ray's (2.60) does it at the last trial's report, and overlooks two things. A trial that is on its way to a pause at
    that moment is neither ended with a bracket that is finished, nor does its last checkpoint count where it is ended.
    After a bracket's first halving, the error of the last trial that it waits for leaves the others paused.
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


def mended(scheduler: HyperBandScheduler) -> HyperBandScheduler:
    """`HyperBand` with the settings of a user's HyperBandScheduler; of a class of the user's, the scheduler itself."""
    if type(scheduler) is not HyperBandScheduler:
        return scheduler
    scheduler = copy.copy(scheduler)
    scheduler.__class__ = HyperBand
    return scheduler
