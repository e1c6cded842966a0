"""Shows the output of a run's processes at the driver: each line with its role and rank. Driver side.

Ray sends the lines of all processes to the driver. It labels them with class and process id, and drops duplicates of
other processes. Here each process registers a name (`set_output_name`), and its lines are shown as in `raytf run`,
without deduplication. Ray shows the lines of other processes.
"""

from __future__ import annotations

import collections
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping

import click
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC

from raytf.compat import ray_core
from raytf.console import native_lines, quiet

_PREFIX = "raytf "
# Name of a process that may become a worker; until then it only checks the model.
_CHECK = "model check"
_BEGIN, _END = ":raytf_begin:", ":raytf_end:"
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# Warnings of Ray about intended behaviour: more processes than cores, and an evaluator that restarts, as the run keeps
# its constructor arguments.
_ON_PURPOSE = re.compile(
    "worker processes have been started on node"
    r"|class name: 'Evaluator' and ID: '\w+' has constructor arguments in the object store"
)
_CHECK_INTERVAL = 0.1
# Ray polls for new lines several times a second, unless the CPU is busy.
_LAST_INTERVAL, _LAST_OF_FAILED_INTERVAL = 5.0, 1.5


# ------------------------------------------------------------------------------------------ in a run's processes


# The current name of this process.
_names: list[str] = []


def set_output_name(name: str) -> None:
    """Sets the name of this process' further lines, such as "worker 0"; no effect outside of Ray's processes."""
    _names[:] = [name]
    _print_for_driver(f"{ray_core.LOG_PREFIX_ACTOR_NAME}{_PREFIX}{name}")


def mark_as_model_check() -> None:
    """Names a process that may become a worker, unless it is one: it may be one by then."""
    if not _names:
        set_output_name(_CHECK)


@contextlib.contextmanager
def as_status():
    """Marks the lines in the context as those for which the driver waits."""
    _print_for_driver(_BEGIN)
    try:
        yield
    finally:
        _print_for_driver(_END)


def _print_for_driver(line: str) -> None:
    if ray_core.is_worker():
        for stream in (sys.stdout, sys.stderr):
            print(line, file=stream, flush=True)


# ------------------------------------------------------------------------------------------ at the driver


class Output:
    """Shows the output of a run's processes until `close`.

    It has its own thread, as a notebook shows a thread's output in the cell that started the thread. It shows nothing
    after `ray.init(log_to_driver=False)`.

    Args:
        environment: Environment variables of the processes; see `quiet.wants_native`.

    Attributes:
        native: Whether start-up lines of TensorFlow are shown.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.native = quiet.wants_native(environment)
        self._new: collections.deque = collections.deque()
        self._open: set[tuple[str, bool]] = set()
        self._showing, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow_lines, daemon=True)
        _listen()
        _listeners.append(self)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Shows the last lines of ending processes. Later lines are shown on arrival.

        Args:
            error: The error that ends the run, or None. After an error some processes do not mark their end.
        """
        if self._stop.is_set():
            return
        seconds = _LAST_INTERVAL if error is None else _LAST_OF_FAILED_INTERVAL
        deadline = time.monotonic() + (0.0 if isinstance(error, KeyboardInterrupt) else seconds)
        while self._open and time.monotonic() < deadline:
            time.sleep(_CHECK_INTERVAL)
        self._stop.set()
        self._thread.join()
        if len(_listeners) > 1:
            _listeners.remove(self)
        self._show_new()

    def put(self, batch: dict) -> None:
        """Receives lines of a process from Ray."""
        name, is_error = batch["actor_name"].removeprefix(_PREFIX), batch["is_err"]
        for line in batch["lines"]:
            if line == _BEGIN:
                self._open.add((name, is_error))
            elif line == _END:
                self._open.discard((name, is_error))
            elif not line and name == _CHECK:
                continue  # a blank line from before the process is a worker
            elif not _ON_PURPOSE.search(line) and (self.native or not native_lines.is_native(line)):
                self._new.append((name, is_error, line))
        if self._stop.is_set():
            self._show_new()

    def _follow_lines(self) -> None:
        while not self._stop.wait(_CHECK_INTERVAL):
            self._show_new()

    def _show_new(self) -> None:
        with self._showing:
            while self._new:
                self._show(*self._new.popleft())

    def _show(self, name: str, is_error: bool, line: str) -> None:
        label = click.style(f"[{name}]", fg=_COLORS[sum(map(ord, name)) % len(_COLORS)])
        # not `err=`, which bypasses the redirected streams that redraw a live line below the output
        click.echo(f"{label} {line.rpartition(chr(13))[2]}", file=sys.stderr if is_error else sys.stdout)


# The last one also shows the lines that arrive after its run has ended.
_listeners: list[Output] = []


def _listen() -> None:
    """Removes the lines of raytf's processes from Ray's output while this process is connected to Ray."""
    ray_core.take_lines(
        lambda handler: handler if isinstance(handler, _LineRouter) else _LineRouter(handler), _print_of_raylet
    )


def _print_of_raylet(original: Callable, batch: dict, ignore_prefix: bool) -> None:
    """Prints the messages of the cluster's raylets, which have a separate path, without the intended ones."""
    if not any(_ON_PURPOSE.search(line) for line in batch["lines"]):
        original(batch, ignore_prefix)


class _LineRouter:
    """Routes lines to the last `Output`, or to Ray.

    Args:
        rays: Ray's own handler.
    """

    def __init__(self, rays):
        self._rays = rays

    def __call__(self, batch: dict) -> None:
        is_of_raytf = (batch.get("actor_name") or "").startswith(_PREFIX)
        if is_of_raytf and not any(RAY_TQDM_MAGIC in line for line in batch["lines"]):
            for listener in _listeners[-1:]:
                listener.put(batch)
        elif lines := self._shown(batch["lines"]):
            self._rays({**batch, "lines": lines})

    @staticmethod
    def _shown(lines: list[str]) -> list[str]:
        """Returns the lines of other processes, such as Tune's, without start-up lines of TensorFlow."""
        wants_all = not _listeners or _listeners[-1].native
        return [line for line in lines if wants_all or not native_lines.is_native(line)]
