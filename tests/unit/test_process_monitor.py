"""Which processes are stopped is judged by looks at them, each with its key. No Ray."""

import pytest

from raytf.procfs import ProcessState
from raytf.runtime.process_monitor import ProcessLocation, StopDetector

RUNS, STOPPED = ProcessState("R", 7, 1), ProcessState("T", 7, 1)


class Judged(StopDetector):
    """Three processes on two nodes, and a clock."""

    def __init__(self):
        self.now = 0.0
        super().__init__(10.0, lambda: self.now)
        for key, node, started in ((0, "a", 7), (1, "a", None), (2, "b", None)):
            self.watch(key, ProcessLocation(node, f"host {node}", 100 + key, started))

    def after(self, seconds, node, **seen):
        """The keys of those that are found frozen by looks at processes "p100" and so on, so many seconds later."""
        self.now += seconds
        return [found.keys for found in self.check_states(node, {int(name[1:]): look for name, look in seen.items()})]


@pytest.fixture
def judged():
    return Judged()


def test_lasting_stop_is_reported_of_its_process_alone(judged):
    assert judged.after(0, "a", p100=STOPPED, p101=STOPPED) == []
    assert judged.after(5, "a", p100=STOPPED, p101=RUNS) == [] and judged.stopped_process().keys == (0,)
    assert judged.after(5, "a", p100=STOPPED, p101=STOPPED) == [(0,)]
    assert judged.after(9, "b", p100=STOPPED, p102=STOPPED) == [], "of another node"
    assert judged.after(1, "a", p101=STOPPED) == [(1,)]


def test_ended_or_reused_pid_is_no_stopped_process(judged):
    others = ProcessState("T", 8, 1)
    assert judged.after(0, "a", p100=others, p101=RUNS) == [], "another process by its start, as the place tells"
    assert judged.after(9, "a", p100=ProcessState("Z", 7, 1), p101=others) == [], "or as it was seen first"
    assert judged.after(99, "a", p100=others, p101=others) == []
    assert judged.after(99, "a", p100=None, p101=ProcessState("X", 7, 1)) == [] and judged.stopped_process() is None


def test_process_that_answered_is_not_due_and_its_time_begins_again(judged):
    assert judged.due() == {"a": [100, 101], "b": [102]}
    judged.after(0, "a", p100=STOPPED)
    judged.now = 9.0
    judged.mark_alive(0, 2, "no such")
    assert judged.due() == {"a": [101]} and judged.stopped_process() is None
    judged.now = 12.0
    assert judged.due() == {"a": [100, 101], "b": [102]}
    assert judged.after(0, "a", p100=STOPPED) == [] and judged.after(10, "a", p100=STOPPED) == [(0,)]
    judged.mark_alive(0, 1, 2)
    assert judged.due() == {}


def test_time_begins_again_at_another_location_only(judged):
    judged.after(0, "a", p101=STOPPED)
    judged.watch(1, ProcessLocation("a", "host a", 101, None))
    assert judged.after(10, "a", p101=STOPPED) == [(1,)]
    judged.watch(1, ProcessLocation("b", "host b", 105, None))
    assert judged.after(0, "b", p105=STOPPED) == [] and judged.processes_on("b").keys() == {1, 2}
    judged.forget(1)
    assert judged.after(10, "b", p105=STOPPED) == []
