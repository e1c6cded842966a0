"""Workers that answer nothing hold nobody up: all are asked at once, and what is closed waits for none of them."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest
import ray

from raytf import activity
from raytf.runtime import process_monitor
from raytf.runtime.hang_watch import HangMonitor
from raytf.runtime.process_monitor import ProcessLocation
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")
WORKERS = 8


@ray.remote(num_cpus=0, max_concurrency=4 * WORKERS)
class Silent:
    """Answers on request."""

    def __init__(self):
        self._told = threading.Event()

    def answer(self):
        self._told.wait()

    def tell(self):
        self._told.set()


def test_eight_silent_workers_are_asked_at_once_and_closing_waits_for_none(monkeypatch, set_timeouts):
    silent, status = Silent.remote(), activity.snapshot()
    asked: list[int] = []

    def on(node, function, pid):
        asked.append(pid)
        return silent.answer.remote()

    monkeypatch.setattr(process_monitor, "call_on_node", on)
    set_timeouts(stack=3600.0)
    places = {rank: ProcessLocation("far", "far", rank, None) for rank in range(WORKERS)}
    clock = functools.partial(next, itertools.count())  # a second passes between two looks
    first = [ray.put(status) for _ in places]  # each answers once, and then no more
    watch = HangMonitor(
        lambda rank, function: first.pop() if first else silent.answer.remote(),
        places,
        limit=1.0,
        first=3600.0,
        clock=clock,
    )
    try:
        until(lambda: set(asked) == set(range(WORKERS)))
        closing = threading.Thread(target=watch.close)
        closing.start()
        until(lambda: not closing.is_alive())
        until(lambda: not watch._thread.is_alive())
    finally:
        ray.get(silent.tell.remote())
        ray.kill(silent)
