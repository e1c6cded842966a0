"""How a sweep ends after a step: the driver asks, each trial ends after one, keeps it and says so, and Tune ends.

Trials and driver tell each other by values in Ray's key-value store: a trial's actor stands in a step of Tune's, and
hears nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from raytf import timeouts
from raytf.console.progress import Entries
from raytf.errors import RaytfError

_LOOKS_INTERVAL = 0.1
_ASKED, _OVER, _TRIALS = "asked", "over", "trials/"


class NotReleasedError(RaytfError, TimeoutError):
    """A trial has ended as its sweep was to end, and the sweep has not."""


class SweepEnd:
    """What trials see of it; travels to their actors.

    Args:
        entries: an `Entries`, a new one unless it is given.
    """

    def __init__(self, entries: Entries | None = None):
        self._entries = Entries("sweep_end") if entries is None else entries

    def is_asked(self) -> bool:
        return self._entries.get(_ASKED) is not None

    def begun(self, trial: str) -> None:
        """Says that a trial is about to make steps, which are lost unless it ends after one."""
        self._entries.put(_TRIALS + trial, {"ended": False})

    def ended(self, trial: str, step: int | None, kept: bool) -> None:
        """Says that a trial has ended, and waits for the end of Tune.

        Args:
            trial: its id.
            step: steps that it has made in all; None where it has not begun.
            kept: whether they are.

        Raises:
            NotReleasedError: Tune does not end.
        """
        self._entries.put(_TRIALS + trial, {"ended": True, "step": step, "kept": kept})
        # behind its end a trial waits for that of Tune, which waits for all trials
        seconds = 2 * timeouts.get().run_end
        until = time.monotonic() + seconds
        while self._entries.get(_OVER) is None:
            if time.monotonic() > until:
                raise NotReleasedError(f"the sweep was to end, and its driver has not within {seconds:g} s")
            time.sleep(_LOOKS_INTERVAL)

    def ask(self) -> None:
        """Asks all trials to end after a step."""
        self._entries.put(_ASKED, True)

    def release(self) -> None:
        """Lets go of the trials that have ended."""
        self._entries.put(_OVER, True)

    def notes(self, trials: Iterable[str]) -> dict[str, dict | None]:
        """What each of some trials has said last."""
        return {trial: self._entries.get(_TRIALS + trial) for trial in trials}

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


def at_work(notes: Mapping[str, dict | None]) -> list[str]:
    """The trials that still make steps; one that has not begun to has nothing to lose. Pure."""
    return [trial for trial, note in notes.items() if note is not None and not note["ended"]]


def unkept(notes: Mapping[str, dict | None]) -> list[str]:
    """What is lost, a clause for each trial; pure."""
    lost = [f"trial {trial} has not ended" for trial in at_work(notes)]
    for trial, note in notes.items():
        if note is not None and note["ended"] and not note["kept"]:
            lost.append(f"trial {trial} has ended after step {note['step']}, which is not kept")
    return lost


class SweepStop:
    """Driver side: asks, waits while Tune's loop goes on, and then ends that.

    Args:
        end: what the trials see.
        interrupt: ends Tune's loop.
        tell: tells who reads the log that all are asked.

    Attributes:
        lost: clauses of `unkept`, once all is over.
    """

    def __init__(self, end: SweepEnd, interrupt: Callable[[], object], tell: Callable[[str], None]):
        self._end, self._interrupt, self._tell = end, interrupt, tell
        self._until: float | None = None
        self._heard = self._over = False
        self.lost: list[str] = []

    def hear(self) -> None:
        """Called in a signal's handler."""
        self._heard = True

    def look(self, running: Callable[[], Iterable[str]]) -> None:
        """Called at each turn of Tune's loop.

        Args:
            running: gives the ids of the trials that run.
        """
        if not self._heard or self._over:
            return
        if self._until is None:
            self._tell("the trials end after this step; a second signal ends them at once")
            self._until = time.monotonic() + timeouts.get().run_end
            self._end.ask()
        notes = self._end.notes(running())
        if at_work(notes) and time.monotonic() < self._until:
            return
        self._over, self.lost = True, unkept(notes)
        self._end.release()
        self._interrupt()
