"""A task of a TensorFlow cluster as a Ray actor: starts a script, forwards its output, and ends it."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from dataclasses import dataclass

from raytf import timeouts
from raytf.launch.bootstrap import SNAPSHOT, STACK, BootOptions
from raytf.liveness import POLL_INTERVAL, StopWatch
from raytf.procfs import read_state
from raytf.runtime import cores, ports, process_monitor, shared_folders
from raytf.runtime.roles import TaskExit
from raytf.runtime.settings import Listening
from raytf.runtime.shared_folders import Folder
from raytf.timeouts import Timeouts

# Seconds after which `TaskRunner.follow` returns at the latest, as a heartbeat for the driver.
BEAT_INTERVAL = 5.0
# Limit of lines that wait for the driver; a script that prints more blocks, as at any pipe.
_LINES = 10_000
_TAIL_LINES = 500
_LONGEST = 1 << 16
# Seconds between two checks whether a silent script has ended.
_TICK_INTERVAL = 0.25
# Seconds for output of processes that a script leaves.
_LAST_INTERVAL = 1.0


@dataclass(frozen=True)
class TaskLocation:
    """Location of a task.

    Args:
        address: Its "host:port".
        folder: Folder in which its script runs.
        claimed: Whether it has claimed cores.
    """

    address: str
    folder: str
    claimed: bool = False

    @property
    def host(self) -> str:
        """Returns the address without the port."""
        return ports.split_address(self.address)[0]


class TaskRunner:
    """Runs a script for a task, in an actor with several threads, so that `stop` works during `follow`."""

    def __init__(self):
        self._script: _Script | None = None
        self._number = 0
        self._location: TaskLocation | None = None

    def reserve(self, folder: Folder, deadlines: Timeouts, allowed: Listening, count: int = 0) -> TaskLocation:
        """Reserves a port for this task, and cores, during the life of this process.

        Args:
            folder: Folder for the script; if this host does not see it, Ray's copy is used.
            deadlines: Timeouts of the driver.
            allowed: Where the task's processes may listen.
            count: Number of cores.
        """
        timeouts.set_current(deadlines)
        self._ports = allowed.ports
        ports.end_claims()  # of the script before: a restart needs no further port
        self._location = TaskLocation(
            address=ports.reserve_address(allowed),
            folder=folder.path if shared_folders.exists_as(folder) else os.getcwd(),
            claimed=cores.claim_cores(count),
        )
        return self._location

    def start(
        self,
        command: list[str],
        module: bool,
        environment: dict[str, str],
        token: bytes,
        frozen_s: float,
        pinned: bool = False,
    ) -> int:
        """Starts the script, after the end of an earlier one; returns its number, for `follow`.

        Args:
            command: Script or module, and its arguments.
            module: Whether it is a module.
            environment: Variables that override this process's.
            token: Token of the ring of all tasks; sent through the pipe, as others can read arguments and environment.
            frozen_s: Seconds for which the script may be stopped before it is ended; infinity never ends it.
            pinned: Whether it is pinned to the claimed cores; otherwise these are released.
        """
        if self._script is not None:
            self._script.end(0.0)
        ports.release_port()
        if not pinned:
            cores.release_cores()
        self._number += 1  # first: a pending `follow` of the earlier script gets nothing of this one
        claimed_cores = sorted(cores.own_cores())
        self._script = _Script(
            command, module, environment, self._location, frozen_s, token, self._ports, claimed_cores
        )
        return self._number

    def follow(self, number: int) -> list[tuple]:
        """Returns new events of the script `number`: ("stdout" or "stderr", line), and last ("exit", `TaskExit`)."""
        lines, events = self._script.events, []
        with contextlib.suppress(queue.Empty):
            if number == self._number:
                events.append(lines.get(timeout=BEAT_INTERVAL))
            while events and len(events) < _LINES:
                events.append(lines.get_nowait())
        return events

    def stopped_exit(self) -> TaskExit | None:
        """Returns the exit of a script that is stopped now, if that lasts; None if it runs, or has ended."""
        return self._script.stopped_exit()

    def process(self) -> process_monitor.ProcessLocation:
        """Returns the location of the script's process."""
        actor_location = process_monitor.current_process()
        seen = read_state(self._script.pid)
        return process_monitor.ProcessLocation(
            actor_location.node, actor_location.host, self._script.pid, seen and seen.started
        )

    def snapshot(self) -> dict | None:
        """Returns the training's snapshot from the script's process; None if it does not answer."""
        snapshot = self._script.ask(SNAPSHOT)
        if snapshot is not None and snapshot["collective"] is not None:
            snapshot["collective"] = tuple(snapshot["collective"])
        return snapshot

    def stack(self) -> str | None:
        """Returns the stacks of the script's process; None if it does not answer."""
        return self._script.ask(STACK)

    def stop(self, grace_s: float) -> None:
        """Ends the script and its child processes: with SIGTERM, and after `grace_s` seconds with SIGKILL."""
        if self._script is not None:
            self._script.end(grace_s)


class _Script:
    """A script's process, with its own queue of events, so that an earlier script's are not mixed in.

    Attributes:
        events: Queue of the events, see `TaskRunner.follow`.
    """

    def __init__(
        self,
        command: list[str],
        module: bool,
        environment: dict[str, str],
        location: TaskLocation,
        frozen_s: float,
        token: bytes,
        allowed: tuple[int, int],
        claimed_cores: list[int],
    ):
        self.events: queue.Queue = queue.Queue(_LINES)
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._started = {"stdout": b"", "stderr": b""}  # lines without an end so far
        self._host = location.host
        alive, self._alive_pipe = os.pipe()
        os.write(self._alive_pipe, token)
        self._request_pipe, request = socket.socketpair()
        self._request_pipe.settimeout(timeouts.get().script_answer)
        self._request_lock, self._request, self._answer_pipe = threading.Lock(), b"", b""
        options = {"ports": allowed, "timeouts": timeouts.get(), "cores": claimed_cores}
        order = BootOptions(alive=alive, request_fd=request.fileno(), module=module, **options)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "raytf.launch.bootstrap", order.text(), *command],
                env={**os.environ, **environment},
                cwd=location.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[alive, request.fileno()],
                start_new_session=True,
            )
        finally:
            os.close(alive)
            request.close()
        self.pid = self._process.pid
        self._watch, self._last_check = StopWatch(frozen_s), time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Forwards the script's output; its exit follows its own last line.

        Processes that it left may hold its pipes forever, so their end is not awaited.
        """
        end = None
        with selectors.DefaultSelector() as pipes, self._process.stdout, self._process.stderr:
            for name in self._started:
                pipes.register(getattr(self._process, name), selectors.EVENT_READ, name)
            deadline = None
            while end is None or (pipes.get_map() and time.monotonic() < deadline):
                for key, _ in self._wait(pipes):
                    if not self._receive(key.data, os.read(key.fd, _LONGEST)):
                        pipes.unregister(key.fileobj)
                if end is None and (end := self._ended()) is not None:
                    deadline = time.monotonic() + _LAST_INTERVAL
                    for key in pipes.get_map().values():
                        self._receive(key.data, _pending_bytes(key.fd))
        for name, remaining in self._started.items():
            if remaining:
                self._put_event(name, remaining)
        self.events.put(("exit", end if end.why else TaskExit(end.code, "\n".join(self._tail))))

    def _wait(self, pipes) -> list:
        if pipes.get_map():
            return pipes.select(_TICK_INTERVAL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its pipes, and continues
            self._process.wait(_TICK_INTERVAL)
        return []

    def _receive(self, name: str, text: bytes) -> bool:
        *lines, remaining = (self._started[name] + text).split(b"\n")
        self._started[name] = remaining
        if len(remaining) > _LONGEST:
            lines, self._started[name] = [*lines, remaining], b""
        for line in lines:
            self._put_event(name, line)
        return bool(text)

    def _put_event(self, name: str, line: bytes) -> None:
        text = line.decode(errors="replace").rpartition("\r")[2]
        if name == "stderr":
            self._tail.append(text)
        self.events.put((name, text))

    def _ended(self) -> TaskExit | None:
        """Returns the script's exit, or None; ends it if it is stopped for too long."""
        if (code := self._process.poll()) is not None:
            return TaskExit(code)
        if time.monotonic() - self._last_check < POLL_INTERVAL:
            return None
        self._last_check = time.monotonic()
        how = self._watch.update(read_state(self._process.pid))
        if how is None or self._process.poll() is not None:
            return None
        end = self._frozen_exit(how)
        self._signal(signal.SIGKILL)
        return end

    def ask(self, question: bytes):
        """Returns the process's answer to a request of `bootstrap`; None if it does not answer in time."""
        with self._request_lock, contextlib.suppress(TimeoutError):
            while True:
                if not self._request:
                    try:
                        self._request_pipe.sendall(question)
                    except OSError:  # it has ended
                        return None
                    self._request = question
                while not self._answer_pipe.endswith(b"\n"):
                    if not (received := self._received()):
                        return None
                    self._answer_pipe += received
                request, answer = self._request, self._answer_pipe
                self._request = self._answer_pipe = b""
                if request == question:  # otherwise a late answer to an earlier request
                    return json.loads(answer)
        return None

    def _received(self) -> bytes:
        try:
            return self._request_pipe.recv(_LONGEST)
        except ConnectionError:
            return b""

    def stopped_exit(self) -> TaskExit | None:
        if self._process.poll() is not None:
            return None
        watch = StopWatch()
        watch.update(read_state(self._process.pid))
        return None if watch.stopped_how is None else self._frozen_exit(watch.stopped_how)

    def _frozen_exit(self, how: str) -> TaskExit:
        why = f"frozen: its process {self._process.pid} on {self._host} is {how} (--frozen-after SECONDS waits longer)"
        return TaskExit(-signal.SIGSTOP, why=why)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, grace_s: float) -> None:
        """Ends the script as `TaskRunner.stop`."""
        for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, timeouts.get().script_killed)):
            self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        alive, self._alive_pipe = self._alive_pipe, None
        if alive is not None:
            os.close(alive)
            self._request_pipe.close()


def _pending_bytes(pipe: int) -> bytes:
    """Returns the bytes that are in a pipe now."""
    count = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    content = b""
    while len(content) < count:
        content += os.read(pipe, count - len(content))
    return content
