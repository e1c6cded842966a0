"""Which worker waits for which is judged from their reports: no false alarm, the right one, in the limit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

import raytf
from raytf import activity
from raytf.activity import PhaseTracker
from raytf.events import Kind
from raytf.runtime import stacks
from raytf.runtime.hang_watch import HangMonitor
from raytf.runtime.hangs import HangDetector


class Worker:
    """What a worker reports, second by second."""

    def __init__(self, **status):
        self.told = {
            "phase": activity.STEP,
            "seconds": 0.0,
            "hook": None,
            "collective": None,
            "numbers": {activity.SUM: 17, activity.COLLECTIVE: 3, activity.REPORT: 0},
            "step": 17,
            "began": 0,
            "usual": 0.1,
            "spent": {},
            "processor": 0.0,
            "queued": None,
            "switches": 5,
            "failing": "",
            "clock": 0.0,
        } | status
        self.works = self.moves = False

    def second(self):
        self.told = dict(self.told, seconds=self.told["seconds"] + 1, clock=self.told["clock"] + 1)
        if self.told["collective"] is not None:
            kind, number, seconds = self.told["collective"]
            self.told["collective"] = kind, number, seconds + 1
        self.told["processor"] += 0.9 if self.works else 0.02
        self.told["switches"] += self.moves


def waits(**status):
    return Worker(collective=(activity.SUM, 18, 0.0), **status)


def seconds_until(judge, workers, most=1000, ends=False):
    """After how many seconds a hang is found, and it."""
    for second in range(1, most):
        for worker in workers:
            worker.second()
        hang = judge.detect({rank: worker.told for rank, worker in enumerate(workers)}, {})
        if hang is not None and (hang.ends or not ends):
            return second, hang
    return most, None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"phase": activity.INPUT}, "waits for rows of its input in step 18"),
        ({"phase": activity.CALLBACKS, "hook": "Mine.on_epoch_end"}, "is in Mine.on_epoch_end after step 17"),
        ({"phase": activity.CHECKPOINT}, "writes a checkpoint after step 17"),
        ({"phase": activity.CHECKPOINT, "failing": "No space left"}, "that its storage does not take (No space left)"),
        ({"phase": activity.DRIVER}, "waits after step 17 for the driver, which takes no report"),
        ({"phase": activity.STEP}, "is in step 18 and does not use its processors"),
        ({"phase": activity.END}, "has left the training after step 17"),
    ],
)
def test_the_one_that_does_not_come_is_named_and_ended_later(status, words):
    workers = [waits(), Worker(**status), waits()]
    second, hang = seconds_until(HangDetector(10, 60), workers)
    assert 10 <= second <= 11 and hang.rank == 1 and words in str(hang) and not hang.ends
    assert "worker 0 and worker 2 wait for it since step 18" in str(hang)
    second, _ = seconds_until(HangDetector(10, 60), workers, ends=True)
    slow = status["phase"] not in (activity.STEP, activity.END)
    assert 30 < second <= 300 if slow else second <= 30


def test_worker_with_fewer_steps_is_named():
    late = Worker(collective=(activity.COLLECTIVE, 4, 0.0))
    ahead = waits(numbers={activity.SUM: 18, activity.COLLECTIVE: 3, activity.REPORT: 0})
    _, hang = seconds_until(HangDetector(10, 60), [ahead, late])
    assert hang.rank == 1 and "another number of steps" in str(hang) and "worker 0 waits" in str(hang)


def test_one_that_computes_is_not_named():
    computes = Worker()
    computes.works = True
    assert seconds_until(HangDetector(10, 60), [waits(), computes]) == (1000, None)


def test_one_that_gets_no_processor_is_not_named():
    """Its host is overloaded: to end it would not help."""
    starved = Worker(phase=activity.CALLBACKS)
    judge = HangDetector(10, 60)
    for second in range(100):
        starved.told = starved.told | {"queued": 0.5 * second if second > 2 else None}
        assert seconds_until(judge, [waits(seconds=second), starved], most=2)[1] is None
    starved.told = starved.told | {"queued": 49.5}  # it has got one, and sleeps
    assert seconds_until(judge, [waits(), starved])[1].rank == 1


STARVES = """
import os, signal
from raytf import activity
here = activity.tracker
here.register_thread()
here.enter(activity.CALLBACKS)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = os.fork()
while other == 0:
    pass
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    first, seconds = None, 0
    while seconds < 4:  # so long as `HangDetector` looks back
        told = here.snapshot()
        first = told if first is None and told["queued"] is not None else first
        seconds = told["clock"] - first["clock"] if first else 0
    assert first["seconds"] > 2
    assert told["queued"] - first["queued"] > 0.5 * seconds, (first, told)
    assert told["processor"] - first["processor"] < 0.2 * seconds, (first, told)
finally:
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
"""


@pytest.mark.slow
def test_process_reports_that_it_was_ready_to_run_and_had_no_processor():
    done = subprocess.run([sys.executable, "-c", STARVES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_one_that_still_moves_ends_the_run_later_only():
    moves = Worker(phase=activity.CALLBACKS)
    moves.moves = True
    assert seconds_until(HangDetector(10, 60), [waits(), moves], ends=True)[0] == 300


def test_a_slow_step_of_all_is_no_hang():
    assert seconds_until(HangDetector(10, 60), [Worker(), Worker(), Worker()])[1] is None
    assert seconds_until(HangDetector(10, 60), [Worker(phase=activity.VALIDATION), Worker()])[1] is None


def test_the_first_step_has_a_limit_of_its_own():
    numbers = {activity.SUM: 0, activity.COLLECTIVE: 3, activity.REPORT: 0}
    workers = [waits(step=0, numbers=numbers), Worker(step=0, numbers=numbers)]
    assert 60 <= seconds_until(HangDetector(10, 60), workers)[0] <= 61


def test_input_that_yields_nothing_on_any_worker_is_reported_and_ended_late():
    workers = [Worker(phase=activity.INPUT), Worker(phase=activity.INPUT)]
    second, hang = seconds_until(HangDetector(10, 60), workers)
    assert 10 <= second <= 11 and "waits for rows" in str(hang) and "the run waits for it" in str(hang)
    assert seconds_until(HangDetector(10, 60), workers, ends=True)[0] >= 250


def test_what_took_long_once_may_take_twice_as_long():
    judge = HangDetector(10, 60)
    _, hang = seconds_until(judge, [waits(), Worker(phase=activity.CALLBACKS)])
    judge.record_continued(hang)
    assert 20 <= seconds_until(judge, [waits(), Worker(phase=activity.CALLBACKS)])[0] <= 22


def test_no_false_alarm_in_steps_that_take_20_times_as_long():
    """An hour of steps of each length; one worker, drawn each time, sleeps meanwhile, and the others wait."""
    source = random.Random(5)
    for usual in (0.05, 0.45, 2.0):
        judge, clock = HangDetector(8.5, 60), 0.0
        workers = [Worker(usual=usual) for _ in range(3)]
        while clock < 3600:
            slow = source.randrange(3)
            took = usual * (20 if source.random() < 0.3 else 1)
            for now in range(1, int(took) + 1):
                for rank, worker in enumerate(workers):
                    met = None if rank == slow else (activity.SUM, 18, float(now))
                    phase = activity.CALLBACKS if rank == slow else activity.STEP
                    worker.told = dict(worker.told, phase=phase, collective=met, seconds=float(now), clock=clock + now)
                reports = {rank: worker.told for rank, worker in enumerate(workers)}
                assert judge.detect(reports, {}) is None, (usual, clock, now)
            clock += took


def test_a_silent_one_is_named():
    reports = {0: waits().told, 1: Worker().told}
    assert HangDetector(10, 60).detect(reports, {1: 9.0}) is None
    hang = HangDetector(10, 60).detect(reports, {1: 10.0})
    assert hang.rank == 1 and not hang.ends and HangDetector(10, 60).detect(reports, {1: 30.0}).ends
    assert "holds Python's lock" in str(hang)
    hang = HangDetector(10, 60).detect(reports, {1: 10.0}, {1: "stopped by a signal (SIGSTOP?)"})
    assert (
        not hang.ends and "is stopped by a signal" in str(hang) and "worker 0 waits for it since step 18" in str(hang)
    )


def test_activity_reports_the_phase_and_the_callback():
    now = [0.0]
    tracker, inside, go_on = PhaseTracker(lambda: now[0]), threading.Event(), threading.Event()

    class Mine:
        def on_epoch_end(self):
            inside.set()
            go_on.wait(60)

    def train():
        tracker.register_thread()
        tracker.enter(activity.STEP)
        with tracker.collective(activity.SUM):
            pass
        tracker.executed(4)
        Mine().on_epoch_end()
        tracker.enter(activity.END)

    thread = threading.Thread(target=train)
    thread.start()
    inside.wait(60)
    now[0] += 3
    status = tracker.snapshot()
    assert (status["phase"], status["hook"], status["step"], status["collective"]) == (
        "callbacks",
        "Mine.on_epoch_end",
        4,
        None,
    )
    assert status["seconds"] == 3 and status["numbers"]["sum"] == 1
    assert "go_on.wait(60)" in tracker.stack() and status["switches"] >= 0
    go_on.set()
    thread.join()
    assert tracker.snapshot()["phase"] == "end"


def test_a_stopped_process_shows_its_stack():
    program = "import time\ndef stands_here():\n    print(flush=True)\n    time.sleep(600)\nstands_here()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        assert "stands_here" in stacks.stack_of(process.pid)
    finally:
        process.kill()
        process.wait()
    assert "its stack is not known: py-spy may not look at it" in stacks.stack_of(process.pid)


@pytest.mark.slow
def test_the_cost_of_a_step():
    """Its part of a step of a millisecond, measured against a loop of this machine's own."""
    tracker = PhaseTracker()

    def step():
        tracker.enter(activity.STEP)
        tracker.begin_collective(activity.SUM)
        tracker.leave()
        tracker.executed(1)

    def per_call(function):
        began = time.perf_counter()
        for _ in range(2000):
            function()
        return (time.perf_counter() - began) / 2000

    # a function that does nothing takes 0.03 to 0.1 us
    assert min(per_call(step) for _ in range(5)) < 150 * min(per_call(lambda: None) for _ in range(5))


@pytest.mark.parametrize(
    "options", [{"hang_timeout_s": 1}, {"hang_timeout_s": 0}, {"first_step_timeout_s": 5}, {"hang_timeout_s": 400}]
)
def test_limits_out_of_range_are_refused(options):
    with pytest.raises(raytf.ConfigError, match="hang_timeout_s"):
        raytf.TensorflowConfig(**options)


def test_a_hang_that_was_reported_is_resolved_by_another_phase_alone(monkeypatch):
    """Another thread of the process may use a processor meanwhile."""
    messages, workers = [], [waits(), Worker(phase=activity.CALLBACKS, hook="Mine.on_epoch_end")]
    location = types.SimpleNamespace(pid=1, host="a", node="a")
    names = {0: "worker 0", 1: "worker 1"}
    watch = HangMonitor(lambda rank, function: None, {}, 8.0, 8.0, emit=messages.append, names=names)
    watch.close()
    watch._closed.clear()
    watch._locations = {0: location, 1: location}
    for name in ("_request_snapshots", "_stack"):
        monkeypatch.setattr(watch, name, lambda *args: "")
    monkeypatch.setattr(watch, "_find_silent", lambda: ({}, {}))

    def polls(seconds):
        for _ in range(seconds):
            for worker in workers:
                worker.second()
            watch._snapshots = {rank: worker.told for rank, worker in enumerate(workers)}
            watch._poll()
        return [event.kind for event in messages]

    assert polls(12) == [Kind.WORKER_HUNG]
    workers[1].works = True
    assert polls(4) == [Kind.WORKER_HUNG]
    workers[1].works = False
    assert polls(12) == [Kind.WORKER_HUNG]
    workers[1].told |= {"phase": activity.STEP, "seconds": 0.0}
    assert polls(1) == [Kind.WORKER_HUNG, Kind.WORKER_CONTINUED]


def test_restarted_workers_report_how_many_steps_are_repeated():
    messages = []
    watch = HangMonitor(lambda rank, function: None, {}, 1.0, 1.0, emit=messages.append, made=19)
    watch.close()
    for began, step in (None, 0), (15, 16), (15, 18):
        watch._snapshots = {0: Worker(began=began, step=step).told}
        watch._report_repeated_steps()
        assert watch.made == 19
    assert [(event.step, event.steps) for event in messages] == [(15, 4)]
