"""Monitors the processes of actors: names stopped processes and lost hosts, and can end stopped processes.

A computing actor does not answer, and neither Ray nor its peers can distinguish it from a stopped one. Another process
of its host can: this one, or an actor that starts there when needed.
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
from raytf.procfs import ProcessState

logger = logs.get_logger(__name__)

# Seconds after an answer in which a process counts as running.
_ALIVE_INTERVAL = 3.0
# Limit of a counted pause between two calls: a driver that was itself stopped meanwhile must not blame others.
_COUNTED_INTERVAL = 3.0


@dataclass(frozen=True)
class ProcessLocation:
    """Location of a process.

    Args:
        node: Ray's id of its node.
        host: Address of the node.
        pid: Its process id.
        started: `procfs.ProcessState.started`, or None if unknown.
    """

    node: str
    host: str
    pid: int
    started: int | None


def current_process() -> ProcessLocation:
    """Returns the location of this process."""
    seen = procfs.read_state(os.getpid())
    node = ray.get_runtime_context().get_node_id()
    return ProcessLocation(node, ray.util.get_node_ip_address(), os.getpid(), seen and seen.started)


@dataclass(frozen=True)
class StoppedProcess:
    """A process that is stopped for too long, or a host without an answer.

    Args:
        keys: Key of the process, or keys of all processes on the host.
        location: Location of the process, or of one of those.
        seen: State of the process; None for a host.
        how: Clause that follows "its process is", or the host's name.
    """

    keys: tuple
    location: ProcessLocation
    seen: ProcessState | None
    how: str


@dataclass
class _MonitoredProcess:
    """A monitored process: its location, its stop watch, the time of its last answer, and its last state, if read."""

    location: ProcessLocation
    watch: StopWatch
    answered_at: float = -math.inf
    seen: ProcessState | None = None


class StopDetector:
    """Finds stopped processes from their polled states, each with a key; from any thread. Pure.

    Args:
        seconds: Length of a stop that is too long.
        clock: Returns seconds; for tests.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = liveness.STOPPED_INTERVAL if seconds is None else seconds, clock
        self._lock = threading.Lock()
        self._watched: dict[Any, _MonitoredProcess] = {}

    def watch(self, key, location: ProcessLocation) -> None:
        """Monitors a process, instead of an earlier one with its key."""
        with self._lock:
            if key not in self._watched or self._watched[key].location != location:
                self._watched[key] = _MonitoredProcess(location, self._new_watch())

    def forget(self, key) -> None:
        """Stops monitoring a process."""
        with self._lock:
            self._watched.pop(key, None)

    def mark_alive(self, *keys) -> None:
        """Records that processes have just answered, or get a request now, so that they need no check for a while."""
        with self._lock:
            for key in self._watched.keys() & keys:
                self._watched[key].answered_at, self._watched[key].watch = self._clock(), self._new_watch()

    def due(self) -> dict[str, list[int]]:
        """Returns the processes that are due for a check, by node."""
        due: dict[str, list[int]] = {}
        with self._lock:
            for process in self._watched.values():
                if self._clock() - process.answered_at >= _ALIVE_INTERVAL:
                    due.setdefault(process.location.node, []).append(process.location.pid)
        return due

    def check_states(self, node: str, states: Mapping[int, ProcessState | None]) -> list[StoppedProcess]:
        """Records states of a node's processes by pid; returns those that are stopped for too long."""
        frozen = []
        with self._lock:
            for key, process in self._watched.items():
                state = states.get(process.location.pid) if process.location.node == node else None
                # it has ended, which Ray notices, or is in a container whose processes are not visible here
                if state is None or state.state in "ZX":
                    continue
                # another process has its pid
                if state.started != (process.location.started or (process.seen or state).started):
                    continue
                process.seen = state
                if (how := process.watch.update(state)) is not None:
                    frozen.append(StoppedProcess((key,), process.location, state, how))
        return frozen

    def stopped_process(self) -> StoppedProcess | None:
        """Returns a process that was stopped at the last check, for any time; None if there is none."""
        with self._lock:
            for key, process in self._watched.items():
                if process.watch.stopped_how is not None:
                    return StoppedProcess((key,), process.location, process.seen, process.watch.stopped_how)
        return None

    def processes_on(self, node: str) -> dict[Any, ProcessLocation]:
        """Returns the processes of a node, by key."""
        with self._lock:
            return {key: process.location for key, process in self._watched.items() if process.location.node == node}

    def _new_watch(self) -> StopWatch:
        return StopWatch(self._seconds, self._clock)


class ProcessMonitor(StopDetector):
    """Checks processes from their own hosts at each call of `check`; see `StopDetector`."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(seconds, clock)
        self._node = ray.get_runtime_context().get_node_id()
        self._hosts: dict[str, _RemoteReader] = {}
        self._last, self._next_check = clock(), -math.inf

    def check(self) -> list[StoppedProcess]:
        """Returns processes that are stopped for too long, or whose host does not answer; called about every second."""
        current_time, due, frozen = self._clock(), self.due(), []
        passed, self._last = min(current_time - self._last, _COUNTED_INTERVAL), current_time
        is_due = current_time >= self._next_check
        if is_due:
            self._next_check = current_time + liveness.POLL_INTERVAL
        if is_due and self._node in due:
            frozen += self.check_states(self._node, procfs.read_states(due[self._node]))
        for node in (due.keys() | self._hosts.keys()) - {self._node}:
            host = self._hosts.setdefault(node, _RemoteReader(node))
            if (seen := host.answer(passed)) is not None:
                frozen += self.check_states(node, seen)
            if node not in due:
                host.silent = 0.0
            elif host.silent >= host.limit and len(processes := self.processes_on(node)) == len(due[node]):
                how = f"has not answered for {host.silent:.0f} s (timeout)"
                frozen.append(StoppedProcess(tuple(processes), next(iter(processes.values())), None, how))
            elif is_due:
                host.ask(due[node])
        return frozen

    def close(self) -> None:
        """Ends the actors that it has started."""
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()


class _StateReader:
    """Reads the states of processes on a host."""

    def read_states(self, pids: list[int]) -> dict[int, ProcessState | None]:
        return procfs.read_states(pids)


class _RemoteReader:
    """Requests states of processes from an actor on another host, without waiting for it.

    Attributes:
        silent: Seconds since the request.
    """

    def __init__(self, node: str):
        self._node, self._answered, self.silent = node, False, 0.0
        self._actor = self._pending = None

    @property
    def limit(self) -> float:
        """Returns the timeout of an answer in seconds."""
        return timeouts.get().host_silent if self._answered else timeouts.get().watcher_start

    def ask(self, pids: list[int]) -> None:
        if self._pending is not None:
            return
        if self._actor is None:
            strategy = NodeAffinitySchedulingStrategy(self._node, soft=False)
            self._actor = ray.remote(_StateReader).options(num_cpus=0, scheduling_strategy=strategy).remote()
            self._answered = False
        self._pending, self.silent = self._actor.read_states.remote(pids), 0.0

    def answer(self, passed: float) -> dict[int, ProcessState | None] | None:
        """Returns new states, or None; `passed` seconds have passed since its last call."""
        if self._pending is None:
            return None
        if not ray.wait([self._pending], timeout=0)[0]:
            self.silent += passed
            return None
        pending, self._pending, self.silent = self._pending, None, 0.0
        try:
            seen, self._answered = ray.get(pending), True
            return seen
        # if the node is lost, Ray reports it for its other actors, too; a draining node rejects new ones
        except (RayActorError, ActorUnschedulableError):
            self._actor = None
            return None

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = self._pending = None


class ProcessKiller(ProcessMonitor):
    """Checks processes in a thread, and ends (SIGKILL) those that are stopped for too long.

    Nothing else would notice them; Ray notices a host that does not answer.

    Args:
        seconds: Length of a stop that is too long.
        final_report: final_report(key) returns (a clause for the message, a result to store) before a process is ended.

    Attributes:
        final_reports: Stored results of `final_report`, by key.
        ended: The reason for each process that it ended, by key: a sentence without a full stop.
        unreachable: The same for processes whose host does not answer; Ray notices that later.
    """

    def __init__(self, seconds: float | None = None, final_report: Callable[[Any], tuple[str, Any]] | None = None):
        super().__init__(seconds)
        self._final_report_of = final_report
        self.final_reports: dict = {}
        self.ended: dict = {}
        self.unreachable: dict = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_process_killer")
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self) -> None:
        """Stops monitoring."""
        self._closed.set()
        self._thread.join()
        super().close()

    def _follow(self) -> None:
        while not self._closed.wait(liveness.POLL_INTERVAL):
            try:
                stopped_processes = self.check()
                self._end([state for state in stopped_processes if state.seen is not None])
                hosts = [state for state in stopped_processes if state.seen is None]
                self.unreachable |= {
                    key: f"the host {host.location.host} {host.how}" for host in hosts for key in host.keys
                }
            except Exception:  # a failure may be temporary, and without this thread nothing checks processes
                logger.exception("the process monitor could not poll processes, and retries")

    def _end(self, frozen: list[StoppedProcess]) -> None:
        words = self._collect_final_reports([key for stopped in frozen for key in stopped.keys])
        for stopped in frozen:
            (key,), location = stopped.keys, stopped.location
            text = f"its process {location.pid} on {location.host} is {stopped.how}"
            if key in words:
                more, self.final_reports[key] = words[key]
                text = f"{text}; {more}" if more else text
            self.ended[key] = text
            self.forget(key)
            if location.node == self._node:
                kill_process(location.pid, stopped.seen.started)
            else:
                call_on_node(location.node, kill_process, location.pid, stopped.seen.started)

    def _collect_final_reports(self, keys: list) -> dict:
        """Returns the results of `final_report` for all keys, with one deadline."""
        if self._final_report_of is None or not keys:
            return {}
        words: dict = {}

        def ask(key) -> None:
            words[key] = self._final_report_of(key)

        threads = [threading.Thread(target=ask, args=(key,), daemon=True, name="raytf_last_words") for key in keys]
        deadline = time.monotonic() + timeouts.get().final_report
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(words)


def kill_process(pid: int, started: int) -> None:
    """Ends a process of this host if it started at `started`; SIGKILL ends stopped ones, too."""
    state = procfs.read_state(pid)
    if state is not None and state.started == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def call_on_node(node: str, function: Callable, *arguments):
    """Returns the ref of a function's result on a node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(timeouts.call_with).options(scheduling_strategy=strategy)
    return task.remote(timeouts.get(), function, *arguments)
