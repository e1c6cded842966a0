"""HyperBand driven by hand, as races cannot be scripted in a real sweep: Ray's trials, and what Tune does to them."""

from __future__ import annotations

import pytest
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import HyperBandScheduler, TrialScheduler

from raytf.tune import space
from raytf.tune.schedulers import nan_is_worst


class Controller:
    """Tune's part of it: states of trials, and the scheduler's verdicts carried out."""

    def __init__(self, scheduler, trials):
        self.scheduler, self.trials = scheduler, [Trial("trial", trial_id=str(n), stub=True) for n in range(trials)]
        scheduler.set_search_properties("loss", "min")
        for trial in self.trials:
            scheduler.on_trial_add(self, trial)
            trial.set_status(Trial.RUNNING)

    def stop_trial(self, trial):
        assert not trial.is_saving, "its last checkpoint would be lost"
        trial.set_status(Trial.TERMINATED)
        self.scheduler.on_trial_remove(self, trial)

    def report(self, number, step, loss=1.0):
        """A trial's report; one that is to pause saves first, until `saved`."""
        trial = self.trials[number]
        action = self.scheduler.on_trial_result(self, trial, {"training_iteration": step, "loss": loss})
        if action == TrialScheduler.PAUSE:
            trial.temporary_state.saving_to = object()
        elif action == TrialScheduler.STOP:
            trial.set_status(Trial.TERMINATED)
            self.scheduler.on_trial_complete(self, trial, {})

    def saved(self, number):
        self.trials[number].temporary_state.saving_to = None
        self.trials[number].set_status(Trial.PAUSED)

    def fail(self, number):
        self.trials[number].set_status(Trial.ERROR)
        self.scheduler.on_trial_error(self, self.trials[number])

    def states(self):
        """States after Tune has asked for trials to run, until there are none."""
        while (trial := self.scheduler.choose_trial_to_run(self)) is not None:
            trial.set_status(Trial.RUNNING)
        return [trial.status for trial in self.trials]


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)])
def test_a_bracket_ends_while_a_trial_is_being_saved(first, second):
    sweep = Controller(space.make_scheduler("hyperband", {}, 4), 2)
    sweep.report(0, 4)
    sweep.report(1, 4)
    sweep.saved(first)
    sweep.saved(second)
    assert sweep.states() == [Trial.TERMINATED] * 2


def test_a_bracket_is_halved_once_all_are_saved():
    sweep = Controller(space.make_scheduler("hyperband", {}, 4), 4)
    sweep.report(2, 1, loss=1.0)
    sweep.report(3, 1, loss=2.0)
    assert sweep.states() == [Trial.RUNNING] * 4, "saving"
    sweep.saved(3)
    sweep.saved(2)
    assert sweep.states() == [Trial.RUNNING, Trial.RUNNING, Trial.RUNNING, Trial.TERMINATED]


def test_the_error_of_the_last_trial_of_a_bracket_ends_the_wait_for_it():
    sweep = Controller(space.make_scheduler(HyperBandScheduler(max_t=4, reduction_factor=2), {}, 4), 6)
    for number in (3, 4, 5):
        sweep.report(number, 2, loss=number)
        if sweep.trials[number].is_saving:
            sweep.saved(number)
    assert sweep.states()[3:] == [Trial.RUNNING, Trial.RUNNING, Trial.TERMINATED]
    sweep.report(3, 4)
    sweep.saved(3)
    sweep.fail(4)
    assert sweep.states()[3:] == [Trial.TERMINATED, Trial.ERROR, Trial.TERMINATED]


def test_a_scheduler_of_the_users_keeps_its_settings_and_class():
    class Own(HyperBandScheduler):
        pass

    given = HyperBandScheduler(max_t=8, reduction_factor=2)
    assert space.make_scheduler(given, {}, 4).__dict__ == given.__dict__
    assert type(given) is HyperBandScheduler
    assert type(space.make_scheduler(Own(), {}, 4)) is Own
    bohb = tune.schedulers.HyperBandForBOHB()
    assert space.make_scheduler(bohb, {}, 4) is bohb


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), float("-inf")])
def test_asha_stops_a_trial_whose_metric_is_no_number(lost):
    control = Controller(tune.schedulers.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=2), 2)
    with nan_is_worst("loss", "min"):
        control.report(0, 1, 0.5)
        control.report(1, 1, lost)
    assert [trial.status for trial in control.trials] == [Trial.RUNNING, Trial.TERMINATED]


@pytest.mark.parametrize(("losses", "ended"), [((float("nan"), 2.0), 2), ((2.0, float("nan")), 3)])
def test_hyperband_continues_with_trials_whose_metric_is_a_number(losses, ended):
    control = Controller(space.make_scheduler("hyperband", {}, 4), 4)
    with nan_is_worst("loss", "min"):
        for number, loss in zip((2, 3), losses, strict=True):
            control.report(number, 1, loss)
        for number in (2, 3):
            control.saved(number)
        states = control.states()
    assert [number for number, state in enumerate(states) if state == Trial.TERMINATED] == [ended]
