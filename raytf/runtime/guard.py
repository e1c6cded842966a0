"""Looks after the processes of actors that are waited for: one that is stopped, or whose host has gone, is named.

An actor that computes does not answer, and Ray tells a stopped one from it as little as its peers do. Whether it is
stopped is seen from another process of its host: this one, or else an actor that starts when a wait lasts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
import ray.util
from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import liveness, procfs, timeouts
from raytf.errors import RaytfError
from raytf.liveness import StopWatch

# Waits that end sooner need no look.
_PATIENCE_INTERVAL = 5.0
# Between two calls, as far as it counts: a process that was itself stopped meanwhile must not blame others.
_COUNTED_INTERVAL = 3.0


class FrozenError(RaytfError, ConnectionError):
    """A process is stopped, or its host has gone.

    Args:
        name: of the process' role, such as "worker 1".
        why: a clause that follows it.
    """

    def __init__(self, name: str, why: str):
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name} {self.why}"

    def __reduce__(self):
        return type(self), (self.name, self.why)


@dataclass(frozen=True)
class ProcessLocation:
    """Where a process is.

    Args:
        node: Ray's id of its node.
        host: address of that.
        pid: its number there.
        started: `procfs.Look.started`, or None where that is not known.
    """

    node: str
    host: str
    pid: int
    started: int | None


def here() -> ProcessLocation:
    """The place of this process."""
    seen = procfs.look(os.getpid())
    node = ray.get_runtime_context().get_node_id()
    return ProcessLocation(node, ray.util.get_node_ip_address(), os.getpid(), seen and seen.started)


class Guard:
    """Looks after processes while they are waited for; `look` is called about every second meanwhile.

    Args:
        places: of the processes, by name.
        clock: gives seconds; for tests.
    """

    def __init__(self, places: Mapping[str, ProcessLocation], clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._places = {name: place for name, place in places.items() if place.started is not None}
        self._mine = ray.get_runtime_context().get_node_id()
        self._hosts = {place.node: _Host(place) for place in self._places.values() if place.node != self._mine}
        self.begin()

    def begin(self) -> None:
        """Another wait begins."""
        self._watches = {name: StopWatch(liveness.STOPPED_INTERVAL, self._clock) for name in self._places}
        self._waited, self._last, self._due = 0.0, self._clock(), 0.0

    def look(self) -> None:
        """Raises FrozenError for a process that has been stopped for too long, or whose host gives no answer."""
        now = self._clock()
        passed, self._last = min(now - self._last, _COUNTED_INTERVAL), now
        self._waited += passed
        if self._waited < _PATIENCE_INTERVAL:
            return
        due = now >= self._due
        if due:
            self._due = now + liveness.LOOK_INTERVAL
            self._judge(self._mine, procfs.looks(self._pids(self._mine)))
        for node, host in self._hosts.items():
            if host.answer(passed):
                self._judge(node, host.looks)
            if due:
                host.ask(self._pids(node))

    def standing(self) -> FrozenError | None:
        """Who stood still at the last look, for however short; None if nobody did."""
        for name, judge in self._watches.items():
            if judge.stands is not None:
                return FrozenError(name, self._says(name, judge.stands))
        return None

    def close(self) -> None:
        """Ends the actors that it has started."""
        for host in self._hosts.values():
            host.close()

    def _pids(self, node: str) -> list[int]:
        return [place.pid for place in self._places.values() if place.node == node]

    def _judge(self, node: str, seen: Mapping[int, procfs.Look | None]) -> None:
        for name, place in self._places.items():
            if place.node != node:
                continue
            its = seen[place.pid]
            if its is None or its.started != place.started:
                continue  # it has ended, which Ray tells, or is in a container whose processes are not seen here
            how = self._watches[name].judge(its)
            if how is not None:
                raise FrozenError(name, self._says(name, how))

    def _says(self, name: str, how: str) -> str:
        place = self._places[name]
        return f"on {place.host} is frozen: its process {place.pid} is {how}"


class _Watcher:
    """On a host: looks at processes."""

    def looks(self, pids: list[int]) -> dict[int, procfs.Look | None]:
        return procfs.looks(pids)


class _Host:
    """Asks an actor on another host for looks, without waiting for it."""

    def __init__(self, place: ProcessLocation):
        self._place = place
        self._actor = self._asked = None
        self._answered, self._silent = False, 0.0
        self.looks: dict[int, procfs.Look | None] = {}

    def ask(self, pids: list[int]) -> None:
        if self._asked is not None:
            return
        if self._actor is None:
            there = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
            self._actor = ray.remote(_Watcher).options(num_cpus=0, scheduling_strategy=there).remote()
            self._answered = False
        self._asked, self._silent = self._actor.looks.remote(pids), 0.0

    def answer(self, passed: float) -> bool:
        """Whether there are new looks; raises FrozenError if the host gives no answer."""
        if self._asked is None:
            return False
        done, _ = ray.wait([self._asked], timeout=0)
        if done:
            self._asked = None
            try:
                self.looks = ray.get(done[0])
            # where the node has gone, Ray says so of its other actors, too; one that is drained takes no new ones
            except (RayActorError, ActorUnschedulableError):
                self._actor = None
                return False
            self._answered = True
            return True
        self._silent += passed
        if self._silent >= (timeouts.get().host_silent if self._answered else timeouts.get().watcher_start):
            raise FrozenError(f"the host {self._place.host}", f"has given no answer for {self._silent:.0f} s")
        return False

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = self._asked = None
