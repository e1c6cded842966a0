"""Shows a run's phases before its first step and after its last epoch, as one live line or several lines.

It does not import Ray, whose import is a part of the first phase.
"""

from __future__ import annotations

import os
import sys
import threading
import time

# Seconds below which a phase is not printed outside of a terminal.
_WORTH_A_LINE = 1.0
_FRAMES, _PLAIN_FRAMES, _FRAMES_A_SECOND = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\", 5
# The phases before a run's first step, and after its last epoch.
READING = "reading data"
TRYING = "trying the model"
WORKERS = "starting workers"
FIRST_STEP = "compiling and making the first step"
ENDING = "ending the training"
COMPARING = "comparing what has ended with what is requested"


def importing_phase(module: str) -> str:
    """Returns the phase in which a module of the user's is imported, often with Keras and TensorFlow."""
    return f"importing {module}"


def starting_phase(finished: str | None = None) -> str:
    """Returns the first phase of a run.

    Args:
        finished: Clause for a run that has already ended, or None.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        phase = "looking at the cluster"
    else:
        is_named = os.environ.get("RAY_ADDRESS", "local") != "local"
        phase = "connecting to Ray" if is_named else "finding or starting Ray"
    return phase if finished is None else f"{finished}; {phase} to see that it is this run"


def console():
    """Returns a `rich.console.Console` of stdout. In a notebook it prints plain lines, where rich would print HTML."""
    from rich.console import Console

    automatic = Console()
    return Console(force_jupyter=False, force_terminal=False) if automatic.is_jupyter else automatic


class Phases:
    """Shows the phase of a run and its duration, until the context ends.

    In a terminal it shows a transient live line, elsewhere a line for each phase of at least 1 s. Another thread may
    begin a phase.

    Args:
        console: A `rich.console.Console`, or None to show nothing.
        phase: The first phase, or None.
    """

    def __init__(self, console, phase: str | None = None):
        self._console, self._phase, self._printed = console, phase, None
        self._phase_began, self._text = time.monotonic(), None
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._print_lines, daemon=True, name="raytf_phases")
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
        """Begins a phase; None shows no phase."""
        if phase != self._phase:
            self._phase, self._phase_began, self._text = phase, time.monotonic(), None
            self._changed.set()

    def show(self, text: str) -> None:
        """Shows a text instead of a phase, in a terminal."""
        self._phase, self._text = None, text

    def close(self) -> None:
        """Removes the line; may be called again."""
        with self._closing:
            if self._live is not None:
                self._live.stop()
            self._live, self._ended = None, True
            self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _print_lines(self) -> None:
        """Prints lines, outside of a terminal."""
        while not self._ended:
            phase, began = self._phase, self._phase_began
            remaining = began + _WORTH_A_LINE - time.monotonic()
            waits = phase is not None and phase != self._printed
            if self._changed.wait(max(0.0, remaining) if waits else None):
                self._changed.clear()
            elif phase == self._phase:
                self._printed = phase
                self._console.print(f"{phase} ...", highlight=False, markup=False, soft_wrap=True)

    def __rich__(self):
        """Returns the current text of the live line."""
        from rich.text import Text

        if self._text is not None:
            return Text(self._text, overflow="ellipsis", no_wrap=True)
        if self._phase is None:
            return Text("")
        seconds = time.monotonic() - self._phase_began
        frames = _FRAMES if self._console.encoding.startswith("utf") else _PLAIN_FRAMES
        frame = frames[int(seconds * _FRAMES_A_SECOND) % len(frames)]
        shown = f" {self._phase} ... {seconds:.0f} s" if seconds >= 1 else f" {self._phase} ..."
        return Text.assemble(frame, shown, overflow="ellipsis", no_wrap=True)


def show_phases(shown: bool = True, phase: str | None = None, only_in_terminals: bool = False) -> Phases:
    """Returns the `Phases` of stdout.

    Args:
        shown: Whether to show anything.
        phase: The first phase, or None.
        only_in_terminals: Whether to print nothing outside of a terminal.
    """
    stdout_console = console() if shown else None
    return Phases(
        None if stdout_console is not None and only_in_terminals and not stdout_console.is_terminal else stdout_console,
        phase,
    )


def _live(console, renderable):
    from rich.live import Live

    # a stream to a file or pipe must not be redirected to the terminal
    redirect = {"redirect_stdout": sys.stdout.isatty(), "redirect_stderr": sys.stderr.isatty()}
    return Live(renderable, console=console, transient=True, refresh_per_second=5, **redirect)
