"""Comparisons of `raytf.fit` run one at a time: calls in a loop are faster, and each would take a core and 800 MB."""

from __future__ import annotations

import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

from raytf.fitting.background_verification import _MOST_WAITING, _ComparisonQueue
from tests.waiting import until


def test_comparisons_run_one_after_another_and_the_oldest_of_too_many_is_dropped():
    turns, entered, ends = _ComparisonQueue(), queue.SimpleQueue(), threading.Semaphore(0)

    def call(number):
        with turns.turn() as admitted:
            if admitted:
                entered.put(number)
                assert ends.acquire(timeout=60)
            return admitted

    def waits(count):
        return len(turns._waiting) == count

    with ThreadPoolExecutor(_MOST_WAITING + 2) as pool:
        calls = [pool.submit(call, 0)]
        assert entered.get(timeout=60) == 0
        for number in range(1, _MOST_WAITING + 2):
            calls.append(pool.submit(call, number))
            until(functools.partial(waits, min(number, _MOST_WAITING)))
            if number == _MOST_WAITING + 1:
                assert not calls[1].result(60), "the oldest that waits is dropped"
        for number in range(2, _MOST_WAITING + 2):
            assert entered.empty()
            ends.release()
            assert entered.get(timeout=60) == number
        ends.release()
        assert [each.result(60) for each in calls] == [True, False, *[True] * _MOST_WAITING]
