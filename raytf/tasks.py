"""A process of a TensorFlow cluster, as a Ray actor: it starts a script, hands on what it prints, and ends it."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

from raytf import ports
from raytf.roles import Exit
from raytf.script import Order

# Lines that wait for the driver; a script that prints more waits, as at any pipe.
_LINES = 10_000
_TAIL_LINES = 500
_LONGEST = 1 << 16


class Runner:
    """Runs a script for a task; in an actor of several threads, so that it can be stopped while it is followed."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._pipe: int | None = None
        self._folder: str | None = None

    def reserve(self, folder: tuple[str, int, int]) -> str:
        """This task's "host:port".

        Args:
            folder: `identity` of the one that the script is to run in; where this host does not see it, Ray's copy.
        """
        self._folder = folder[0] if _seen(folder) else None
        return ports.reserve_address()

    def start(self, command: list[str], module: bool, environment: dict[str, str]) -> None:
        """Starts the script.

        Args:
            command: the script or module and its arguments.
            module: whether it is a module.
            environment: laid over this process's.
        """
        self._lines: queue.Queue = queue.Queue(_LINES)
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._end_pipe()
        alive, self._pipe = os.pipe()
        ports.release_port()
        order = Order(alive=alive, module=module)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "raytf.script", order.text(), *command],
            env={**os.environ, **environment},
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[alive],
            start_new_session=True,
        )
        os.close(alive)
        readers = [
            threading.Thread(target=self._read, args=(name, getattr(self._process, name)), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(self._process, readers), daemon=True).start()

    def _read(self, name: str, pipe) -> None:
        while line := pipe.readline(_LONGEST):
            text = line.decode(errors="replace").rstrip("\n").rpartition("\r")[2]
            if name == "stderr":
                self._tail.append(text)
            self._lines.put((name, text))

    def _wait(self, process, readers) -> None:
        code = process.wait()
        for reader in readers:  # a process that the script left behind may hold them open
            reader.join(1.0)
        self._lines.put(("exit", Exit(code, "\n".join(self._tail))))

    def follow(self) -> list[tuple]:
        """What is new, at least one: ("stdout" or "stderr", line), and at last ("exit", `Exit`)."""
        found = [self._lines.get()]
        with contextlib.suppress(queue.Empty):
            while len(found) < _LINES:
                found.append(self._lines.get_nowait())
        return found

    def stop(self, grace_s: float) -> None:
        """Ends the script and what it started: with SIGTERM, and after `grace_s` seconds with SIGKILL."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._end_pipe()

    def _end_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def identity(folder: str) -> tuple[str, int, int]:
    """A folder's path, and what tells it from another of the same path on another host."""
    found = os.stat(folder)
    return os.path.abspath(folder), found.st_ino, found.st_mtime_ns


def _seen(folder: tuple[str, int, int]) -> bool:
    with contextlib.suppress(OSError):
        return identity(folder[0]) == folder
    return False
