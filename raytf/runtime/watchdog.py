"""Ends processes of actors that stand still, as nobody else would notice it, and keeps why."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import timeouts
from raytf.liveness import LOOK_INTERVAL, STOPPED_INTERVAL, StopWatch
from raytf.procfs import Look, look, looks
from raytf.runtime.guard import ProcessLocation

# Who was heard within so many seconds stands not still.
_HEARD_INTERVAL = 3.0
# Between two looks at processes of another node, which are a task there.
_FAR_INTERVAL = 4.0


class Watchdog:
    """Looks at processes from their own nodes, and ends (SIGKILL) those that are stopped for too long.

    A process of this node is looked at by a thread of this process, others by a task on their node.

    Args:
        seconds: of a stop that is one too long.
        last_words: last_words(key) gives more to say, and something to keep, of a process that is about to be ended.
        clock: gives seconds; for tests.

    Attributes:
        kept: what `last_words` gave to keep, by key.
        ended: for each process that it ended, by the key that it was given, why: a sentence without a full stop.
    """

    def __init__(
        self,
        seconds: float = STOPPED_INTERVAL,
        last_words: Callable[[Any], tuple[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds, self._last_words, self._clock = seconds, last_words, clock
        self.kept: dict = {}
        self.ended: dict = {}
        self._node = ray.get_runtime_context().get_node_id()
        self._places: dict[object, ProcessLocation] = {}
        self._watches: dict[object, StopWatch] = {}
        self._heard: dict[object, float] = {}
        self._started: dict[object, int] = {}  # when a process did, by its host's clock: numbers are used again
        self._asked: dict[str, tuple[object, float]] = {}  # by node: the answer that is to come, and when it was asked
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_watchdog")
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def watch(self, key, place: ProcessLocation) -> None:
        """Watches a process, in place of one that had its key before."""
        with self._lock:
            if self._places.get(key) != place:
                self._places[key], self._watches[key] = place, StopWatch(self._seconds, self._clock)
                self._started.pop(key, None)

    def heard(self, key) -> None:
        """Says that a process has just answered: it need not be looked at for a while."""
        with self._lock:
            self._heard[key] = self._clock()
            self._watches[key] = StopWatch(self._seconds, self._clock)

    def forget(self, key) -> None:
        """No longer watches a process."""
        with self._lock:
            self._places.pop(key, None)

    def close(self) -> None:
        """Watches nothing any more."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.wait(LOOK_INTERVAL):
            try:
                self._look()
            except Exception:  # what failed once may not fail again, and without this thread nobody looks
                logging.getLogger(__name__).exception("raytf's watchdog could not look at processes")

    def _look(self) -> None:
        for node, keys in self._due().items():
            if node == self._node:
                with self._lock:
                    pids = [self._places[key].pid for key in keys if key in self._places]
                self._judge(keys, looks(pids))
            else:
                self._look_far(node, keys)

    def _due(self) -> dict[str, list]:
        now, due = self._clock(), {}
        with self._lock:
            for key, place in self._places.items():
                if key not in self.ended and now - self._heard.get(key, -_HEARD_INTERVAL) >= _HEARD_INTERVAL:
                    due.setdefault(place.node, []).append(key)
        return due

    def _look_far(self, node: str, keys: list) -> None:
        """Takes what a node has answered, and asks it anew; one that does not answer is Ray's to notice."""
        ref, asked = self._asked.get(node, (None, 0.0))
        if ref is not None and ray.wait([ref], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._judge(keys, ray.get(ref))
            ref = None
        if ref is None and self._clock() - asked >= _FAR_INTERVAL:
            with self._lock:
                pids = [self._places[key].pid for key in keys if key in self._places]
            self._asked[node] = on(node, looks, pids), self._clock()
        elif ref is None:
            self._asked[node] = None, asked

    def _judge(self, keys: list, seen: dict[int, Look | None]) -> None:
        held = self._held(keys, seen)
        words = self._words_of([key for key, *_ in held])
        for key, place, found, how in held:
            text = f"its process {place.pid} on {place.host} is {how}"
            if key in words:
                more, self.kept[key] = words[key]
                text = f"{text}; {more}" if more else text
            self.ended[key] = text
            if place.node == self._node:
                kill(place.pid, found.started)
            else:
                on(place.node, kill, place.pid, found.started)

    def _words_of(self, keys: list) -> dict:
        """What `last_words` gives, of all at once: they have so many seconds together."""
        if self._last_words is None or not keys:
            return {}
        found: dict = {}

        def ask(key) -> None:
            found[key] = self._last_words(key)

        threads = [threading.Thread(target=ask, args=(key,), daemon=True, name="raytf_last_words") for key in keys]
        until = time.monotonic() + timeouts.get().last_words
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return dict(found)

    def _held(self, keys: list, seen: dict[int, Look | None]) -> list[tuple[Any, ProcessLocation, Look, str]]:
        """(key, place, look, how) of processes that stand still for too long."""
        held = []
        for key in keys:
            with self._lock:
                place, watch = self._places.get(key), self._watches.get(key)
                found = None if place is None else seen.get(place.pid)
                if found is None or found.state in "ZX":  # it has ended, which Ray notices
                    continue
                if self._started.setdefault(key, found.started) != found.started:  # and its number is another's
                    continue
            how = watch.judge(found)
            if how is not None:
                held.append((key, place, found, how))
        return held


def kill(pid: int, started: int) -> None:
    """Ends a process of this host if it is still the one that started then; SIGKILL ends stopped ones, too."""
    found = look(pid)
    if found is not None and found.started == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def on(node: str, function: Callable, *arguments):
    """The ref of what a function gives on a node."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(timeouts.under).options(scheduling_strategy=place)
    return task.remote(timeouts.get(), function, *arguments)
