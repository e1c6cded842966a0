"""What a group does when nodes are drained: what is a failure, and what workers on other nodes still do. No Ray."""

import collections
import concurrent.futures
import dataclasses
import math
import time
import types

import pytest
from ray.exceptions import RayActorError

from raytf.compat.ray_configs import Preemption, of_preemption
from raytf.errors import TrainingError
from raytf.runtime import answers
from raytf.runtime.failures import WorkerFailedError
from raytf.train import group, run_group
from raytf.train.decisions import Decisions, Phase, RunState
from raytf.train.group import LostGroupError, Report
from raytf.train.recovery_coordinator import Member
from raytf.worker.stop import StoppedForRestartError

GONE = RayActorError(preempted=True)


class Actor:
    """A worker's actor, and what it was answered."""

    def __init__(self):
        self.answers = []
        self.answer = types.SimpleNamespace(remote=self.answers.append)
        self.next_event = types.SimpleNamespace(remote=object)


class Group(run_group.RunGroup):
    """A group of two workers on two nodes, of which the second one's is drained."""

    def __init__(self, relaxed=False, seconds=0.0, ends_after_step=False, limit=math.inf, deadline=0.0):
        state = RunState(workers=2, fewest=2, most=2, failures_left=0, recovers=False, phase=Phase.TRAINING)
        state = dataclasses.replace(state, ends_after_step=ends_after_step, preemptions_left=limit)
        self._decisions = Decisions(state)
        self._spec = types.SimpleNamespace(preemption=Preemption(-1, relaxed, seconds))
        self.members = [Member(Actor(), rank, rank) for rank in range(2)]
        self.locations = {rank: types.SimpleNamespace(node=f"node {rank}") for rank in range(2)}
        self._deadlines = {"node 1": time.time() + deadline}
        self._errors, self._values, self._pending, self._gathered, self._waiting_requests = {}, {}, {}, {}, {}
        self._waits, self.reported, self._process_reports = set(), {}, collections.Counter()
        self._received = collections.defaultdict(collections.deque)
        self._process_killer, self._hangs = types.SimpleNamespace(ended={}, final_reports={}), None
        self.taken = []
        self._list = types.SimpleNamespace(take=lambda reports, context: self.taken.append(reports))
        self._context = None


def test_a_worker_that_ends_while_another_one_reports_is_an_error_and_no_wait():
    made = Group()
    made._gathered[0], made._values[1] = "name", None
    made._errors[1] = GONE
    made._answer_requests()  # the loss is handled first
    made._errors.clear()
    with pytest.raises(WorkerFailedError, match="must report equally often; one ended before another"):
        made._answer_requests()


def test_a_cancelled_run_does_not_wait_for_the_start_of_its_workers(monkeypatch):
    def check():
        raise TrainingError(None, "it was cancelled")

    monkeypatch.setattr(answers, "_CHECK_INTERVAL", 0.01)
    made, never = Group(), types.SimpleNamespace(future=concurrent.futures.Future)
    made._spec = types.SimpleNamespace(check=check)
    with pytest.raises(TrainingError, match="it was cancelled"):
        made._answers([never], 2.0, "the start of its process")


@pytest.mark.parametrize(("relaxed", "taken"), [(True, 1), (False, 0)])
def test_a_report_does_without_those_that_are_gone_if_that_is_asked_for(relaxed, taken):
    made = Group(relaxed)
    made._take_event(made.members[0], Report({"loss": 1.0}))
    made._gathered[0] = "name"
    made._take_reports()
    made._answer_requests()
    assert not made.taken and not made.members[0].actor.answers, "the other one may still come"
    made._errors[1] = GONE
    made._take_reports()
    made._answer_requests()
    assert len(made.taken) == taken and made.members[0].actor.answers == ["name"] * taken


def test_the_others_have_until_the_deadline_and_some_seconds_for_loops_of_their_own():
    assert not Group(deadline=60)._survivors_continue(), "nobody is gone"
    for made, goes_on in (
        (Group(deadline=60), True),
        (Group(deadline=-1), False),
        (Group(deadline=-1, seconds=60), True),
        (Group(deadline=60, ends_after_step=True), False),
    ):
        made._errors[1] = GONE
        assert made._survivors_continue() is goes_on
        made._values[0] = None
        assert not made._survivors_continue(), "all have ended"


@pytest.mark.parametrize(("limit", "phase"), [(math.inf, Phase.STARTING), (1, Phase.STARTING), (0, Phase.ENDED)])
def test_a_drained_node_beyond_the_limit_is_a_failure(limit, phase):
    for errors in ({0: StoppedForRestartError(7), 1: StoppedForRestartError(7)}, {1: GONE}):
        made = Group(ends_after_step=True, limit=limit)
        made._errors = dict(errors)
        with pytest.raises(LostGroupError):
            made._handle_failures()
        assert made._decisions.state.phase is phase


def test_a_failure_config_of_an_older_ray_has_none_of_these_options():
    assert of_preemption(types.SimpleNamespace(max_failures=1)) == (-1, False, 0.0)
    assert StoppedForRestartError(7).why == group.DRAIN
