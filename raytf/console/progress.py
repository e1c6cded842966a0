"""Live progress line at the driver: epoch, step, loss, examples/s, time left. Other phases are in `phases.py`.

Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ray.exceptions import RpcError

from raytf import logs, timeouts
from raytf.compat import ray_core
from raytf.console.phases import ENDING, WORKERS, Phases

logger = logs.get_logger(__name__)


class Entries:
    """JSON values by name in Ray's key-value store, which all processes of the cluster read and write.

    They need no actor, which would use CPU time during the start of the workers. They outlive the process that wrote
    them.
    """

    def __init__(self, kind: str):
        self._prefix = f"raytf/{kind}/{uuid.uuid4().hex}/"

    def put(self, name: str, value) -> None:
        ray_core.kv_put(self._prefix + name, json.dumps(value))

    def claim(self, name: str) -> bool:
        """Creates an entry of this name. Returns whether it did not exist; True while the head does not answer."""
        with contextlib.suppress(RpcError):
            return not ray_core.kv_put(self._prefix + name, "null", overwrite=False)
        return True

    def get(self, name: str):
        """Returns the value, or None."""
        text = ray_core.kv_get(self._prefix + name)
        return json.loads(text) if text else None

    def names(self) -> list[str]:
        return [key.decode().removeprefix(self._prefix) for key in ray_core.kv_keys(self._prefix)]

    def clear(self) -> None:
        """Removes all entries; those of a head that does not answer stay until it ends."""
        with contextlib.suppress(RpcError):
            ray_core.kv_remove(self._prefix, timeouts.get().idle_answer)


class Board:
    """Progress of a run, which the chief writes and the driver reads.

    Each end of an epoch is a separate entry. A replacement chief continues after the existing ones, and a driver that
    polls rarely misses none. While the cluster's head does not answer, updates are lost, and the training continues.

    Args:
        entries: An `Entries`, or None for a new one.
    """

    def __init__(self, entries=None):
        self._entries = Entries("progress") if entries is None else entries
        self._count: int | None = None
        self._writer = ""

    def write(self, update: dict) -> None:
        """Writes an update, and keeps it if it ends an epoch; the chief calls it."""
        with contextlib.suppress(RpcError):
            self._write(update)

    def _write(self, update: dict) -> None:
        if self._count is None:
            self._writer = uuid.uuid4().hex
            self._count = (self._entries.get("last") or {"count": 0})["count"]
            # a chief may have died between its last entry and the count
            self._count += len(self._ended(self._count))
        update = {"at": time.monotonic(), **update, "writer": self._writer}
        if update["ended"]:
            self._entries.put(f"ended/{self._count}", update)
            self._count += 1
        self._entries.put("last", update | {"count": self._count})

    def begin(self, phase: str) -> None:
        """Writes a phase before the first step or after the last one, or "" to show none; the chief calls it."""
        with contextlib.suppress(RpcError):
            self._entries.put("phase", phase)

    def phase(self) -> str:
        """Returns the phase of the chief before its first step or after its last one."""
        phase = self._entries.get("phase")
        return WORKERS if phase is None else phase

    def read(self, first: int = 0) -> tuple[list[dict], dict | None]:
        """Returns (epoch-end updates from the entry `first` on, the newest update or None).

        Each update also contains `at`, seconds of the writer's clock, and `writer`, an id that a restart changes.
        """
        last = self._entries.get("last")
        return self._ended(first), last

    def has_steps(self) -> bool:
        """Returns whether a `fit` has shown a step so far; True while the cluster's head does not answer."""
        with contextlib.suppress(RpcError):
            return self._entries.get("last") is not None
        return True

    def _ended(self, first: int) -> list[dict]:
        updates = []
        while (update := self._entries.get(f"ended/{first + len(updates)}")) is not None:
            updates.append(update)
        return updates

    def clear(self) -> None:
        """Removes all entries; the driver calls it when the run has ended."""
        self._entries.clear()


class BoardWriter:
    """Writes to a board in a thread, as the training must not wait for the cluster's head.

    All ends of epochs are written. Of other updates one is left out while an earlier one is being written.

    Args:
        board: A `Board`.
    """

    def __init__(self, board: Board):
        self._board, self._thread = board, ThreadPoolExecutor(1, "raytf_progress")
        self._last: Future[None] | None = None

    def write(self, update: dict) -> None:
        """Writes an update as `Board.write` does."""
        if update["ended"] or self._last is None or self._last.done():
            self._submit(self._board.write, {"at": time.monotonic(), **update})

    def begin(self, phase: str) -> None:
        """Writes a phase as `Board.begin` does."""
        self._submit(self._board.begin, phase)

    def close(self) -> None:
        """Waits until all is written, or the cluster's head has not answered in time."""
        seconds = timeouts.get().head_answer
        try:
            if self._last is not None:
                self._last.result(seconds)
        except TimeoutError:
            logger.warning(
                "Progress is not shown to its end: the cluster's head has not answered for %.0f s (timeout). "
                "The training continues; look at the head's load and memory",
                seconds,
            )
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, write: Callable[[Any], None], value) -> None:
        if self._last is not None and self._last.done():
            self._last.result()  # an error of ours is raised; the head's are not, see Board
        self._last = self._thread.submit(write, value)


class BoardReader:
    """Reader of the new texts of a board; not thread-safe."""

    def __init__(self, board):
        self._board, self._rate, self._read = board, Rate(), 0

    def new_lines(self) -> tuple[list[str], str | None, str | None]:
        """Returns the new texts of the board.

        Returns:
            A tuple of three. The first has a line for each epoch that has ended since the last call. The second is the
            line of the running epoch, or None. The third is the phase of the run if no epoch runs, or None.
        """
        ended, last = self._board.read(self._read)
        self._read += len(ended)
        lines = [describe(update, *self._rate(update)) for update in ended]
        if last is not None and not last["ended"]:
            return lines, describe(last, *self._rate(last)), None
        if last is not None:
            return lines, None, ENDING if last["epoch"] == last["epochs"] or self._board.phase() == ENDING else None
        return lines, None, self._board.phase() or None


# Seconds between two reads of a board.
_POLL_INTERVAL = 0.2
# Seconds without a line after which a running epoch has one, outside of a terminal.
_LONG_EPOCH = 300.0


class ProgressLine:
    """Shows a board's updates until the context ends: live in a terminal, elsewhere a line for each epoch.

    An epoch of more than five minutes has a line every five minutes there.

    Args:
        board: A `Board`.
        console: A `rich.console.Console`.
        clock: Returns seconds; for tests.
    """

    def __init__(self, board, console, clock: Callable[[], float] = time.monotonic):
        self._reader, self._console, self._clock = BoardReader(board), console, clock
        self._printed = clock()
        self._phases = Phases(console, WORKERS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self):
        self._phases.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()
        self._phases.close()

    def _follow(self):
        while True:
            stopping = self._stop.wait(_POLL_INTERVAL)
            with contextlib.suppress(RpcError):  # the cluster's head does not answer now
                self._show(*self._reader.new_lines())
            if stopping:
                return

    def _show(self, lines: list[str], running: str | None, phase: str | None) -> None:
        is_late = running is not None and self._clock() - self._printed >= _LONG_EPOCH
        for line in [*lines, *([running] if is_late and not self._console.is_terminal else [])]:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._printed = self._clock()
        if running is not None:
            self._phases.begin(None)
            self._phases.show(running)
        else:
            if lines:
                self._phases.show("")
            self._phases.begin(phase)


class Rate:
    """Computes examples/s and remaining seconds from updates in order, one call for each, on the writer's clock."""

    def __init__(self):
        self._first: tuple[str, float, int] | None = None

    def __call__(self, update: dict) -> tuple[float | None, float | None]:
        if not update["steps"]:
            return None, None
        done = (update["epoch"] - 1) * update["steps"] + update["step"]
        if self._first is None or update["writer"] != self._first[0] or done < self._first[2]:
            self._first = update["writer"], update["at"], done
            return None, None
        seconds, steps = update["at"] - self._first[1], done - self._first[2]
        if not steps or seconds <= 0:
            return None, None
        remaining = update["epochs"] * update["steps"] - done
        return update["rows"] and steps * update["rows"] / seconds, remaining * seconds / steps


def describe(update: dict, rate: float | None, remaining_seconds: float | None) -> str:
    """Returns the progress line of an update."""
    steps = update["steps"] or "?"
    parts = [f"epoch {update['epoch']}/{update['epochs']}", f"step {update['step']}/{steps}"]
    parts += [metrics] if (metrics := describe_metrics(update["logs"])) else []
    if rate is not None:
        parts.append(f"{rate:,.0f} examples/s")
    if update["waiting"] is not None:
        parts.append(f"{update['waiting']:.0%} waiting for input")
    parts += format_time_left(remaining_seconds)
    return "  ".join(parts)


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """Returns the numbers among metrics, "loss 0.1234  epoch 2"."""
    shown = {name: value for name, value in metrics.items() if isinstance(value, numbers.Real)}
    parts = (f"{k} {v if isinstance(v, numbers.Integral) else format_metric(float(v))}" for k, v in shown.items())
    return "  ".join(parts)


def format_metric(value: float) -> str:
    """Returns a value with four decimals, or with four significant digits if these would hide or blow it up."""
    return f"{value:.4f}" if value == 0 or 0.1 <= abs(value) < 1e6 else f"{value:.4g}"


def format_time_left(seconds: float | None) -> list[str]:
    """Returns "1:15 left" of remaining seconds in a list, which is empty if they are unknown or less than one."""
    if seconds is None or seconds < 1:
        return []
    minutes, seconds = divmod(int(seconds), 60)
    shown = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
    return [f"{shown} left"]
