"""Ends a sweep after a step: the driver requests it, trials save and report their last step, and Tune ends.

Trials and driver communicate by values in Ray's key-value store. A trial's actor is busy in a step of Tune's, and
receives no calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from raytf import timeouts
from raytf.console.progress import Entries
from raytf.errors import RaytfError

_POLL_INTERVAL = 0.1
_REQUESTED, _ENDED, _TRIALS = "requested", "over", "trials/"


class NotReleasedError(RaytfError, TimeoutError):
    """A trial has ended on request, but its sweep has not."""


class SweepEnd:
    """The trials' side; it is sent to their actors.

    Args:
        entries: An `Entries`; None creates a new one.
    """

    def __init__(self, entries: Entries | None = None):
        self._entries = Entries("sweep_end") if entries is None else entries

    def is_requested(self) -> bool:
        return self._entries.get(_REQUESTED) is not None

    def record_begun(self, trial: str) -> None:
        """Records that a trial is about to train steps, which are lost unless it ends after one."""
        self._entries.put(_TRIALS + trial, {"ended": False})

    def ended(self, trial: str, step: int | None, is_saved: bool) -> None:
        """Records that a trial has ended, and blocks until Tune ends.

        Args:
            trial: Its id.
            step: Steps that it made in total; None if it has not begun.
            is_saved: Whether they are saved.

        Raises:
            NotReleasedError: Tune does not end.
        """
        self._entries.put(_TRIALS + trial, {"ended": True, "step": step, "is_saved": is_saved})
        # after its end a trial waits for the end of Tune, which waits for all trials
        seconds = 2 * timeouts.get().run_end
        deadline = time.monotonic() + seconds
        while self._entries.get(_ENDED) is None:
            if time.monotonic() > deadline:
                raise NotReleasedError(f"timeout after {seconds:g} s: the sweep's driver did not end as requested")
            time.sleep(_POLL_INTERVAL)

    def request(self) -> None:
        """Requests that all trials end after a step."""
        self._entries.put(_REQUESTED, True)

    def release(self) -> None:
        """Releases the trials that have ended."""
        self._entries.put(_ENDED, True)

    def notes(self, trials: Iterable[str]) -> dict[str, dict | None]:
        """Returns the last record of each trial."""
        return {trial: self._entries.get(_TRIALS + trial) for trial in trials}

    def clear(self) -> None:
        """Removes all records."""
        self._entries.clear()


def working_trials(notes: Mapping[str, dict | None]) -> list[str]:
    """Returns the trials that still make steps; a trial that has not begun has nothing to lose. Pure."""
    return [trial for trial, note in notes.items() if note is not None and not note["ended"]]


def describe_losses(notes: Mapping[str, dict | None]) -> list[str]:
    """Returns the losses, a clause for each trial; pure."""
    lost = [f"trial {trial} has not ended" for trial in working_trials(notes)]
    for trial, note in notes.items():
        if note is not None and note["ended"] and not note["is_saved"]:
            lost.append(f"trial {trial} has stopped after step {note['step']}, and its checkpoint is not saved")
    return lost


class SweepStop:
    """Driver side: requests the end, waits while Tune's loop runs, and then interrupts that.

    Args:
        end: The trials' side.
        interrupt: Ends Tune's loop.
        log: Logs that all trials were requested to end.

    Attributes:
        lost: Clauses of `describe_losses`, after the end.
    """

    def __init__(self, end: SweepEnd, interrupt: Callable[[], object], log: Callable[[str], None]):
        self._end, self._interrupt, self._log = end, interrupt, log
        self._deadline: float | None = None
        self._requested = self._is_over = False
        self.lost: list[str] = []

    def request(self) -> None:
        """Records the request; called in a signal handler."""
        self._requested = True

    def check(self, running: Callable[[], Iterable[str]]) -> None:
        """Checks the trials' progress; called at each turn of Tune's loop.

        Args:
            running: Returns the ids of the running trials.
        """
        if not self._requested or self._is_over:
            return
        if self._deadline is None:
            self._log("the trials stop after this step; a second signal ends them at once")
            self._deadline = time.monotonic() + timeouts.get().run_end
            self._end.request()
        notes = self._end.notes(running())
        if working_trials(notes) and time.monotonic() < self._deadline:
            return
        self._is_over, self.lost = True, describe_losses(notes)
        self._end.release()
        self._interrupt()
