"""What the engine makes of starts that fail, and of a loop that has ended. No Ray."""

from __future__ import annotations

import types

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, RuntimeEnvSetupError

from raytf.runtime.failures import WorkerFailedError
from raytf.train import engine
from raytf.train.decisions import Decisions, RunState
from tests.logged import lines_logged

MISSING = RayTaskError("begin", "", ModuleNotFoundError("No module named 'my_package'"), ip="10.0.0.1")


class Engine(engine.Engine):
    """A run of one worker, whose starts fail with these errors; None is a start that succeeds.

    Attributes:
        stops: What `stop` returns as the group closes, and as the result is waited for.
    """

    def __init__(self, *starts, limit=-1):
        self._starts, self._starts_left = iter(starts), limit
        self._launch = types.SimpleNamespace(check=lambda: None)
        self._tab = types.SimpleNamespace(ended=lambda error, restarts=False: None)
        self._decisions = Decisions(RunState(workers=1, fewest=1, most=1, failures_left=1, recovers=False))
        self._list = types.SimpleNamespace(result=lambda value: self._look(value))
        self._context = self._group = self._slices = self._elastic = None
        self._is_complete = False
        self.stops = []

    def _look(self, value=None):
        self.stops.append(self.stop())
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


def test_starts_are_limited_by_the_failure_config():
    with lines_logged() as lines, pytest.raises(WorkerFailedError):
        Engine(*[ActorDiedError()] * 3, limit=2).run()
    assert len(lines) == 2


def test_stop_of_a_loop_that_has_ended_is_no_stop_before_a_step():
    made = Engine(None)
    assert made.run() == "value"
    assert made.stops == [None, None]
