"""What the engine makes of a loop that has ended. No Ray."""

from __future__ import annotations

import types

from raytf.train import engine
from raytf.train.decisions import Decisions, RunState


class Engine(engine.Engine):
    """A run of one worker, which starts at once.

    Attributes:
        stops: What `stop` returns as the group closes, and as the result is waited for.
    """

    def __init__(self):
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
        self._group = types.SimpleNamespace(follow=lambda *arguments: "value", close=self._look, actors=["worker 0"])
        return self._group


def test_stop_of_a_loop_that_has_ended_is_no_stop_before_a_step():
    made = Engine()
    assert made.run() == "value"
    assert made.stops == [None, None]
