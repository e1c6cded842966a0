"""What a group of workers does as a recovery ends. No Ray, and no processes."""

import dataclasses
import types

import pytest

from raytf.errors import PeerLostError
from raytf.runtime.failures import is_consequence
from raytf.train import group
from raytf.train.decisions import Decisions, Lost, Phase, RunState
from raytf.train.worker_group import WorkerGroup
from tests.logged import warnings_logged


class Tried:
    """A `RecoveryCoordinator` that ends at once, with the outcome of its arguments."""

    done = True

    def __init__(self, lost, generation, *, recovered=False, why="", another=False, also=(), new_lost=0):
        self.lost, self.generation, self.recovered, self.why, self.lost_another = (
            lost,
            generation,
            recovered,
            why,
            another,
        )
        self.also_lost, self.new_lost, self.saved_step, self.restart_point = (
            set(also),
            new_lost,
            None,
            "the last checkpoint",
        )
        self.new, self.gave_up = {}, False

    def give_up(self):
        self.gave_up = True


class Group(group.EventGroup):
    """A group of four workers, of which worker 1 is lost."""

    def __init__(self, state, ends):
        self._decisions, self.tried = Decisions(state), []
        self.config, self._hangs, self._generation = types.SimpleNamespace(hang_timeout_s=None), None, 0
        self._errors, self._answered_at, self._pending, self._joining, self._waits = {}, {}, {}, {}, {0}
        killed = types.SimpleNamespace(actor=None)
        self.members, self._ends = [killed] * 4, iter(ends)

    def heal(self, _, lost, generation):
        self.tried.append(Tried(lost, generation, **next(self._ends)))
        return self.tried[-1]


@pytest.fixture
def losing(monkeypatch):
    """Returns a function that makes a group, one of whose workers is lost, and three may be."""
    monkeypatch.setattr(group.ray, "kill", lambda actor: None)
    state = RunState(workers=4, fewest=4, most=4, failures_left=3, recovers=True, phase=Phase.TRAINING)

    def losing(*ends):
        made = Group(state, ends)
        monkeypatch.setattr(group, "RecoveryCoordinator", made.heal)
        made._recover(made._decisions.take(Lost(frozenset({1}))).ranks)
        return made

    return losing


def test_one_that_ends_well_is_over(losing):
    made = losing({"recovered": True})
    assert [tried.lost for tried in made.tried] == [{1}] and not made._waits
    assert made._decisions.state.failures_left == 2 and made._decisions.state.phase is Phase.TRAINING


def test_one_that_loses_others_is_followed_by_one_for_all(losing):
    made = losing({"another": True, "also": {2, 3}}, {"recovered": True})
    assert [(tried.lost, tried.generation) for tried in made.tried] == [({1}, 1), ({1, 2, 3}, 2)]


def test_one_that_cannot_be_done_is_followed_by_none(losing):
    with pytest.raises(group.LostGroupError) as lost:
        losing({"why": "no node has room"})
    assert lost.value.why == "no node has room"


def test_workers_that_lost_each_other_reconnect_the_ring(losing):
    made = losing({"recovered": True}, {"recovered": True})
    made._connect()
    assert made.tried[-1].lost == frozenset() and made.tried[-1].generation == 2
    assert made._decisions.state.failures_left == 1


def test_reconnection_that_fails_is_an_error_of_each_worker(losing):
    """All processes live, and none of them has sent an error yet."""
    made = losing({"recovered": True}, {"why": "the others are not in one step"})
    with pytest.raises(group.LostGroupError) as lost:
        made._connect()
    assert list(lost.value.errors) == [0, 1, 2, 3] and all(map(is_consequence, lost.value.errors.values()))


def test_group_whose_reconnection_failed_has_its_reason_alone():
    lost = group.LostGroupError({0: PeerLostError(0, "too slow"), 1: PeerLostError(1, "too slow")}, "too slow")
    error = object.__new__(WorkerGroup)._lost_group(lost)
    assert str(error) == "the workers could not be reconnected: too slow" and error.why_not_recovered is None


@pytest.mark.parametrize(
    "change, line",
    [
        ({}, "worker 1 was lost: it died. A replacement worker is started; the other workers wait in their step"),
        (
            {"recovers": False},
            "worker 1 was lost: it died. All workers restart from the last checkpoint; steps after it are repeated",
        ),
        (
            {"workers": 1},
            "worker 1 was lost: it died. It is not replaced in place, as no other worker is left that holds the "
            "training's state. All workers restart from the last checkpoint; steps after it are repeated",
        ),
        (
            {"failures_left": 0},
            "worker 1 was lost: it died. The run fails, as FailureConfig allows no more failures; its checkpoints "
            "stay. Raise FailureConfig(max_failures=...) so that it recovers next time",
        ),
        (
            {"recovers": False, "phase": Phase.LEAVING, "stopping": True},
            "worker 1 was lost: it died. The run fails, as a stop of the run was requested; its checkpoints stay",
        ),
    ],
)
def test_line_of_a_loss_contains_what_follows_from_it(change, line):
    state = RunState(workers=4, fewest=1, most=4, failures_left=3, recovers=True, phase=Phase.TRAINING)
    made = Group(dataclasses.replace(state, **change), ())
    made._errors = {1: RuntimeError("it died")}
    with warnings_logged("was lost") as lines:
        loss = Lost(frozenset({1}))
        made._emit(loss, made._decisions.take(loss))
    assert [text.replace("RuntimeError: ", "") for text in lines] == [line]


def test_line_of_a_recovery_that_failed_contains_that_the_run_fails(losing):
    with pytest.raises(group.LostGroupError), warnings_logged("could not be replaced") as lines:
        losing({"why": "too slow", "another": True, "also": {0, 2, 3}, "new_lost": 4})
    (line,) = lines
    assert "The run fails, as FailureConfig allows no more failures; its checkpoints stay" in line
