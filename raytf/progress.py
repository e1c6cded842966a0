"""One live line at the driver: epoch, step, loss, accuracy, examples/s, time left. Driver side, no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid

from ray.experimental import internal_kv


class Board:
    """Where the chief writes how far it is and the driver reads it: an entry of Ray's key-value store.

    It needs no process of its own, which would take CPU time from the start of the workers.
    """

    def __init__(self):
        self._key = f"raytf/progress/{uuid.uuid4().hex}".encode()
        self._ended: list[dict] = []

    def write(self, update: dict) -> None:
        """Called by the chief; the ends of epochs are kept."""
        if update["ended"]:
            self._ended.append(update)
        internal_kv._internal_kv_put(self._key, json.dumps({"ended": self._ended, "last": update}).encode(), True)

    def read(self) -> dict | None:
        """{"ended": updates at the ends of epochs, "last": the newest update}, or None before the first."""
        text = internal_kv._internal_kv_get(self._key)
        return json.loads(text) if text else None

    def clear(self) -> None:
        """Called by the driver when the run has ended."""
        internal_kv._internal_kv_del(self._key)


class Line:
    """Shows a board's updates while a `with` block runs: live in a terminal, a line for each epoch elsewhere.

    Args:
        board: a `Board`.
        console: a `rich.console.Console`.
    """

    def __init__(self, board, console):
        self._board, self._console = board, console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._rate = Rate()
        self._printed = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def _follow(self):
        from rich.live import Live
        from rich.text import Text

        live = Live(Text("starting workers ..."), console=self._console, transient=True, refresh_per_second=4)
        with live if self._console.is_terminal else contextlib.nullcontext():
            while True:
                stopping = self._stop.wait(0.2)
                self._show(live, Text)
                if stopping:
                    return

    def _show(self, live, text):
        state = self._board.read()
        if state is None:
            return
        for update in state["ended"][self._printed :]:
            self._console.print(describe(update, *self._rate(update)), highlight=False, soft_wrap=True)
            self._printed += 1
        if not state["last"]["ended"]:
            live.update(text(describe(state["last"], *self._rate(state["last"])), overflow="ellipsis", no_wrap=True))


class Rate:
    """Examples a second and seconds left, from updates in order; called once for each."""

    def __init__(self, clock=time.monotonic):
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def __call__(self, update: dict) -> tuple[float | None, float | None]:
        if not update["steps"]:
            return None, None
        done = (update["epoch"] - 1) * update["steps"] + update["step"]
        now = self._clock()
        if self._first is None or done < self._first[1]:
            self._first = now, done
            return None, None
        seconds, steps = now - self._first[0], done - self._first[1]
        if not steps or seconds <= 0:
            return None, None
        left = update["epochs"] * update["steps"] - done
        return steps * update["rows"] / seconds, left * seconds / steps


def describe(update: dict, rate: float | None, left: float | None) -> str:
    """The progress line of an update."""
    steps = update["steps"] or "?"
    parts = [f"epoch {update['epoch']}/{update['epochs']}", f"step {update['step']}/{steps}"]
    parts += [f"{k} {v:.4f}" for k, v in update["logs"].items() if isinstance(v, float)]
    if rate is not None:
        parts.append(f"{rate:,.0f} examples/s")
    if update["waiting"] is not None:
        parts.append(f"{update['waiting']:.0%} waiting for input")
    if left is not None:
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    return "  ".join(parts)
