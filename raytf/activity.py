"""What the training of this process does, and since when: for whoever is to find out who waits for whom.

The thread that trains stores a few numbers as it goes from one part of a step to the next, which costs less than a
microsecond; another thread of the process reads them (`told`) whenever the driver asks. Pure, and nothing waits here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from raytf import procfs

# What a worker is at. BEGIN: it has not made a step, or its loop is the user's own; END: its loop has returned.
BEGIN, INPUT, STEP, CALLBACKS, CHECKPOINT, CONTROLLER, VALIDATION, END = (
    "begin",
    "input",
    "step",
    "callbacks",
    "checkpoint",
    "controller",
    "validation",
    "end",
)
# Where workers meet: in steps, for gradients and what else goes over the ring; between steps; reports to Ray.
SUM, COLLECTIVE, REPORT = "sum", "collective", "report"
# Where they wait for one that takes a lost one's place.
HEALING = "healing"
# Of a step, what a worker does not wait for others.
OWN = "own"
# So many times its median counts of it, which follows by 3 % a step: what an average is to show comes in all steps.
_MOST, _FOLLOWS = 1.5, 1.03
# Of the time of earlier steps in what a step takes usually; the first ones compile.
_OLD, _FIRST = 0.9, 3
# What is asked for only when it lasts.
_LASTS = 2.0
# Frames of a stack that are shown, the innermost ones.
_FRAMES = 25
# What names of TensorFlow's threads, which wait for nothing but work, begin with.
_TENSORFLOWS = "tf_"
# Calls that all workers make, or none.
CALLS = ("", "model.fit()", "model.evaluate()")
# Hooks of Keras' callbacks.
_HOOK = "on_"


class Activity:
    """What a process' training does.

    Attributes:
        step: training steps that are made; with several steps an execution it rises with executions.
        pending_input: gives for how many seconds the step waits for its input now, or None where it does not; set by
            who reads the input.
        waited_input: gives the seconds for which steps have waited for their input in all.
        queued_writer: gives the seconds for which the process that writes checkpoints was ready to run and had no
            processor; set by who starts that one.
        failing_storage: gives why the storage has not taken the last checkpoint, or ""; set likewise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """For another training in this process."""
        self._now = BEGIN, self._clock()
        self._meeting: tuple[str, int, float] | None = None
        self._numbers = {SUM: 0, COLLECTIVE: 0, REPORT: 0, HEALING: 0}
        self.step, self._executions = 0, 0
        self._usual, self._last = 0.0, 0.0
        self._usual_own, self._waited = 0.0, 0.0
        self._spent = dict.fromkeys((STEP, CALLBACKS, CHECKPOINT, SUM, COLLECTIVE, OWN), 0.0)
        self._thread: threading.Thread | None = None
        self.call = 0  # index in CALLS of the outermost one that it is in
        self.pending_input: Callable[[], float | None] | None = None
        self.waited_input: Callable[[], float] | None = None
        self.queued_writer: Callable[[], float] | None = None
        self.failing_storage: Callable[[], str] | None = None

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Notes in the block that the process is in one of `CALLS`, unless it is in another one already."""
        around = self.call
        self.call = around or CALLS.index(name)
        try:
            yield
        finally:
            self.call = around

    def train_here(self) -> None:
        """Says that the calling thread is the one that trains."""
        self._thread = threading.current_thread()

    def at(self, phase: str) -> None:
        """Goes on to another part."""
        now = self._clock()
        before, since = self._now
        self._now = phase, now
        if before in (CALLBACKS, STEP, CHECKPOINT):
            self._spent[before] += now - since

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """In the block a part stands in the place of the one around it."""
        around = self._now[0]
        self.at(phase)
        try:
            yield
        finally:
            self.at(around)

    def executed(self, steps: int) -> None:
        """An execution of so many training steps has ended; callbacks follow."""
        self.at(CALLBACKS)
        now, self._executions = self._now[1], self._executions + 1
        self.step += steps
        waited = self._spent[SUM] + self._spent[COLLECTIVE]
        if self._executions > _FIRST:
            each = (now - self._last) / steps
            self._usual = each if not self._usual else _OLD * self._usual + (1 - _OLD) * each
            own, self._usual_own = clipped(each - (waited - self._waited) / steps, self._usual_own)
            self._spent[OWN] += own * steps
        self._last, self._waited = now, waited

    def renew(self) -> None:
        """Goes on after a pause that others have asked for, which counts for nothing."""
        self._now, self._meeting = (self._now[0], self._clock()), None

    def enter(self, kind: str) -> None:
        """Is where workers meet, for the next time."""
        number = self._numbers[kind] = self._numbers[kind] + 1
        self._meeting = kind, number, self._clock()

    def leave(self) -> None:
        """All have met."""
        met, self._meeting = self._meeting, None
        if met is not None and met[0] in self._spent:
            self._spent[met[0]] += self._clock() - met[2]

    def count(self, numbers: Mapping[str, int]) -> None:
        """Says how often workers have met, by kind, for one that was not there from the beginning."""
        self._numbers.update(numbers)

    @contextlib.contextmanager
    def meeting(self, kind: str) -> Iterator[None]:
        """`enter` and `leave` around a block; what lies within another meeting is a part of that one."""
        if self._meeting is not None:
            yield
            return
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def spent(self) -> dict[str, float]:
        """Returns the seconds of parts and meetings in all, see `told`; for the thread that trains."""
        return dict(self._spent)

    def told(self) -> dict[str, Any]:
        """All of this as plain values; from any thread.

        Returns:
            phase, seconds: the part, and for how long. hook: the callback that it is in for longer, "Class.on_...".
            meeting: (kind, number, seconds) where it waits for others, else None. numbers: of meetings by kind.
            step, usual: steps that are made, and the seconds that one takes. spent: seconds in all of "step", which
            hold "sum" and "input", of "callbacks", which hold "collective", of "checkpoint", and of "own", see
            `clipped`.
            processor: seconds of processors that the process has used. queued: seconds in which the thread that trains
            and those of TensorFlow, and at a checkpoint the process that writes it, were ready to run and had no
            processor; None in a part that has not lasted long, and where the kernel does not tell. switches: how often
            the thread that trains has given its processor away, None where that is not known. failing: why the storage
            has not taken the checkpoint that it waits for, or "". clock: monotonic seconds.
        """
        now = self._clock()
        (phase, since), met = self._now, self._meeting
        seconds, waiting = now - since, None
        if phase in (STEP, VALIDATION) and met is None and self.pending_input is not None and seconds > _LASTS:
            waiting = self.pending_input()
        if waiting is not None:
            phase, seconds = INPUT, min(seconds, waiting)
        waited = 0.0 if self.waited_input is None else self.waited_input()
        return {
            "phase": phase,
            "seconds": seconds,
            "hook": self._hook() if phase == CALLBACKS and seconds > _LASTS else None,
            "meeting": None if met is None else (met[0], met[1], now - met[2]),
            "numbers": dict(self._numbers),
            "step": self.step,
            "usual": self._usual,
            "spent": self._spent | {INPUT: waited},
            "processor": time.process_time(),
            "queued": self._queued(phase) if seconds > _LASTS and met is None else None,
            "switches": self._switches(),
            "failing": self.failing_storage() if phase == CHECKPOINT and self.failing_storage is not None else "",
            "clock": now,
        }

    def stack(self) -> str:
        """The Python stack of the thread that trains, and of those in which TensorFlow calls Python functions."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        mine = self._thread.ident if self._thread is not None else threading.main_thread().ident
        parts = []
        for ident, frame in sys._current_frames().items():
            # TensorFlow's threads are none that Python has started
            called = ident not in names or names[ident].startswith("Dummy")
            if ident != mine and (not called or ident == threading.get_ident()):
                continue
            what = "the training" if ident == mine else "a function that TensorFlow calls"
            shown = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:]))
            parts.append((ident != mine, f"{what}, innermost call last:\n{shown}"))
        return "\n".join(text for _, text in sorted(parts))

    def _hook(self) -> str | None:
        """The outermost hook of a callback in the thread that trains."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)
        found = None
        while frame is not None:
            found = _named(frame) or found
            frame = frame.f_back
        return found

    def _queued(self, phase: str) -> float | None:
        """The seconds of `procfs.queued` of whoever is to come on in this part; None if they are not told."""
        mine = None if self._thread is None else self._thread.native_id

        def counts(thread: int) -> bool:
            return thread == mine or procfs.thread_name(thread).startswith(_TENSORFLOWS)

        writers = self.queued_writer() if phase == CHECKPOINT and self.queued_writer is not None else 0.0
        try:
            return writers + procfs.queued_in_all(counts=counts)
        except OSError:
            return None

    def _switches(self) -> int | None:
        return None if self._thread is None else procfs.switches(self._thread.native_id)


def clipped(own: float, usual: float) -> tuple[float, float]:
    """(a step's own seconds as far as they count, the median that follows steps): one that takes long adds little.

    Args:
        own: seconds of a step.
        usual: the median so far, 0 where it is not known.
    """
    if not usual:
        return own, own
    return min(own, _MOST * usual), usual * (_FOLLOWS if own > usual else 1 / _FOLLOWS)


def _named(frame: FrameType) -> str | None:
    name, own = frame.f_code.co_name, frame.f_locals.get("self")
    is_hook = name.startswith(_HOOK) and own is not None and type(own).__name__ != "CallbackList"
    return f"{type(own).__name__}.{name}" if is_hook else None


# Of the training in this process.
here = Activity()


def told() -> dict[str, Any]:
    """`Activity.told`, as a function that another process sends here."""
    return here.told()


def stack() -> str:
    """`Activity.stack`, likewise."""
    return here.stack()
