"""What the processes of a run print, at the driver: every line once, with its role and rank. Driver side.

Ray brings the lines of all processes to the driver. It names a line's process by its class and number, and holds lines
back that another process has printed, too. Here a process says its name (`say_who`), and its lines are shown as those
of `raytf run` are. Lines of other processes are left to Ray.
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

_OURS = "raytf "
# A process that may become a worker, and until then at most tries the model.
_CHECK = "model check"
_BEGIN, _END = ":raytf_begin:", ":raytf_end:"
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# What Ray warns of and raytf does on purpose: more processes than cores, and an evaluator that comes back, as the run
# holds what it was made with.
_ON_PURPOSE = re.compile(
    "worker processes have been started on node"
    r"|class name: 'Evaluator' and ID: '\w+' has constructor arguments in the object store"
)
_LOOK_INTERVAL = 0.1
# Ray looks for new lines several times a second, but for that it needs the CPU.
_LAST_INTERVAL, _LAST_OF_FAILED_INTERVAL = 5.0, 1.5


# ------------------------------------------------------------------------------------------ in a run's processes


# Of this process, the last one.
_names: list[str] = []


def say_who(name: str) -> None:
    """Names what this process prints from now on, such as "worker 0"; nothing where it is no process of Ray's."""
    _names[:] = [name]
    _tell(f"{ray_core.LOG_PREFIX_ACTOR_NAME}{_OURS}{name}")


def say_check() -> None:
    """Names a process that may become a worker, unless it is one: the controller may call before the driver does."""
    if not _names:
        say_who(_CHECK)


@contextlib.contextmanager
def telling():
    """Within it this process prints what the driver waits for."""
    _tell(_BEGIN)
    try:
        yield
    finally:
        _tell(_END)


def _tell(line: str) -> None:
    if ray_core.is_worker():
        for stream in (sys.stdout, sys.stderr):
            print(line, file=stream, flush=True)


# ------------------------------------------------------------------------------------------ at the driver


class Output:
    """Shows what a run's processes print, from now until `close`.

    A thread of its own does, as a notebook shows what a thread prints in the cell that started it. Nothing is shown
    where the user has told Ray so (`ray.init(log_to_driver=False)`).

    Args:
        environment: variables of the processes; see `quiet.wants_native`.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._native = quiet.wants_native(environment)
        self._new: collections.deque = collections.deque()
        self._open: set[tuple[str, bool]] = set()
        self._showing, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow_lines, daemon=True)
        _listen()
        _listeners.append(self)
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Shows the last lines of processes that end; what comes later is shown when it comes.

        Args:
            error: of which the run ends, or None; some of its processes then say nothing of their end.
        """
        if self._stop.is_set():
            return
        seconds = _LAST_INTERVAL if error is None else _LAST_OF_FAILED_INTERVAL
        until = time.monotonic() + (0.0 if isinstance(error, KeyboardInterrupt) else seconds)
        while self._open and time.monotonic() < until:
            time.sleep(_LOOK_INTERVAL)
        self._stop.set()
        self._thread.join()
        if len(_listeners) > 1:
            _listeners.remove(self)
        self._show_new()

    def put(self, batch: dict) -> None:
        """Takes lines of a process as Ray hands them on."""
        name, is_error = batch["actor_name"].removeprefix(_OURS), batch["is_err"]
        for line in batch["lines"]:
            if line == _BEGIN:
                self._open.add((name, is_error))
            elif line == _END:
                self._open.discard((name, is_error))
            elif not line and name == _CHECK:
                continue  # a line of nobody's, before the process is a worker
            elif not _ON_PURPOSE.search(line) and (self._native or not native_lines.is_native(line)):
                self._new.append((name, is_error, line))
        if self._stop.is_set():
            self._show_new()

    def _follow_lines(self) -> None:
        while not self._stop.wait(_LOOK_INTERVAL):
            self._show_new()

    def _show_new(self) -> None:
        with self._showing:
            while self._new:
                self._show(*self._new.popleft())

    def _show(self, name: str, is_error: bool, line: str) -> None:
        label = click.style(f"[{name}]", fg=_COLORS[sum(map(ord, name)) % len(_COLORS)])
        # not `err=`: while a live line is shown, it is drawn again below what these streams get
        click.echo(f"{label} {line.rpartition(chr(13))[2]}", file=sys.stderr if is_error else sys.stdout)


# The last one shows what comes when its run has ended.
_listeners: list[Output] = []


def _listen() -> None:
    """Takes the lines of raytf's processes out of what Ray prints, for as long as this process is connected to it."""
    ray_core.take_lines(lambda handler: handler if isinstance(handler, _Sorted) else _Sorted(handler), _print_of_raylet)


def _print_of_raylet(original: Callable, batch: dict, ignore_prefix: bool) -> None:
    """Prints what the raylets of the cluster say, which comes another way, without what is on purpose."""
    if not any(_ON_PURPOSE.search(line) for line in batch["lines"]):
        original(batch, ignore_prefix)


class _Sorted:
    """Hands lines on to who shows them.

    Args:
        rays: Ray's own way.
    """

    def __init__(self, rays):
        self._rays = rays

    def __call__(self, batch: dict) -> None:
        ours = (batch.get("actor_name") or "").startswith(_OURS)
        if ours and not any(RAY_TQDM_MAGIC in line for line in batch["lines"]):
            for listener in _listeners[-1:]:
                listener.put(batch)
        else:
            self._rays(batch)
