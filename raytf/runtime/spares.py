"""Processes that stand ready to take the places of workers that may be lost, on the workers' nodes.

They hold no resources of the cluster: one that is used takes those that the lost worker has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

import ray
from ray.exceptions import RayError

from raytf import events, timeouts
from raytf.errors import in_a_line
from raytf.events import Kind, RunEvent
from raytf.runtime.failures import cause_of

# Between two looks at whether they live.
_LOOK_INTERVAL = 5.0
# Of one node, one after the other, none of which came to be ready: no further one is tried there.
_MOST_FAILURES = 3


class Spares:
    """Keeps as many on each node of some.

    Args:
        each: on each node, at least 1.
        start: start(node) gives the actor of a process that starts there; it does what its `execute` is told.
        preload: is called in each as it starts; gives what it could not do ahead, as a line, or None.
        clock: gives seconds; for tests.
    """

    def __init__(
        self, each: int, start: Callable, preload: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ):
        self._each, self._start, self._preload, self._clock = each, start, preload, clock
        self._there: list[_Spare] = []
        self._failures: dict[str, int] = {}
        self._said = False
        self._lock, self._look_at = threading.Lock(), 0.0

    def keep(self, nodes: Collection[str]) -> None:
        """Starts what is missing on these nodes, without waiting for it, and ends what is on others.

        Call it now and then: one that has died is seen, and followed by another.
        """
        now = self._clock()
        with self._lock:
            if now >= self._look_at:
                self._look_at = now + _LOOK_INTERVAL
                for spare in self._there:
                    if spare.node not in nodes:
                        spare.end()
                self._there = [spare for spare in self._there if spare.node in nodes and self._lives(spare)]
            for node in nodes:
                missing = self._each - sum(spare.node == node for spare in self._there)
                if self._failures.get(node, 0) < _MOST_FAILURES:
                    self._there += [self._started(node) for _ in range(missing)]

    def _started(self, node: str) -> _Spare:
        events.emit(RunEvent(kind=Kind.STANDBY_STARTED, node=node))
        return _Spare(node, self._start(node), self._preload)

    def _lives(self, spare: _Spare) -> bool:
        why = spare.look()
        if why is None:
            if spare.ready:
                self._failures.pop(spare.node, None)
            if spare.less is not None and not self._said:
                self._said = True
                events.emit(RunEvent(kind=Kind.STANDBY_LIMITED, node=spare.node, why=spare.less))
            return True
        spare.end()
        events.emit(RunEvent(kind=Kind.STANDBY_LOST, node=spare.node, why=why))
        self._failures[spare.node] = self._failures.get(spare.node, 0) + 1
        if self._failures[spare.node] >= _MOST_FAILURES:
            events.emit(RunEvent(kind=Kind.STANDBY_GIVEN_UP, node=spare.node, why=why))
        return False

    def take(self, node: str, ask: Callable):
        """A process of a node, which is another's from now on, and what it answers; None where there is none.

        Args:
            node: Ray's id of it.
            ask: ask(actor) gives the ref of the answer.
        """
        while True:
            with self._lock:
                here = [spare for spare in self._there if spare.node == node]
                for spare in here:
                    spare.look()
                if not here:
                    return None
                spare = next((spare for spare in here if spare.ready), here[0])
                self._there.remove(spare)
            seconds = timeouts.get().idle_answer if spare.ready else timeouts.get().standby_start
            try:
                return spare.actor, ray.get(ask(spare.actor), timeout=seconds)
            except RayError:  # GetTimeoutError is one
                spare.end()

    def close(self) -> None:
        """Ends all."""
        with self._lock:
            for spare in self._there:
                spare.end()
            self._there.clear()


class _Spare:
    """A process.

    Attributes:
        ready: whether it has done what it does as it starts; as of the last `look`.
        less: what it could not do ahead, then.
    """

    def __init__(self, node: str, actor, preload: Callable[[], None]):
        self.node, self.actor, self.ready = node, actor, False
        self.less: str | None = None
        self._answer = actor.execute.remote(timeouts.under, timeouts.get(), preload)

    def look(self) -> str | None:
        """Why it is of no use, in a line; None while nothing is known against it."""
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            told = ray.get(self._answer)
        except Exception as error:  # whatever it fails of, a process that starts when it is needed says it again
            return in_a_line(cause_of(error))
        if not self.ready:
            self.ready, self.less = True, told
        self._answer = self.actor.execute.remote(time.monotonic)
        return None

    def end(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self.actor)
