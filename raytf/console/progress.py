"""One live line at the driver: what a run does before its first step, then epoch, step, loss, examples/s, time left.

No TensorFlow.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid

import ray

from raytf.compat import ray_core

# A phase that is shorter has no line where lines stay.
_WORTH_A_LINE_SECONDS = 1.0
_LOOKS_SECONDS = 0.2
_FRAMES, _PLAIN_FRAMES, _FRAMES_A_SECOND = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\", 5
# The phases before a run's first step, and after its last epoch.
STARTING_RAY, READING, TRYING, WORKERS = "starting Ray", "reading data", "trying the model", "starting workers"
FIRST_STEP, ENDING = "compiling and making the first step", "keeping the last checkpoint and ending workers"


COMPARING = "comparing the run, which has ended, with what is asked for"


def starting(finished: str | None = None) -> str:
    """Returns the first phase of a run.

    Args:
        finished: says that there is nothing left to do, as a clause, or None.
    """
    phase = "looking at the cluster" if ray.is_initialized() else STARTING_RAY
    return phase if finished is None else f"{finished}; {phase} to see that it is this run"


class Entries:
    """JSON values by name in Ray's key-value store, which every process of the cluster reads and writes.

    They need no process of their own, which would take CPU time from the start of the workers, and outlive those that
    wrote them.
    """

    def __init__(self, kind: str):
        self._prefix = f"raytf/{kind}/{uuid.uuid4().hex}/"

    def put(self, name: str, value) -> None:
        ray_core.put(self._prefix + name, json.dumps(value))

    def claim(self, name: str) -> bool:
        """Whether this process is the first to say this name, which is an entry from then on."""
        return not ray_core.put(self._prefix + name, "null", overwrite=False)

    def get(self, name: str):
        """The value, or None."""
        text = ray_core.get(self._prefix + name)
        return json.loads(text) if text else None

    def names(self) -> list[str]:
        return [key.decode().removeprefix(self._prefix) for key in ray_core.keys(self._prefix)]

    def clear(self) -> None:
        ray_core.remove_all(self._prefix)


class Board:
    """Where the chief writes how far it is and the driver reads it.

    Each end of an epoch has an entry of its own, so that a chief that replaces another goes on after its entries, and a
    driver that reads seldom misses none.

    Args:
        entries: an `Entries`, a new one unless it is given.
    """

    def __init__(self, entries=None):
        self._entries = Entries("progress") if entries is None else entries
        self._count: int | None = None
        self._writer = ""

    def write(self, update: dict) -> None:
        """Called by the chief; the ends of epochs are kept."""
        if self._count is None:
            self._writer = uuid.uuid4().hex
            self._count = (self._entries.get("last") or {"count": 0})["count"]
            # a chief that died may not have come to count its last one
            self._count += len(self._ended(self._count))
        update = update | {"at": time.monotonic(), "writer": self._writer}
        if update["ended"]:
            self._entries.put(f"ended/{self._count}", update)
            self._count += 1
        self._entries.put("last", update | {"count": self._count})

    def begin(self, phase: str) -> None:
        """Called by the chief at a phase before its first step; "" for one that is not worth a word."""
        self._entries.put("phase", phase)

    def phase(self) -> str:
        """Returns what the chief does before its first step."""
        phase = self._entries.get("phase")
        return WORKERS if phase is None else phase

    def read(self, first: int = 0) -> tuple[list[dict], dict | None]:
        """(updates at the ends of epochs from the entry `first` on, the newest update or None before the first).

        Each holds, beside what was written, `at`, seconds of the writer's clock, and `writer`, which is another after
        a restart.
        """
        last = self._entries.get("last")
        return self._ended(first), last

    def _ended(self, first: int) -> list[dict]:
        found = []
        while (update := self._entries.get(f"ended/{first + len(found)}")) is not None:
            found.append(update)
        return found

    def clear(self) -> None:
        """Called by the driver when the run has ended."""
        self._entries.clear()


class Reader:
    """Reads a board now and then, as text; not from several threads."""

    def __init__(self, board):
        self._board, self._rate, self._read = board, Rate(), 0

    def new(self) -> tuple[list[str], str | None, str | None]:
        """Returns what is new on the board.

        Returns:
            (a line for each epoch that has ended since the last call, the line of the epoch that runs or None, the
            phase of the run where none does or None where one has ended).
        """
        ended, last = self._board.read(self._read)
        self._read += len(ended)
        lines = [describe(update, *self._rate(update)) for update in ended]
        if last is not None and not last["ended"]:
            return lines, describe(last, *self._rate(last)), None
        if last is not None:
            return lines, None, ENDING if last["epoch"] == last["epochs"] else None
        return lines, None, self._board.phase() or None


def console():
    """A `rich.console.Console` of stdout; in a notebook one that writes lines, where rich would make a page of each."""
    from rich.console import Console

    made = Console()
    return Console(force_jupyter=False, force_terminal=False) if made.is_jupyter else made


class Phases:
    """Shows which phase a run is in while a `with` block runs, and since when.

    In a terminal it is a line that moves and goes; elsewhere a line for each phase that lasts for a second. Another
    thread may begin a phase.

    Args:
        console: see `console`; None shows nothing.
        phase: the first, or None.
    """

    def __init__(self, console, phase: str | None = None):
        self._console, self._phase, self._said = console, phase, None
        self._since, self._text = time.monotonic(), None
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, daemon=True, name="raytf_phases")
        self._closing = threading.Lock()
        self._live = None

    def __enter__(self):
        if self._console is None:
            return self
        if self._console.is_terminal:
            self._live = _live(self._console, self)
            self._live.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *exc):
        self.close()

    def begin(self, phase: str | None) -> None:
        """Goes on to a phase; None for one that is not worth a word."""
        if phase != self._phase:
            self._phase, self._since, self._text = phase, time.monotonic(), None
            self._changed.set()

    def show(self, text: str) -> None:
        """Shows a line instead of a phase, in a terminal."""
        self._phase, self._text = None, text

    def close(self) -> None:
        """Shows nothing any more; may be called again."""
        with self._closing:
            if self._live is not None:
                self._live.stop()
            self._live, self._ended = None, True
            self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        """Writes lines, where there is no terminal."""
        while not self._ended:
            phase, since = self._phase, self._since
            left = since + _WORTH_A_LINE_SECONDS - time.monotonic()
            waits = phase is not None and phase != self._said
            if self._changed.wait(max(0.0, left) if waits else None):
                self._changed.clear()
            elif phase == self._phase:
                self._said = phase
                self._console.print(f"{phase} ...", highlight=False, markup=False)

    def __rich__(self):
        """What a terminal shows now."""
        from rich.text import Text

        if self._text is not None:
            return Text(self._text, overflow="ellipsis", no_wrap=True)
        if self._phase is None:
            return Text("")
        seconds = time.monotonic() - self._since
        frames = _FRAMES if self._console.encoding.startswith("utf") else _PLAIN_FRAMES
        frame = frames[int(seconds * _FRAMES_A_SECOND) % len(frames)]
        shown = f" {self._phase} ... {seconds:.0f} s" if seconds >= 1 else f" {self._phase} ..."
        return Text.assemble(frame, shown, overflow="ellipsis", no_wrap=True)


def phases(shown: bool = True, phase: str | None = None, only_in_terminals: bool = False) -> Phases:
    """Returns the `Phases` of stdout.

    Args:
        shown: show them; else nothing is.
        phase: the first, or None.
        only_in_terminals: write no lines elsewhere.
    """
    made = console() if shown else None
    return Phases(None if made is not None and only_in_terminals and not made.is_terminal else made, phase)


def _live(console, renderable):
    from rich.live import Live

    # what goes to another place than the terminal is not for the terminal
    redirect = {"redirect_stdout": sys.stdout.isatty(), "redirect_stderr": sys.stderr.isatty()}
    return Live(renderable, console=console, transient=True, refresh_per_second=5, **redirect)


class Line:
    """Shows a board's updates while a `with` block runs: live in a terminal, a line for each epoch elsewhere.

    Args:
        board: a `Board`.
        console: see `console`.
    """

    def __init__(self, board, console):
        self._reader, self._console = Reader(board), console
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
            stopping = self._stop.wait(_LOOKS_SECONDS)
            lines, running, phase = self._reader.new()
            for line in lines:
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            if running is not None:
                self._phases.begin(None)
                self._phases.show(running)
            else:
                if lines:
                    self._phases.show("")
                self._phases.begin(phase)
            if stopping:
                return


class Rate:
    """Examples a second and seconds left, from updates in order; called once for each. Time is that of their writer."""

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
        left = update["epochs"] * update["steps"] - done
        return update["rows"] and steps * update["rows"] / seconds, left * seconds / steps


def describe(update: dict, rate: float | None, left: float | None) -> str:
    """The progress line of an update."""
    steps = update["steps"] or "?"
    parts = [f"epoch {update['epoch']}/{update['epochs']}", f"step {update['step']}/{steps}"]
    parts += [f"{k} {v:.4f}" for k, v in update["logs"].items() if isinstance(v, float)]
    if rate is not None:
        parts.append(f"{rate:,.0f} examples/s")
    if update["waiting"] is not None:
        parts.append(f"{update['waiting']:.0%} waiting for input")
    if left is not None and not (update["ended"] and left < 1):
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    return "  ".join(parts)
