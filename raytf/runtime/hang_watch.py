"""Hang detection of a run: names the worker that others wait for, ends a hung one, and names stragglers.

A thread requests snapshots from the workers' processes about twice a second. Of many workers it polls a part in turn,
or all if one waits or is silent longer than usual. The training thread does not answer, so a worker in a step, a
callback or a lock still does. Another process of its host inspects a worker without an answer.
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
from raytf.runtime.hangs import HangDetector, HangReport, PollOrder
from raytf.runtime.process_monitor import ProcessLocation
from raytf.runtime.stragglers import StragglerDetector

logger = logs.get_logger(__name__)

_CHECK_INTERVAL = 0.5
# Seconds after which no answer to a request is expected soon.
_SILENT_INTERVAL = 2.0
# Limit of a counted pause between two polls: a driver that was itself stopped meanwhile must not blame workers.
_COUNTED_INTERVAL = 2.0
# Seconds between two checks for `close`; work that does not wait takes no longer.
_POLL_INTERVAL = 0.2
# Seconds before the limit at which a report starts, so that the polls before it fit in.
_LEAD_INTERVAL = 1.5
# Number of requests per poll: each takes about 0.5 ms of this process.
_AT_ONCE = 64
# Processor ticks between two polls that a process does not use by answering alone.
_WORKING_TICKS = 20


class HangMonitor:
    """Monitors workers until `close`.

    Args:
        execute: execute(rank, function) calls a function of `activity` in a worker's process, and returns the ref of
            the result. None is no answer.
        locations: Locations of the workers' processes, by rank.
        limit: Seconds after which a hang is reported, see `hangs`.
        first: The same in seconds, until all workers have made a step.
        emit: Function that gets each `RunEvent`; default `events.emit`.
        names: Names of the workers, by rank; default "worker 0" and so on.
        through_others: Whether another process forwards each request, so that its silence does not count.
        made: Number of steps that workers had made before all restarted, see `made`; 0 if they have not.
        clock: Returns seconds; for tests.

    Attributes:
        ended: The error of each worker that ends the run, by rank.
    """

    def __init__(
        self,
        execute: Callable[[int, Callable], Any],
        locations: Mapping[int, ProcessLocation],
        limit: float,
        first: float,
        emit: Callable[[RunEvent], object] = events.emit,
        names: Mapping[int, str] | None = None,
        through_others: bool = False,
        made: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._execute, self._locations, self._emit = execute, dict(locations), emit
        lead = min(_LEAD_INTERVAL, limit / 4)
        self._limit = limit - lead
        self._names = dict(names or {rank: f"worker {rank}" for rank in locations})
        self._detector = HangDetector(self._limit, first, self._names)
        self._finished: dict[int, float] = {}
        self._is_relayed, self._made, self._repeats = through_others, made, made > 0
        self.ended: dict[int, WorkerFrozenError] = {}
        self._snapshots: dict[int, Mapping[str, Any]] = {}
        self._requests: dict[int, Any] = {}
        self._silent: dict[int, float] = {}
        # of silent workers: length of the silence and processor ticks at first sight
        self._ticks: dict[int, tuple[float, int]] = {}
        self._poll_order = PollOrder(_AT_ONCE)
        self._last = clock()
        self._reported: HangReport | None = None
        self._stragglers = StragglerDetector()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_hang_watch")
        self._thread.start()

    def close(self) -> None:
        """Stops monitoring, without waiting for pending answers."""
        self._closed.set()
        # the thread may be reading the stack of a process of this host, which is not needed
        self._thread.join(timeouts.get().hang_watch_end)

    def record_finished(self, rank: int) -> None:
        """Records that a worker's process has ended without an error."""
        with self._lock:
            self._finished.setdefault(rank, self._clock())

    @property
    def made(self) -> int:
        """Number of steps that workers have reported to have made, at least; all restarts included."""
        with self._lock:
            return max([self._made, *(snapshot["step"] for snapshot in self._snapshots.values())])

    def final_report(self, rank: int) -> tuple[str, str]:
        """Returns (a clause about the workers that wait for a worker, its stack), before another process ends it."""
        with self._lock:
            snapshots = dict(self._snapshots)
        return (self._detector.describe_waiting(rank, snapshots) if snapshots else ""), self._stack_from_outside(
            self._locations[rank]
        )

    def _follow(self) -> None:
        while not self._closed.wait(_CHECK_INTERVAL):
            try:
                self._poll()
            except Exception:  # a failure may be temporary, and without this thread nothing detects hangs
                logger.exception("hang detection could not poll the workers, and retries")

    def _poll(self) -> None:
        self._request_snapshots()
        self._report_repeated_steps()
        with self._lock:
            snapshots = dict(self._snapshots) | {
                rank: self._ended_well(rank) for rank in self._finished if rank in self._snapshots
            }
        if self.ended or len(snapshots) < len(self._locations):
            return
        silent, stopped = self._find_silent()
        if self._closed.is_set():
            return
        hang = self._detector.detect(snapshots, silent, stopped)
        reported = self._reported
        answers = reported is not None and reported.rank not in silent
        if hang is None and answers and reported.lasts(snapshots[reported.rank]):
            return
        if reported is not None and (hang is None or (hang.rank, hang.part) != (reported.rank, reported.part)):
            self._detector.record_continued(reported)
            self._emit_event(Kind.WORKER_CONTINUED, reported.rank)
            self._reported = reported = None
        if hang is None:
            self._check_stragglers(snapshots)
            return
        if reported is None or hang.ends:
            location = self._locations[hang.rank]
            # when the storage's error is known, a stack adds nothing
            stack = "" if snapshots[hang.rank]["failing"] else self._stack(hang.rank)
            if self._closed.is_set():
                return
            text = f"its process {location.pid} on {location.host} {hang}"
            if reported is None:
                self._emit_event(Kind.WORKER_HUNG, hang.rank, why=text, more=stack)
            if hang.ends:
                self.ended[hang.rank] = WorkerFrozenError(text, stack)
        self._reported = hang

    def _report_repeated_steps(self) -> None:
        """Reports how many steps are made again, once the restarted workers have begun."""
        began = [snapshot["began"] for snapshot in self._snapshots.values() if snapshot["began"] is not None]
        if self._repeats and began:
            self._repeats = False
            if (steps := self._made - min(began)) > 0:
                self._emit(RunEvent(kind=Kind.STEPS_REPEATED, step=min(began), steps=steps))

    def _check_stragglers(self, snapshots: Mapping[int, Mapping[str, Any]]) -> None:
        slow = None if self._finished else self._stragglers.detect(snapshots)
        if slow is not None:
            self._emit_event(Kind.STRAGGLER, slow.rank, node=self._locations[slow.rank].host, why=str(slow))

    def _emit_event(self, kind: Kind, rank: int, **more) -> None:
        self._emit(RunEvent(kind=kind, ranks=(rank,), name=self._names[rank], **more))

    def _ended_well(self, rank: int) -> Mapping[str, Any]:
        seconds, last = self._clock() - self._finished[rank], self._snapshots[rank]
        clock = last["clock"] + seconds
        return {**last, "phase": activity.END, "collective": None, "seconds": seconds, "clock": clock}

    def _request_snapshots(self) -> None:
        current_time = self._clock()
        passed, self._last = min(current_time - self._last, _COUNTED_INTERVAL), current_time
        done = set(
            ray.wait(list(self._requests.values()), num_returns=len(self._requests), timeout=0)[0]
            if self._requests
            else ()
        )
        ranks = self._locations.keys() - self._finished.keys()
        for rank in ranks & self._requests.keys():
            ref = self._requests[rank]
            answer = self._snapshot_of(ref) if ref in done else None
            if ref in done:
                self._requests.pop(rank)
            if answer is not None:
                with self._lock:
                    self._snapshots |= {rank: answer} if answer else {}
                self._silent.pop(rank, None)
                self._ticks.pop(rank, None)
            elif ref in done or not self._is_relayed:
                self._silent[rank] = self._silent.get(rank, 0.0) + passed
        for rank in self._poll_order.next_ranks(ranks - self._requests.keys(), self._polls_all()):
            with contextlib.suppress(ray.exceptions.RayError):
                self._requests[rank] = self._execute(rank, activity.snapshot)

    def _polls_all(self) -> bool:
        """Returns whether to poll all workers: one may hang, or not all have answered so far."""
        snapshots = self._snapshots.values()
        if max(self._silent.values(), default=0.0) >= _SILENT_INTERVAL or len(self._snapshots) < len(self._locations):
            return True
        waiting = (snapshot["collective"][2] for snapshot in snapshots if snapshot["collective"] is not None)
        lasting = (snapshot["seconds"] for snapshot in snapshots)
        return max(itertools.chain(waiting, lasting), default=0.0) >= self._limit / 2

    @staticmethod
    def _snapshot_of(ref) -> Mapping[str, Any] | None:
        """Returns a worker's snapshot; empty if its process died, which Ray reports; None without an answer."""
        with contextlib.suppress(ray.exceptions.RayError):
            try:
                return ray.get(ref)
            except ray.exceptions.ActorDiedError:
                return {}
        return None

    def _find_silent(self) -> tuple[dict[int, float], dict[int, str]]:
        """Returns (seconds without an answer and without processor use, by rank; how the kernel stops some of them)."""
        seconds_of, stopped = {}, {}
        silent_ranks = [
            rank for rank, seconds in self._silent.items() if seconds >= max(_SILENT_INTERVAL, self._limit / 2)
        ]
        states = self._call_on_hosts(
            {rank: self._locations[rank] for rank in silent_ranks}, procfs.read_state, timeouts.get().stack
        )
        for rank, seconds in self._silent.items():
            if seconds < _SILENT_INTERVAL:
                continue
            seen = states.get(rank)
            if seen is not None:
                start, ticks = self._ticks.setdefault(rank, (seconds, seen.ticks))
                if seen.ticks - ticks >= _WORKING_TICKS:
                    start, _ = self._ticks[rank] = seconds, seen.ticks
                seconds_of[rank] = min(seconds, seconds - start + self._limit / 2)
                if (how := liveness.describe_stop(seen.state)) is not None:
                    stopped[rank] = how
            else:
                seconds_of[rank] = _SILENT_INTERVAL  # lost with its host, perhaps, which Ray notices
        return seconds_of, stopped

    def _stack(self, rank: int) -> str:
        """Returns a worker's stack, from the worker itself or from another process."""
        if rank not in self._silent:
            with contextlib.suppress(ray.exceptions.RayError):
                ref = next(self._as_they_come([self._execute(rank, activity.stack)], timeouts.get().stack), None)
                stack = None if ref is None else ray.get(ref)
                if stack is not None:
                    return stack
        return self._stack_from_outside(self._locations[rank])

    def _stack_from_outside(self, location: ProcessLocation) -> str:
        stack = self._call_on_hosts({0: location}, stacks.stack_of, timeouts.get().far_stack).get(0)
        return stack if stack is not None else "its stack is not known: its host does not answer"

    def _call_on_hosts(
        self, locations: Mapping[int, ProcessLocation], function: Callable, seconds: float
    ) -> dict[int, Any]:
        """Returns a function's result for each process from its host, by rank, without hosts that do not answer.

        All hosts work in parallel, with one deadline after `seconds`.
        """
        node, results, refs = ray.get_runtime_context().get_node_id(), {}, {}
        for rank, location in locations.items():
            if location.node != node:
                refs[process_monitor.call_on_node(location.node, function, location.pid)] = rank
        for rank, location in locations.items():
            if location.node == node:
                results[rank] = function(location.pid)
        for ref in self._as_they_come(list(refs), seconds):
            with contextlib.suppress(ray.exceptions.RayError):
                results[refs[ref]] = ray.get(ref)
        return results

    def _as_they_come(self, refs: list, seconds: float) -> Iterator:
        """Yields refs as they complete within `seconds`, until `close`."""
        deadline, remaining = time.monotonic() + seconds, refs
        while remaining:
            wait = min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))
            ready, remaining = ray.wait(remaining, num_returns=len(remaining), timeout=wait)
            yield from ready
            if self._closed.is_set() or time.monotonic() >= deadline:
                return
