"""Comparisons of `raytf.fit` run one at a time: calls in a loop are faster, and each would take a core and 800 MB."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

from raytf.fitting.background_verification import _ComparisonLock


def test_one_at_a_time_and_then_the_newest():
    turn, entered, go_on = _ComparisonLock(), queue.SimpleQueue(), threading.Event()

    def call(number):
        with turn.acquired() as admitted:
            if admitted:
                entered.put(number)
                assert go_on.wait(60)
            return admitted

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(call, 1)
        assert entered.get(timeout=60) == 1
        second = pool.submit(call, 2)
        third = pool.submit(call, 3)
        # the order in which the two came is the threads' own: one of them ends at once, the first runs
        loser = next(as_completed([second, third], timeout=60))
        assert not loser.result(60) and entered.empty()
        go_on.set()
        assert first.result(60) and (second.result(60), third.result(60)).count(True) == 1
