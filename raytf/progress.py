"""One live line at the driver: epoch, step, loss, accuracy, examples/s, time left. Driver side, no TensorFlow."""

from __future__ import annotations

import threading
import time

import ray


@ray.remote(num_cpus=0)
class Board:
    """Where the chief writes how far it is, and the driver reads it."""

    def __init__(self):
        self._updates: list[dict] = []

    def update(self, update: dict) -> None:
        """Keeps the ends of epochs, and of the updates in between the last."""
        if self._updates and not self._updates[-1]["ended"]:
            self._updates.pop()
        self._updates.append(update)

    def take(self) -> list[dict]:
        """The updates since the last call."""
        updates, self._updates = self._updates, []
        return updates


class Line:
    """Shows a board's updates while a `with` block runs: live in a terminal, a line for each epoch elsewhere.

    Args:
        board: handle of a `Board`.
        console: a `rich.console.Console`.
    """

    def __init__(self, board, console):
        self._board, self._console = board, console
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._rate = Rate()

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
        with live if self._console.is_terminal else _Nothing():
            while True:
                stopping = self._stop.wait(0.2)
                try:
                    updates = ray.get(self._board.take.remote())
                except ray.exceptions.RayError:
                    return
                for update in updates:
                    text = describe(update, *self._rate(update))
                    if update["ended"]:
                        self._console.print(text, highlight=False)
                    elif self._console.is_terminal:
                        live.update(Text(text))
                if stopping:
                    return


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


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
    if left is not None:
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    return "  ".join(parts)
