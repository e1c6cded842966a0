"""What the engine makes of starts that fail, of a loop that has ended, and of a resize meanwhile. No Ray."""

from __future__ import annotations

import types

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, RuntimeEnvSetupError

from raytf import events
from raytf.errors import ConfigError
from raytf.runtime.failures import WorkerFailedError
from raytf.train import engine
from raytf.train.decisions import Decisions, Phase, RunState
from tests.logged import lines_logged

TAKEN = RayTaskError("reserve", "", ConfigError("A worker needs a free port", "none", "Free some"), ip="10.0.0.1")
MISSING = RayTaskError("begin", "", ModuleNotFoundError("No module named 'my_package'"), ip="10.0.0.1")


class Engine(engine.Engine):
    """A run of one worker, whose starts fail with these errors; None is a start that succeeds.

    Attributes:
        stops: What `stop` returns as the group closes, and as the result is waited for.
        withdrawn: Whether the elastic run was closed, at the same times.
    """

    def __init__(self, *starts, limit=-1):
        self._starts, self._starts_left = iter(starts), limit
        self._launch = types.SimpleNamespace(check=lambda: None)
        self._tab = types.SimpleNamespace(ended=lambda error, restarts=False: None)
        self._decisions = Decisions(RunState(workers=1, fewest=1, most=1, failures_left=1, recovers=False))
        self._list = types.SimpleNamespace(result=lambda value: self._look(value))
        self._context = self._group = self._slices = None
        self._is_complete = False
        self._closed, self.stops, self.withdrawn = [], [], []
        self._elastic = types.SimpleNamespace(close=lambda: self._closed.append(True))

    def _look(self, value=None):
        self.stops.append(self.stop())
        self.withdrawn.append(bool(self._closed))
        return value

    def _size(self):
        return 1

    def _started(self, size):
        error = next(self._starts)
        if error is not None:
            raise error
        self._group = types.SimpleNamespace(follow=lambda *arguments: "value", close=self._look, actors=["worker 0"])
        return self._group


def test_start_that_fails_is_named_and_repeated():
    with lines_logged() as lines:
        assert Engine(ActorDiedError(), MISSING, ActorDiedError(), MISSING, None).run() == "value"
    assert len(lines) == 4
    assert lines[1] == (
        "the workers could not be started, and are started again: ModuleNotFoundError: No module named 'my_package'. "
        "If it repeats, correct the cause, or set FailureConfig(controller_failure_limit=...)"
    )


@pytest.mark.parametrize("error", [MISSING, RuntimeEnvSetupError("no such package")])
def test_error_of_code_at_two_starts_in_succession_ends_the_run(error):
    with lines_logged() as lines, pytest.raises(WorkerFailedError, match="my_package|RuntimeEnvSetupError"):
        Engine(ActorDiedError(), error, error, None).run()
    assert len(lines) == 2


def test_ports_that_are_all_taken_for_a_while_do_not_end_the_run():
    with lines_logged() as lines:
        assert Engine(*[TAKEN] * 3, None).run() == "value"
    assert len(lines) == 3


def test_starts_are_limited_by_the_failure_config():
    with lines_logged() as lines, pytest.raises(WorkerFailedError):
        Engine(*[ActorDiedError()] * 3, limit=2).run()
    assert len(lines) == 2


def test_stop_of_a_loop_that_has_ended_is_no_stop_before_a_step():
    made = Engine(None)
    assert made.run() == "value"
    assert made.stops == [None, None] and made.withdrawn == [False, True]


@pytest.fixture
def resized(monkeypatch):
    """Returns a function that prepares a second worker, and calls another function meanwhile."""
    emitted, killed, idle, stops = [], [], [], []
    monkeypatch.setattr(events, "_takers", [emitted.append])
    monkeypatch.setattr(engine.ray, "kill", killed.append)
    monkeypatch.setattr(engine.resources, "likely_nodes", lambda scaling, count: ["a"])
    monkeypatch.setattr(engine.graceful_stop, "agree", lambda actors, why: stops.append(actors))
    process = types.SimpleNamespace(execute=types.SimpleNamespace(remote=lambda *arguments: None))
    spec = types.SimpleNamespace(
        worker_resources={"CPU": 1.0},
        scaling=types.SimpleNamespace(elastic_resize_monitor_interval_s=60.0),
        stays=True,
        start_process=lambda node: process,
        warm_up_job=[],
        cpus=1,
    )
    state = RunState(workers=1, fewest=1, most=2, failures_left=0, recovers=False, phase=Phase.LEAVING)

    def resized(meanwhile):
        elastic = engine._Elastic(spec, Decisions(state), [], idle)
        monkeypatch.setattr(engine.answers, "collect_answers", lambda *arguments: meanwhile(elastic))
        elastic._change(["worker 0"], 2)
        return [str(event.kind) for event in emitted], stops, killed, [actor for _, actor in idle]

    resized.process = process
    return resized


def test_resize_stops_the_workers_as_soon_as_new_ones_are_ready(resized):
    assert resized(lambda elastic: None) == (["resized"], [["worker 0"]], [], [resized.process])


@pytest.mark.parametrize("error", [None, engine.NoAnswerError(["worker 0"], 120.0, "the start of a new worker")])
def test_resize_that_is_prepared_as_the_run_ends_is_dropped(resized, error):
    def close(elastic):
        elastic.close()
        if error is not None:
            raise error

    emitted, stops, killed, _ = resized(close)
    assert not emitted and not stops and killed == [resized.process]
