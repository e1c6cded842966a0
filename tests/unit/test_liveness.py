"""A stopped process is distinguished from one that works, by what Linux reports of it."""

import os
import signal
import subprocess
import sys

import pytest

from raytf import procfs
from raytf.liveness import StopWatch
from raytf.procfs import ProcessState


def at(*looks):
    """Returns what `StopWatch` returns for looks, each (seconds, Look)."""
    now = [0.0]
    judge = StopWatch(15, lambda: now[0]).update
    answers = []
    for seconds, seen in looks:
        now[0] = seconds
        answers.append(judge(seen))
    return answers


def test_a_line_of_proc():
    text = "4242 (a) b (c) T 1 " + " ".join(str(n) for n in range(5, 53))
    assert procfs.parse_stat(text) == ProcessState(state="T", started=22, ticks=14 + 15)


@pytest.mark.parametrize("state, word", [("T", "by a signal"), ("t", "by a debugger"), ("Z", "dead")])
def test_a_stop_that_lasts(state, word):
    answers = at(
        (0, ProcessState("R", 7, 1)),
        (2, ProcessState(state, 7, 1)),
        (10, ProcessState(state, 7, 1)),
        (18, ProcessState(state, 7, 1)),
    )
    assert answers[:3] == [None] * 3 and word in answers[3] and "for 16 s" in answers[3]


def test_a_stop_that_ends_in_time_is_none():
    stops = [(2, "T"), (14, "T"), (16, "S"), (18, "T"), (32, "T"), (32.5, "t"), (33, "R"), (40, "t")]
    assert at(*((s, ProcessState(state, 7, 1)) for s, state in stops)) == [None] * len(stops)


def test_long_work_and_slow_disks_are_no_stop():
    assert at(*((s, ProcessState("R", 7, s)) for s in range(0, 10_000, 100))) == [None] * 100
    assert at(*((s, ProcessState("S", 7, 1)) for s in range(0, 10_000, 100))) == [None] * 100
    assert at(*((s, ProcessState("D", 7, s)) for s in range(0, 10_000, 100))) == [None] * 100
    assert at(*((s, ProcessState("D", 7, 1)) for s in (0, 10, 300))) == [None] * 3
    assert "file system" in at(*((s, ProcessState("D", 7, 1)) for s in (0, 10, 400)))[2]


def test_ended_process_is_reported():
    assert at((0, ProcessState("S", 7, 1)), (1, None), (16, None)) == [None, None, "gone, for 15 s"]
    other = ProcessState("S", 8, 0)
    assert at((0, ProcessState("S", 7, 1)), (1, other), (10, other), (16, other))[3] == "gone, for 15 s", (
        "its number only"
    )


def test_real_process_is_stopped_resumed_and_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert procfs.read_state(process.pid).state == "T"
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert procfs.read_states([process.pid])[process.pid].state in "RSD"
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.read_state(process.pid).state == "Z"
        process.communicate()
    assert procfs.read_state(process.pid) is None


def test_how_long_a_thread_waited_for_a_processor(tmp_path):
    assert procfs.queued_seconds(os.getpid()) >= 0.0
    with pytest.raises(OSError):
        procfs.queued_seconds(2**22 + 1)
    path = tmp_path / "self" / "task" / "7" / "schedstat"
    path.parent.mkdir(parents=True)
    path.write_text("5 2500000000 9\n")
    assert procfs.queued_seconds(7, proc=str(tmp_path)) == 2.5
    path.write_text("")
    with pytest.raises(OSError, match="has 0 numbers"):
        procfs.queued_seconds(7, proc=str(tmp_path))
