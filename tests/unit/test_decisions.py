"""What a run decides, by a simulation of a thousand runs in which workers are lost, hang, fail and lose each other,
nodes are drained and come, recoveries fail, and users stop the run."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.train import decisions
from raytf.train.decisions import (
    ActionKind,
    CapacityChanged,
    Decisions,
    Disconnected,
    Drained,
    Ended,
    Failed,
    Lost,
    NotRecovered,
    Phase,
    Recovered,
    RunState,
    Started,
    StopNotDelivered,
    StopRequested,
    WorkerState,
    decide,
)
from raytf.worker.stop import STOP

STEPS = 30
WHOLE = RunState(workers=3, fewest=1, most=4, failures_left=2, recovers=True, phase=Phase.TRAINING)


class Run:
    """A run of STEPS steps that follows decisions as groups of workers do. What is not decided is drawn: which workers
    are lost when, whether a recovery comes about, how much room there is."""

    def __init__(self, source: random.Random, state: RunState, every: int):
        self.source, self.decisions, self.every = source, Decisions(state), every
        self.failures = state.failures_left  # as who restarts counts them
        self.processes: list[int] = []  # by rank
        self.dead: frozenset[int] = frozenset()
        self.next_process = 0
        self.step = self.kept = self.made = self.lost_steps = 0
        self.trained_after_stop = 0
        self.wanted = 0  # workers
        self.restarts = 0  # that cost steps
        self.result: str | None = None
        self.rate = source.choice([0.02, 0.1, 0.3])  # of events a step

    @property
    def state(self) -> RunState:
        return self.decisions.state

    def new(self) -> int:
        self.next_process += 1
        return self.next_process

    def start(self, goes_back: bool, workers: int | None = None) -> None:
        """Starts a group as Ray does: as many as there is room for, which waits until there are the fewest."""
        workers = workers or self.source.randint(self.state.fewest, self.state.most)
        self.dead = frozenset()
        self.processes = [self.new() for _ in range(workers)]
        self.do(Started(workers))
        if goes_back and self.state.phase is Phase.TRAINING:
            self.lost_steps += self.step - self.kept
            self.step = self.kept

    def do(self, event: decisions.Event) -> None:
        if isinstance(event, Lost):
            self.dead |= event.ranks
        before = self.state
        action = self.decisions.take(event)
        if isinstance(event, Disconnected):
            self.failures -= action.kind is ActionKind.RECOVER
        elif before.phase is Phase.RECOVERING and isinstance(event, (Recovered, NotRecovered)):
            self.failures -= len(before.lost) if isinstance(event, Recovered) else event.new_lost
        self.check(before, event, action)
        if action.kind is ActionKind.RECOVER:
            self.recover()
        elif action.kind in (ActionKind.RESTART, ActionKind.RESIZE):
            counts = action.kind is ActionKind.RESTART and not isinstance(event, Ended)
            self.failures -= counts
            self.restarts += counts or action.kind is ActionKind.RESIZE
            assert self.failures == self.state.failures_left
            if isinstance(event, Ended):
                self.kept = self.step  # all keep the step after which they end
            self.start(not isinstance(event, Ended), self.wanted or getattr(event, "workers", None))
            self.wanted = 0
        elif action.kind is ActionKind.FAIL:
            self.result = "failed"
            started = decide(self.state, Started(self.state.workers)).state
            assert started.phase is (Phase.LEAVING if self.state.stopping else Phase.TRAINING)
        elif action.kind is ActionKind.END_AFTER_STEP and before.phase is not Phase.RECOVERING:
            self.wanted = getattr(event, "workers", 0)
            self.end_after_step(action.why)

    def check(self, before: RunState, event, action) -> None:
        after = action.state
        assert after.failures_left >= 0 and self.failures >= 0
        assert not (before.stopping and action.kind in (ActionKind.RESTART, ActionKind.RESIZE)), (
            "a stop is followed by no restart"
        )
        assert not before.stopping or after.stopping
        assert not (after.stopping and after.phase is Phase.TRAINING)
        assert (after.phase is Phase.RECOVERING) or not after.lost
        if action.kind is ActionKind.RECOVER:
            assert after.workers >= after.fewest and self.dead <= action.ranks
            assert len(action.ranks) < after.workers
            assert after.failures_left >= len(action.ranks)
        if after.phase in (Phase.TRAINING, Phase.RECOVERING, Phase.LEAVING):
            assert after.fewest <= after.workers <= after.most
        if action.kind is ActionKind.FAIL:
            assert after.phase is Phase.ENDED

    def recover(self) -> None:
        """One that is asked for; more workers may be lost, and new processes, while it is under way."""
        lost, dead = self.state.lost, frozenset()
        if self.source.random() < 0.3:
            dead = self.ranks() - lost
            self.dead |= dead
        if self.source.random() < 0.1:
            self.do(StopRequested())
        if self.state.phase is not Phase.RECOVERING:
            return
        new_lost = self.source.randint(0, len(lost)) if self.source.random() < 0.3 else 0
        if dead or new_lost:
            self.do(NotRecovered("more were lost", lost_another=True, also_lost=dead, new_lost=new_lost))
        elif self.source.random() < 0.3:
            self.do(NotRecovered("no room"))
            # the others may have kept a checkpoint of the last step that all have made: so much less is made again
        else:
            self.dead -= lost
            for rank in lost:
                self.processes[rank] = self.new()
            self.do(Recovered())
            if self.state.phase is Phase.LEAVING:  # those are asked again
                self.end_after_step(STOP)

    def end_after_step(self, why: str) -> None:
        """Makes one more step on all workers, unless one cannot be reached, or is lost meanwhile."""
        if not self.state.ends_after_step:  # the user's own loop
            return
        if self.source.random() < 0.2:
            self.do(StopNotDelivered())
            if not self.state.stopping:
                return
        if self.source.random() < 0.2:
            self.do(Lost(self.ranks()))
        if self.result is None and self.state.phase is Phase.LEAVING:
            self.make_step()
            if why == STOP:  # they come to an end, as at that of their last epoch
                self.result = "stopped"
            else:
                self.do(Ended())

    def ranks(self) -> frozenset[int]:
        """Some, at least one."""
        workers = range(self.state.workers)
        most = self.state.workers if self.source.random() < 0.2 else 1
        return frozenset(self.source.sample(workers, self.source.randint(1, most)))

    def make_step(self) -> None:
        self.step += 1
        self.made += 1
        self.trained_after_stop += self.state.stopping
        if self.step % self.every == 0:
            self.kept = self.step

    def play(self) -> None:
        self.start(goes_back=False)
        for _ in range(400):
            assert len(set(self.processes)) == len(self.processes) == self.state.workers, "no rank is held by two"
            if self.result is None and self.step >= STEPS:
                self.result = "ended"
            if self.result is not None:
                return
            assert self.state.phase is Phase.TRAINING and not self.dead, f"{self.state} has no way on"
            kept, restarts = self.kept, self.restarts
            before = self.step
            event = self.happening() if self.source.random() < self.rate else None
            if event is None:
                self.make_step()
                continue
            self.do(event)
            assert self.step >= (before if self.restarts == restarts else kept), "made again since the last checkpoint"
        raise AssertionError("it neither ends nor trains")

    def happening(self) -> decisions.Event:
        kinds = [
            lambda: Lost(self.ranks()),
            lambda: Lost(self.ranks(), self.ranks()),
            lambda: Failed(self.ranks()),
            Disconnected,
            lambda: Drained(self.source.random() < 0.8),
            lambda: CapacityChanged(self.source.randint(0, 6), self.source.random() < 0.2),
            StopRequested,
        ]
        return self.source.choices(kinds, [6, 1, 1, 2, 1, 3, 1])[0]()


def limits(source: random.Random) -> RunState:
    fewest = source.randint(1, 3)
    return RunState(
        workers=fewest,
        fewest=fewest,
        most=source.randint(fewest, 5),
        failures_left=source.choice([0, 1, 2, 5, math.inf]),
        recovers=source.random() < 0.8,
        ends_after_step=source.random() < 0.8,
        resends_stop=source.random() < 0.5,
    )


@settings(max_examples=1000)
@given(st.integers(0, 2**32))
def test_a_thousand_runs(seed):
    source = random.Random(seed)
    state = limits(source)
    run = Run(source, state, every=source.randint(1, 7))
    run.play()
    assert run.result in ("ended", "stopped") or run.state.phase is Phase.ENDED
    assert run.trained_after_stop <= 1
    if run.result == "failed" and not run.state.stopping:
        assert run.failures < 1, "a run fails when its failures are used up, and not before"
    assert run.made == run.step + run.lost_steps
    assert not run.lost_steps or run.restarts, (
        "steps are made again behind a restart in the middle of one, and only then"
    )
    assert run.restarts or run.made == run.step


@pytest.mark.parametrize(
    "change, event, do, why",
    [
        ({}, Lost(frozenset([1])), ActionKind.RECOVER, ""),
        ({}, Lost(frozenset([0, 2])), ActionKind.RECOVER, ""),
        ({"failures_left": 1}, Lost(frozenset([0, 2])), ActionKind.RESTART, "FailureConfig allows no more failures"),
        ({"failures_left": 0}, Lost(frozenset([1])), ActionKind.FAIL, "FailureConfig allows no more failures"),
        ({"failures_left": math.inf}, Lost(frozenset([0, 1, 2])), ActionKind.RESTART, "no other worker is left"),
        ({"recovers": False}, Lost(frozenset([1])), ActionKind.RESTART, ""),
        ({}, Lost(frozenset([1]), frozenset([0])), ActionKind.RESTART, "after a report of worker 0"),
        ({}, Lost(frozenset([1]), frozenset([1])), ActionKind.RECOVER, ""),
        ({"phase": Phase.LEAVING}, Lost(frozenset([1])), ActionKind.RECOVER, ""),
        (
            {"phase": Phase.LEAVING, "resends_stop": False},
            Lost(frozenset([1])),
            ActionKind.RESTART,
            "stops after that step",
        ),
        (
            {"phase": Phase.LEAVING, "stopping": True, "recovers": False},
            Lost(frozenset([1])),
            ActionKind.FAIL,
            "a stop of the run was requested",
        ),
        ({"phase": Phase.RECOVERING, "lost": frozenset([1])}, Lost(frozenset([1])), ActionKind.IGNORE, ""),
        ({"phase": Phase.STARTING}, Lost(frozenset([1])), ActionKind.IGNORE, ""),
        ({}, Failed(frozenset([1])), ActionKind.RESTART, ""),
        ({"failures_left": 0}, Failed(frozenset([1])), ActionKind.FAIL, ""),
        ({}, Disconnected(), ActionKind.RECOVER, ""),
        ({"failures_left": 0}, Disconnected(), ActionKind.FAIL, "FailureConfig allows no more failures"),
        ({}, StopRequested(), ActionKind.END_AFTER_STEP, "stop"),
        ({"phase": Phase.STARTING}, StopRequested(), ActionKind.FAIL, "a stop of the run was requested"),
        ({}, Drained(stays=True), ActionKind.END_AFTER_STEP, "drain"),
        ({}, Drained(stays=False), ActionKind.END_AFTER_STEP, "stop"),
        ({"stopping": True, "phase": Phase.LEAVING}, Drained(stays=True), ActionKind.END_AFTER_STEP, "stop"),
        ({}, CapacityChanged(4), ActionKind.END_AFTER_STEP, "resize"),
        ({}, CapacityChanged(3), ActionKind.IGNORE, ""),
        ({}, CapacityChanged(5), ActionKind.IGNORE, ""),
        ({}, CapacityChanged(0), ActionKind.IGNORE, ""),
        ({"ends_after_step": False}, CapacityChanged(4), ActionKind.RESIZE, ""),
        ({"phase": Phase.LEAVING}, CapacityChanged(4), ActionKind.IGNORE, ""),
        ({"phase": Phase.LEAVING}, CapacityChanged(4, overdue=True), ActionKind.RESIZE, ""),
        ({"phase": Phase.RECOVERING, "lost": frozenset([1])}, CapacityChanged(4, overdue=True), ActionKind.IGNORE, ""),
        ({"phase": Phase.LEAVING}, Ended(), ActionKind.RESTART, ""),
        ({"phase": Phase.LEAVING, "stopping": True}, Ended(), ActionKind.IGNORE, ""),
    ],
)
def test_each_decision(change, event, do, why):
    action = decide(dataclasses.replace(WHOLE, **change), event)
    assert (
        action.kind is do
        and why in action.why
        and (why or not action.why or do in (ActionKind.RESTART, ActionKind.FAIL))
    )
    assert (action.kind is ActionKind.FAIL) == bool(action.failure), "a run that fails has a reason"


def test_a_recovery_that_begins_again_counts_what_was_lost_and_takes_all_places():
    run = Decisions(dataclasses.replace(WHOLE, workers=4, failures_left=3))
    assert run.take(Lost(frozenset([1]))).ranks == {1}
    action = run.take(NotRecovered("worker 3 was lost", lost_another=True, also_lost=frozenset([3]), new_lost=1))
    assert (action.kind, action.ranks, action.state.failures_left) == (ActionKind.RECOVER, {1, 3}, 2)
    action = run.take(NotRecovered("both were lost", lost_another=True, new_lost=1))
    assert (action.kind, action.why) == (
        ActionKind.RESTART,
        "both were lost, and FailureConfig allows no more failures",
    )
    assert run.state.failures_left == 0
    run.take(Started(4))
    assert run.take(Lost(frozenset([1]))).kind is ActionKind.FAIL


def test_a_group_that_starts_all_the_same_trains():
    run = Decisions(dataclasses.replace(WHOLE, failures_left=0))
    assert run.take(Lost(frozenset([1]))).kind is ActionKind.FAIL
    run.take(Started(2))
    assert run.state.phase is Phase.TRAINING and run.state.workers == 2


def test_what_a_look_at_all_shows():
    well, ended, lost, failed, affected = WorkerState
    assert decisions.event_of_states([well, affected]) is None
    assert decisions.event_of_states([lost, affected, lost]) == Lost(frozenset([0, 2]))
    assert decisions.event_of_states([lost, lost]) == Lost(frozenset([0, 1]))
    assert decisions.event_of_states([lost, failed, affected]) == Failed(frozenset([1]))
    assert decisions.event_of_states([lost, ended, failed]) == Ended()
    assert decisions.reusable_ranks([well, lost, ended, affected]) == {0, 2, 3}
    assert decisions.reusable_ranks([well, failed]) == frozenset()
