"""What a group of workers does as a recovery ends: both kinds of groups have it from `healing.Recovery`. No Ray."""

import dataclasses

import pytest

from raytf.train import healing
from raytf.train.decisions import Decisions, Do, Lost, Phase, RunState


@dataclasses.dataclass
class Tried:
    """A `Healing` whose end a test says."""

    asked: object
    lost: frozenset
    generation: int
    healed: bool = False
    why: str = ""
    another: bool = False
    also: set = dataclasses.field(default_factory=set)
    new_lost: int = 0


@pytest.fixture
def recovery(monkeypatch):
    """One of four workers, of which three may be lost, and worker 1 is."""
    monkeypatch.setattr(healing, "Healing", Tried)
    state = RunState(workers=4, fewest=4, most=4, failures_left=3, recovers=True, phase=Phase.TRAINING)
    decisions = Decisions(state)
    made = healing.Recovery(decisions.take, lambda: "asked")
    made.decisions = decisions
    made.begin(decisions.take(Lost(frozenset({1}), frozenset())).ranks)
    return made


def test_one_that_ends_well_is_over(recovery):
    recovery.healing.healed = True
    tried, action = recovery.end()
    assert tried.lost == {1} and action.do is not Do.RECOVER and recovery.healing is None
    assert recovery.decisions.state.failures_left == 2 and recovery.decisions.state.phase is Phase.TRAINING


def test_one_that_loses_others_is_followed_by_one_for_all(recovery):
    recovery.healing.another, recovery.healing.also = True, {2}
    tried, action = recovery.end(frozenset({3}))
    assert action.do is Do.RECOVER and (tried.generation, recovery.healing.generation) == (1, 2)
    assert recovery.healing.lost == {1, 2, 3}


def test_one_that_cannot_be_done_is_followed_by_none(recovery):
    recovery.healing.why = "no node has room"
    tried, action = recovery.end()
    assert action.do is Do.RESTART and recovery.healing is None and not tried.healed


def test_workers_that_lost_each_other_form_a_ring_anew_or_are_told_why_not(recovery):
    recovery.healing.healed = True
    recovery.end()
    recovery.connect([])
    assert recovery.healing.lost == frozenset() and recovery.healing.generation == 2
