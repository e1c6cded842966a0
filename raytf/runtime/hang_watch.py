"""Watches the workers of a run: says who waits for whom, with its stack, ends what does not go on, and names slow ones.

A thread asks the workers' processes what they do (`activity.told`), about twice a second; of many a part in turn, and
all where one waits or is silent for longer than usual. It is answered by another
thread than the one that trains, so that a worker in a step, a callback or a lock of its own answers all the same; one
that does not is looked at by another process of its host.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from raytf import activity, events, liveness, logs, procfs, timeouts
from raytf.events import Kind, RunEvent
from raytf.runtime import process_monitor, stacks
from raytf.runtime.failures import WorkerFrozenError
from raytf.runtime.hangs import Hang, Judge, Turns
from raytf.runtime.process_monitor import ProcessLocation
from raytf.runtime.stragglers import Stragglers

logger = logs.get_logger(__name__)

_LOOK_INTERVAL = 0.5
# A question that is not answered for so long is one to which no answer comes soon.
_SILENT_INTERVAL = 2.0
# As far as a pause between two looks counts: a process that was itself stopped meanwhile must not blame others.
_COUNTED_INTERVAL = 2.0
# Between two looks whether all is being closed; and what is done then without a wait takes no longer.
_POLL_INTERVAL = 0.2
# What is said comes within the limit, with the looks that lead to it.
_LEAD_INTERVAL = 1.5
# Questions of a look: each takes about half a millisecond of this process.
_AT_ONCE = 64
# Ticks of a processor between two looks that a process does not use by asking and answering alone.
_WORKING_TICKS = 20


class HangWatch:
    """Watches workers until `close`.

    Args:
        execute: execute(rank, function) has a worker's process call it, `activity.told` or `activity.stack`, and gives
            the ref of what it gives; None is no answer.
        places: of the workers' processes, by rank.
        limit: seconds, see `hangs`.
        first: seconds until all workers have made a step.
        emit: takes a `RunEvent`; `events.emit` without.
        names: of the workers, by rank; "worker 0" and so on without.
        through_others: each question goes through another process, whose own silence says nothing of a worker.
        clock: gives seconds; for tests.

    Attributes:
        ended: for each worker that the run is to end by, what is to be said of it.
    """

    def __init__(
        self,
        execute: Callable[[int, Callable], Any],
        places: Mapping[int, ProcessLocation],
        limit: float,
        first: float,
        emit: Callable[[RunEvent], object] = events.emit,
        names: Mapping[int, str] | None = None,
        through_others: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._execute, self._places, self._emit = execute, dict(places), emit
        lead = min(_LEAD_INTERVAL, limit / 4)
        self._limit = limit - lead
        self._names = dict(names or {rank: f"worker {rank}" for rank in places})
        self._judge = Judge(self._limit, first, self._names)
        self._over: dict[int, float] = {}
        self._through_others = through_others
        self.ended: dict[int, WorkerFrozenError] = {}
        self._told: dict[int, Mapping[str, Any]] = {}
        self._asked: dict[int, Any] = {}
        self._silent: dict[int, float] = {}
        self._ticks: dict[int, tuple[float, int]] = {}  # of silent ones, when silence and processor time were noted
        self._turns = Turns(_AT_ONCE)
        self._last = clock()
        self._said: Hang | None = None
        self._stragglers = Stragglers()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_hang_watch")
        self._thread.start()

    def close(self) -> None:
        """Watches nothing any more; what was asked is not waited for."""
        self._closed.set()
        # it may take the stack of a process of this host, of which nothing comes
        self._thread.join(timeouts.get().hang_watch_end)

    def over(self, rank: int) -> None:
        """Says that a worker's process has ended well."""
        with self._lock:
            self._over.setdefault(rank, self._clock())

    def last_words(self, rank: int) -> tuple[str, str]:
        """(who waits for a worker, as a clause; its stack), for one that another one is about to end."""
        with self._lock:
            told = dict(self._told)
        return (self._judge.waiting_for(rank, told) if told else ""), self._stack_from_outside(self._places[rank])

    def _follow(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL):
            try:
                self._look()
            except Exception:  # what failed once may not fail again, and without this thread nobody looks
                logger.exception("hang detection could not poll the workers")

    def _look(self) -> None:
        self._ask()
        with self._lock:
            told = dict(self._told) | {rank: self._ended_well(rank) for rank in self._over if rank in self._told}
        if self.ended or len(told) < len(self._places):
            return
        silent, stopped = self._idle_silent()
        if self._closed.is_set():
            return
        hang = self._judge.look(told, silent, stopped)
        said = self._said
        if said is not None and (hang is None or (hang.rank, hang.part) != (said.rank, said.part)):
            self._judge.went_on(said)
            self._tell(Kind.WORKER_WENT_ON, said.rank)
            self._said = said = None
        if hang is None:
            self._look_for_slow(told)
            return
        if said is None or hang.ends:
            place = self._places[hang.rank]
            # where the storage has said what is wrong, a stack says nothing more
            stack = "" if told[hang.rank]["failing"] else self._stack(hang.rank)
            if self._closed.is_set():
                return
            text = f"its process {place.pid} on {place.host} {hang}"
            if said is None:
                self._tell(Kind.WORKER_HUNG, hang.rank, why=text, more=stack)
            if hang.ends:
                self.ended[hang.rank] = WorkerFrozenError(text, stack)
        self._said = hang

    def _look_for_slow(self, told: Mapping[int, Mapping[str, Any]]) -> None:
        slow = None if self._over else self._stragglers.look(told)
        if slow is not None:
            self._tell(Kind.STRAGGLER, slow.rank, node=self._places[slow.rank].host, why=str(slow))

    def _tell(self, kind: Kind, rank: int, **more) -> None:
        self._emit(RunEvent(kind=kind, ranks=(rank,), name=self._names[rank], **more))

    def _ended_well(self, rank: int) -> Mapping[str, Any]:
        seconds, last = self._clock() - self._over[rank], self._told[rank]
        clock = last["clock"] + seconds
        return {**last, "phase": activity.END, "meeting": None, "seconds": seconds, "clock": clock}

    def _ask(self) -> None:
        now = self._clock()
        passed, self._last = min(now - self._last, _COUNTED_INTERVAL), now
        done = set(
            ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)[0] if self._asked else ()
        )
        ranks = self._places.keys() - self._over.keys()
        for rank in ranks & self._asked.keys():
            ref = self._asked[rank]
            told = self._answer(ref) if ref in done else None
            if ref in done:
                self._asked.pop(rank)
            if told is not None:
                with self._lock:
                    self._told |= {rank: told} if told else {}
                self._silent.pop(rank, None)
                self._ticks.pop(rank, None)
            elif ref in done or not self._through_others:
                self._silent[rank] = self._silent.get(rank, 0.0) + passed
        for rank in self._turns.of(ranks - self._asked.keys(), self._all_at_once()):
            with contextlib.suppress(ray.exceptions.RayError):
                self._asked[rank] = self._execute(rank, activity.told)

    def _all_at_once(self) -> bool:
        """Whether every worker is to be asked now, as one may stand still, or not all have told anything yet."""
        told = self._told.values()
        if max(self._silent.values(), default=0.0) >= _SILENT_INTERVAL or len(self._told) < len(self._places):
            return True
        waiting = (its["meeting"][2] for its in told if its["meeting"] is not None)
        lasting = (its["seconds"] for its in told)
        return max(itertools.chain(waiting, lasting), default=0.0) >= self._limit / 2

    @staticmethod
    def _answer(ref) -> Mapping[str, Any] | None:
        """What a worker told, None where it could not be asked; empty if it has ended, which is Ray's to tell."""
        with contextlib.suppress(ray.exceptions.RayError):
            return ray.get(ref)
        return {}

    def _idle_silent(self) -> tuple[dict[int, float], dict[int, str]]:
        """(seconds of no answer, and no processor used, by rank; how the kernel holds some of these)."""
        found, stopped = {}, {}
        asked = [rank for rank, seconds in self._silent.items() if seconds >= max(_SILENT_INTERVAL, self._limit / 2)]
        looks = self._there({rank: self._places[rank] for rank in asked}, procfs.look, timeouts.get().stack)
        for rank, seconds in self._silent.items():
            if seconds < _SILENT_INTERVAL:
                continue
            seen = looks.get(rank)
            if seen is not None:
                since, ticks = self._ticks.setdefault(rank, (seconds, seen.ticks))
                if seen.ticks - ticks >= _WORKING_TICKS:
                    since, _ = self._ticks[rank] = seconds, seen.ticks
                found[rank] = min(seconds, seconds - since + self._limit / 2)
                if (how := liveness.held(seen.state)) is not None:
                    stopped[rank] = how
            else:
                found[rank] = _SILENT_INTERVAL  # gone with its host, perhaps, which Ray notices
        return found, stopped

    def _stack(self, rank: int) -> str:
        """Told by the worker itself, or taken from outside."""
        if rank not in self._silent:
            with contextlib.suppress(ray.exceptions.RayError):
                ref = next(self._as_they_come([self._execute(rank, activity.stack)], timeouts.get().stack), None)
                told = None if ref is None else ray.get(ref)
                if told is not None:
                    return told
        return self._stack_from_outside(self._places[rank])

    def _stack_from_outside(self, place: ProcessLocation) -> str:
        found = self._there({0: place}, stacks.of, timeouts.get().far_stack).get(0)
        return found if found is not None else "its stack is not known: its host does not answer"

    def _there(self, places: Mapping[int, ProcessLocation], function: Callable, seconds: float) -> dict[int, Any]:
        """What a function of each process gives on its host, by rank, without those of hosts that do not answer.

        All hosts are asked at once, and have so many seconds together.
        """
        node, found, refs = ray.get_runtime_context().get_node_id(), {}, {}
        for rank, place in places.items():
            if place.node != node:
                refs[process_monitor.on(place.node, function, place.pid)] = rank
        for rank, place in places.items():
            if place.node == node:
                found[rank] = function(place.pid)
        for ref in self._as_they_come(list(refs), seconds):
            with contextlib.suppress(ray.exceptions.RayError):
                found[refs[ref]] = ray.get(ref)
        return found

    def _as_they_come(self, refs: list, seconds: float) -> Iterator:
        """Those that are there within so many seconds, until all is being closed."""
        until, left = time.monotonic() + seconds, refs
        while left:
            wait = min(_POLL_INTERVAL, max(0.0, until - time.monotonic()))
            came, left = ray.wait(left, num_returns=len(left), timeout=wait)
            yield from came
            if self._closed.is_set() or time.monotonic() >= until:
                return
