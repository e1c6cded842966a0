"""Standby workers on the workers' nodes, which replace lost workers.

They hold no resources of the cluster: a standby worker in use gets those of the lost worker.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

import ray
from ray.exceptions import RayError

from raytf import events, timeouts
from raytf.errors import one_line
from raytf.events import Kind, RunEvent
from raytf.runtime.failures import user_error

# Seconds between two checks whether they live.
_CHECK_INTERVAL = 5.0
# Number of consecutive standby workers of a node that failed to start, after which no more are started there.
_MOST_FAILURES = 3


class StandbyPool:
    """Maintains a number of standby workers on each of some nodes.

    Args:
        per_node: Number on each node, at least 1.
        start: start(node) starts a process there, and returns its actor, which calls functions by its `execute`.
        preload: Function that each calls at its start. It returns in one line which work it could not do ahead, or
            None.
        clock: Returns seconds; for tests.
    """

    def __init__(
        self, per_node: int, start: Callable, preload: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ):
        self._per_node, self._start, self._preload, self._clock = per_node, start, preload, clock
        self._standbys: list[_StandbyProcess] = []
        self._failures: dict[str, int] = {}
        self._reported = False
        self._lock, self._check_at = threading.Lock(), 0.0

    def keep(self, nodes: Collection[str]) -> None:
        """Starts missing ones on these nodes, without waiting for them, and ends those on others.

        Call it from time to time: it detects and replaces dead ones.
        """
        current_time = self._clock()
        with self._lock:
            if current_time >= self._check_at:
                self._check_at = current_time + _CHECK_INTERVAL
                for spare in self._standbys:
                    if spare.node not in nodes:
                        spare.end()
                self._standbys = [spare for spare in self._standbys if spare.node in nodes and self._is_alive(spare)]
            for node in nodes:
                missing = self._per_node - sum(spare.node == node for spare in self._standbys)
                if self._failures.get(node, 0) < _MOST_FAILURES:
                    self._standbys += [self._started(node) for _ in range(missing)]

    def _started(self, node: str) -> _StandbyProcess:
        events.emit(RunEvent(kind=Kind.STANDBY_STARTED, node=node))
        return _StandbyProcess(node, self._start(node), self._preload)

    def _is_alive(self, spare: _StandbyProcess) -> bool:
        why = spare.check()
        if why is None:
            if spare.ready:
                self._failures.pop(spare.node, None)
            if spare.limitation is not None and not self._reported:
                self._reported = True
                events.emit(RunEvent(kind=Kind.STANDBY_LIMITED, node=spare.node, why=spare.limitation))
            return True
        spare.end()
        events.emit(RunEvent(kind=Kind.STANDBY_LOST, node=spare.node, why=why))
        self._failures[spare.node] = self._failures.get(spare.node, 0) + 1
        if self._failures[spare.node] >= _MOST_FAILURES:
            events.emit(RunEvent(kind=Kind.STANDBY_GIVEN_UP, node=spare.node, why=why))
        return False

    def take(self, node: str, ask: Callable):
        """Removes and returns a standby worker of a node, as (its actor, its answer); None if there is none.

        Args:
            node: Ray's id of the node.
            ask: ask(actor) returns the ref of the answer.
        """
        while True:
            with self._lock:
                candidates = [spare for spare in self._standbys if spare.node == node]
                for spare in candidates:
                    spare.check()
                if not candidates:
                    return None
                spare = next((spare for spare in candidates if spare.ready), candidates[0])
                self._standbys.remove(spare)
            seconds = timeouts.get().idle_answer if spare.ready else timeouts.get().standby_start
            try:
                return spare.actor, ray.get(ask(spare.actor), timeout=seconds)
            except RayError:  # GetTimeoutError is one
                spare.end()

    def close(self) -> None:
        """Ends all standby workers."""
        with self._lock:
            for spare in self._standbys:
                spare.end()
            self._standbys.clear()


class _StandbyProcess:
    """A standby worker.

    Attributes:
        ready: Whether it has completed its start, at the last `check`.
        limitation: The work that it could not do ahead, in one line, or None.
    """

    def __init__(self, node: str, actor, preload: Callable[[], None]):
        self.node, self.actor, self.ready = node, actor, False
        self.limitation: str | None = None
        self._answer = actor.execute.remote(timeouts.call_with, timeouts.get(), preload)

    def check(self) -> str | None:
        """Returns in one line why it is unusable; None as long as no failure is known."""
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            limits = ray.get(self._answer)
        except Exception as error:  # any failure: a process that starts when needed reports it again
            return one_line(user_error(error))
        if not self.ready:
            self.ready, self.limitation = True, limits
        self._answer = self.actor.execute.remote(time.monotonic)
        return None

    def end(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self.actor)
