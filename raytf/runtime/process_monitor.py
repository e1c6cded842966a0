"""Looks after the processes of actors: one that is stopped, or whose host has gone, is named, and ended where asked.

An actor that computes does not answer, and Ray tells a stopped one from it as little as its peers do. Whether it is
stopped is seen from another process of its host: this one, or else an actor that starts there when it is needed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import liveness, logs, procfs, timeouts
from raytf.liveness import StopWatch
from raytf.procfs import Look

logger = logs.get_logger(__name__)

# Who was heard within so many seconds stands not still.
_HEARD_INTERVAL = 3.0
# Between two calls, as far as it counts: a process that was itself stopped meanwhile must not blame others.
_COUNTED_INTERVAL = 3.0


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


@dataclass(frozen=True)
class Frozen:
    """A process that is stopped for too long, or a host that gives no answer.

    Args:
        keys: of the process, or of all those on the host.
        place: of the process, or of one of those.
        seen: the process; None for a host.
        how: a clause that follows "its process is", or the host's name.
    """

    keys: tuple
    place: ProcessLocation
    seen: Look | None
    how: str


@dataclass
class _Watched:
    """A process: where it is, how it stands, when it was heard last, and how it was seen last, if it was."""

    place: ProcessLocation
    watch: StopWatch
    heard: float = -math.inf
    seen: Look | None = None


class ProcessJudge:
    """Judges the looks at processes, each of which has a key; from any thread. Pure.

    Args:
        seconds: of a stop that is one too long.
        clock: gives seconds; for tests.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = liveness.STOPPED_INTERVAL if seconds is None else seconds, clock
        self._lock = threading.Lock()
        self._watched: dict[Any, _Watched] = {}

    def watch(self, key, place: ProcessLocation) -> None:
        """Watches a process, in place of one that had its key before."""
        with self._lock:
            if key not in self._watched or self._watched[key].place != place:
                self._watched[key] = _Watched(place, self._anew())

    def forget(self, key) -> None:
        """No longer watches a process."""
        with self._lock:
            self._watched.pop(key, None)

    def heard(self, *keys) -> None:
        """Says that processes have just answered, or are asked from now on, and need not be looked at for a while."""
        with self._lock:
            for key in self._watched.keys() & keys:
                self._watched[key].heard, self._watched[key].watch = self._clock(), self._anew()

    def begin(self) -> None:
        """Says that all are waited for from now on."""
        self.heard(*list(self._watched))

    def due(self) -> dict[str, list[int]]:
        """The processes that are to be looked at, by node."""
        found: dict[str, list[int]] = {}
        with self._lock:
            for its in self._watched.values():
                if self._clock() - its.heard >= _HEARD_INTERVAL:
                    found.setdefault(its.place.node, []).append(its.place.pid)
        return found

    def judge(self, node: str, seen: Mapping[int, Look | None]) -> list[Frozen]:
        """Takes looks at processes of a node, by their numbers; those that are stopped for too long."""
        found = []
        with self._lock:
            for key, its in self._watched.items():
                look = seen.get(its.place.pid) if its.place.node == node else None
                # it has ended, which Ray notices, or is in a container whose processes are not seen here
                if look is None or look.state in "ZX":
                    continue
                if look.started != (its.place.started or (its.seen or look).started):  # another has its number
                    continue
                its.seen = look
                if (how := its.watch.judge(look)) is not None:
                    found.append(Frozen((key,), its.place, look, how))
        return found

    def standing(self) -> Frozen | None:
        """Who stood still at the last look, for however short; None if nobody did."""
        with self._lock:
            for key, its in self._watched.items():
                if its.watch.stands is not None:
                    return Frozen((key,), its.place, its.seen, its.watch.stands)
        return None

    def of(self, node: str) -> dict[Any, ProcessLocation]:
        """The processes of a node, by key."""
        with self._lock:
            return {key: its.place for key, its in self._watched.items() if its.place.node == node}

    def _anew(self) -> StopWatch:
        return StopWatch(self._seconds, self._clock)


class ProcessMonitor(ProcessJudge):
    """Looks at processes from their own hosts, whenever it is told to; see `ProcessJudge`."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(seconds, clock)
        self._node = ray.get_runtime_context().get_node_id()
        self._hosts: dict[str, _Host] = {}
        self._last, self._look_at = clock(), -math.inf

    def look(self) -> list[Frozen]:
        """Those that are stopped for too long, or whose host gives no answer; to be called about every second."""
        now, due, found = self._clock(), self.due(), []
        passed, self._last = min(now - self._last, _COUNTED_INTERVAL), now
        looks = now >= self._look_at
        if looks:
            self._look_at = now + liveness.LOOK_INTERVAL
        if looks and self._node in due:
            found += self.judge(self._node, procfs.looks(due[self._node]))
        for node in (due.keys() | self._hosts.keys()) - {self._node}:
            host = self._hosts.setdefault(node, _Host(node))
            if (seen := host.answer(passed)) is not None:
                found += self.judge(node, seen)
            if node not in due:
                host.silent = 0.0
            elif host.silent >= host.limit and len(there := self.of(node)) == len(due[node]):
                how = f"has given no answer for {host.silent:.0f} s"
                found.append(Frozen(tuple(there), next(iter(there.values())), None, how))
            elif looks:
                host.ask(due[node])
        return found

    def close(self) -> None:
        """Ends the actors that it has started."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()


class _Watcher:
    """On a host: looks at processes."""

    def looks(self, pids: list[int]) -> dict[int, Look | None]:
        return procfs.looks(pids)


class _Host:
    """Asks an actor on another host for looks, without waiting for it.

    Attributes:
        silent: seconds since it was asked.
    """

    def __init__(self, node: str):
        self._node, self._answered, self.silent = node, False, 0.0
        self._actor = self._asked = None

    @property
    def limit(self) -> float:
        """So long an answer may take."""
        return timeouts.get().host_silent if self._answered else timeouts.get().watcher_start

    def ask(self, pids: list[int]) -> None:
        if self._asked is not None:
            return
        if self._actor is None:
            there = NodeAffinitySchedulingStrategy(self._node, soft=False)
            self._actor = ray.remote(_Watcher).options(num_cpus=0, scheduling_strategy=there).remote()
            self._answered = False
        self._asked, self.silent = self._actor.looks.remote(pids), 0.0

    def answer(self, passed: float) -> dict[int, Look | None] | None:
        """New looks, or None; so many seconds have passed since it was called last."""
        if self._asked is None:
            return None
        if not ray.wait([self._asked], timeout=0)[0]:
            self.silent += passed
            return None
        asked, self._asked, self.silent = self._asked, None, 0.0
        try:
            seen, self._answered = ray.get(asked), True
            return seen
        # where the node has gone, Ray says so of its other actors, too; one that is drained takes no new ones
        except (RayActorError, ActorUnschedulableError):
            self._actor = None
            return None

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = self._asked = None


class Watchdog(ProcessMonitor):
    """Looks at processes in a thread, and ends (SIGKILL) those that are stopped for too long.

    Nobody else would notice them; a host that gives no answer is Ray's to notice.

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
        seconds: float | None = None,
        last_words: Callable[[Any], tuple[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(seconds, clock)
        self._last_words = last_words
        self.kept: dict = {}
        self.ended: dict = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_watchdog")
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self) -> None:
        """Watches nothing any more."""
        self._closed.set()
        self._thread.join()
        super().close()

    def _follow(self) -> None:
        while not self._closed.wait(liveness.LOOK_INTERVAL):
            try:
                self._end([found for found in self.look() if found.seen is not None])
            except Exception:  # what failed once may not fail again, and without this thread nobody looks
                logger.exception("the process monitor could not poll processes")

    def _end(self, frozen: list[Frozen]) -> None:
        words = self._words_of([key for found in frozen for key in found.keys])
        for found in frozen:
            (key,), place = found.keys, found.place
            text = f"its process {place.pid} on {place.host} is {found.how}"
            if key in words:
                more, self.kept[key] = words[key]
                text = f"{text}; {more}" if more else text
            self.ended[key] = text
            self.forget(key)
            if place.node == self._node:
                kill(place.pid, found.seen.started)
            else:
                on(place.node, kill, place.pid, found.seen.started)

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


def kill(pid: int, started: int) -> None:
    """Ends a process of this host if it is still the one that started then; SIGKILL ends stopped ones, too."""
    found = procfs.look(pid)
    if found is not None and found.started == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def on(node: str, function: Callable, *arguments):
    """The ref of what a function gives on a node."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(timeouts.under).options(scheduling_strategy=place)
    return task.remote(timeouts.get(), function, *arguments)
