"""A comparison gives way to the training, but not any more once somebody waits for it."""

from __future__ import annotations

import os
import threading

import psutil
import pytest

from raytf.storage import priority
from raytf.train import verify
from tests.waiting import until


def _processes(running):
    """Returns the process of a comparison and the children it has."""
    process = psutil.Process(running.pid)
    return [process, *process.children(recursive=True)]


def _priorities(running):
    return {(os.sched_getscheduler(p.pid), os.getpriority(os.PRIO_PROCESS, p.pid)) for p in _processes(running)}


def _endless():
    threading.Event().wait()


@pytest.mark.slow  # a process of low priority waits for the tests next to it
def test_wait_for_a_comparison_gives_it_normal_priority():
    if not priority._can_be_reverted():
        pytest.skip("this user may not lower niceness")
    running = verify.start_comparison(_endless, low_priority=True)
    try:
        until(lambda: len(_processes(running)) == 4)  # the comparison, and its runs
        ((policy, niceness),) = _priorities(running)
        assert policy == os.SCHED_BATCH and niceness > 0
        assert verify.outcome(running, 0.0) is None
        assert {niceness for _, niceness in _priorities(running)} == {niceness}
        assert verify.outcome(running, 0.01, urgent=True) is None
        assert _priorities(running) == {(os.SCHED_OTHER, 0)}
    finally:
        verify.cancel(running)
