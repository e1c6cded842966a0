"""Deadlines follow a model's bytes and its first step. No Ray."""

from hypothesis import given
from hypothesis import strategies as st

from raytf.collectives.healing import Healer
from raytf.runtime.deadlines import Pace, deadline

numbers = st.integers(0, 1 << 45)
seconds = st.floats(0, 1e6)


@given(numbers, numbers, seconds, seconds, seconds)
def test_more_bytes_or_a_longer_first_step_are_waited_for_longer(few, more, short, long, least):
    few, more, short, long = min(few, more), max(few, more), min(short, long), max(short, long)
    assert least <= deadline(least, few, short) <= deadline(least, more, long)
    assert Pace.slowest([Pace(few, long), Pace(more, short)]) == Pace(more, long)


def test_a_large_model_has_the_time_that_a_slow_network_takes_for_it():
    """100 s for a process to come to its step would never do: 40 GB at 100 MB/s alone take 400 s."""
    pace = Pace(40 * 10**9, 300.0)
    assert pace.deadline(100.0, copies=1, first_steps=1) > 400.0 + 300.0
    assert pace.deadline(20.0) == 20.0, "what moves nothing has no more"


def test_a_worker_tells_its_pace_and_waits_no_shorter_than_the_driver_does():
    from raytf.collectives import healing as worker
    from raytf.train import healing as driver

    nothing = lambda: None
    healer = Healer()
    healer.arm(nothing, nothing, nothing, step=0, size=7)
    before = healer.pace()
    healer.steps_made()
    first = healer.pace()
    healer.steps_made()
    assert before.bytes == first.bytes == 7
    assert before.first_step_seconds <= first.first_step_seconds == healer.pace().first_step_seconds
    healer.disarm()
    for pace in (Pace(), Pace(10**11, 600.0)):
        waits = pace.deadline(worker.WAIT_SECONDS, worker._WAIT_COPIES, worker._WAIT_STEPS)
        parts = [
            pace.deadline(driver._BREAK_SECONDS, first_steps=1),
            pace.deadline(driver._ANSWER_SECONDS, copies=1),
            driver._START_SECONDS,
            pace.deadline(driver._ANSWER_SECONDS, copies=1),
            max(pace.deadline(driver._PLACE_SECONDS, 1, 1), pace.deadline(driver._KEEP_SECONDS, 1)),
        ]
        assert waits >= sum(parts)
