"""Tracks the current phase of training in this process, for the detection of hangs and stragglers.

The training thread stores a few numbers at each change of the phase, in less than 1 us. Another thread of the process
reads them when the driver requests a snapshot. Pure; nothing here blocks.
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

# Phases of a worker. BEGIN: it has not made a step, or its loop is the user's own; END: its loop has returned.
BEGIN, INPUT, STEP, CALLBACKS, CHECKPOINT, DRIVER, VALIDATION, END = (
    "begin",
    "input",
    "step",
    "callbacks",
    "checkpoint",
    "driver",
    "validation",
    "end",
)
# Collectives: SUM within steps, for gradients and all else on the ring; COLLECTIVE between steps; REPORT to Ray.
SUM, COLLECTIVE, REPORT = "sum", "collective", "report"
# The collective in which workers wait for a replacement worker.
RECOVERY = "recovery"
# Time of a step without waits for other workers.
OWN_TIME = "own"
# Clips a step's own time at 1.5 times its median, which moves by 3 % a step, so that single slow steps count little.
_MOST, _FOLLOWS = 1.5, 1.03
# Weight of earlier steps in the moving average of a step's time, and first executions, which compile and do not count.
_OLD, _FIRST = 0.9, 3
# Seconds of a phase after which costly details are read.
_LASTS = 2.0
# Number of innermost frames of a stack that are shown.
_FRAMES = 25
# Prefix of the names of TensorFlow's threads, which wait for nothing but work.
_TENSORFLOWS = "tf_"
# Calls that all workers make, or none.
CALLS = ("", "model.fit()", "model.evaluate()")
# Prefix of the hooks of Keras callbacks.
_HOOK = "on_"


class PhaseTracker:
    """Phase tracker of a process' training.

    Attributes:
        step: Number of training steps made. With several steps per execution it rises once per execution.
        began: Number of steps made before this training, or None until it begins.
        pending_input: Returns for how many seconds the step has waited for its input, or None if it does not wait. The
            reader of the input sets it.
        waited_input: Returns the total seconds for which steps have waited for input.
        queued_writer: Returns the seconds for which the checkpoint writer's process was runnable without a CPU. The
            starter of that process sets it.
        failing_storage: Returns why the storage has not accepted the last checkpoint, or "". The same code sets it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Resets all values for another training in this process."""
        self._now = BEGIN, self._clock()
        self._collective: tuple[str, int, float] | None = None
        self._sequence_numbers = {SUM: 0, COLLECTIVE: 0, REPORT: 0, RECOVERY: 0}
        self.step, self._executions = 0, 0
        self.began: int | None = None
        self._median, self._last = 0.0, 0.0
        self._median_own, self._waited = 0.0, 0.0
        self._spent = dict.fromkeys((STEP, CALLBACKS, CHECKPOINT, SUM, COLLECTIVE, OWN_TIME), 0.0)
        self._thread: threading.Thread | None = None
        self.call = 0  # index in CALLS of the outermost running call
        self.pending_input: Callable[[], float | None] | None = None
        self.waited_input: Callable[[], float] | None = None
        self.queued_writer: Callable[[], float] | None = None
        self.failing_storage: Callable[[], str] | None = None

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Marks the process as in one of `CALLS` until the context ends, unless it is in another one already."""
        outer = self.call
        self.call = outer or CALLS.index(name)
        try:
            yield
        finally:
            self.call = outer

    def register_thread(self) -> None:
        """Registers the calling thread as the training thread."""
        self._thread = threading.current_thread()

    def enter(self, phase: str) -> None:
        """Begins another phase."""
        time_now = self._clock()
        previous, began = self._now
        self._now = phase, time_now
        if previous in (CALLBACKS, STEP, CHECKPOINT):
            self._spent[previous] += time_now - began

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Sets the phase until the context ends, and then restores the outer one."""
        outer = self._now[0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def executed(self, steps: int) -> None:
        """Records that an execution of `steps` training steps has ended; callbacks follow."""
        self.enter(CALLBACKS)
        time_now, self._executions = self._now[1], self._executions + 1
        self.step += steps
        waited = self._spent[SUM] + self._spent[COLLECTIVE]
        if self._executions > _FIRST:
            step_seconds = (time_now - self._last) / steps
            self._median = step_seconds if not self._median else _OLD * self._median + (1 - _OLD) * step_seconds
            own_seconds, self._median_own = clipped(step_seconds - (waited - self._waited) / steps, self._median_own)
            self._spent[OWN_TIME] += own_seconds * steps
        self._last, self._waited = time_now, waited

    def renew(self) -> None:
        """Resumes after a pause that other processes requested, and does not count its time."""
        self._now, self._collective = (self._now[0], self._clock()), None

    def begin_collective(self, kind: str) -> None:
        """Begins the next collective of a kind."""
        number = self._sequence_numbers[kind] = self._sequence_numbers[kind] + 1
        self._collective = kind, number, self._clock()

    def leave(self) -> None:
        """Ends the collective."""
        collective, self._collective = self._collective, None
        if collective is not None and collective[0] in self._spent:
            self._spent[collective[0]] += self._clock() - collective[2]

    def count(self, numbers: Mapping[str, int]) -> None:
        """Sets the sequence numbers of collectives, by kind, in a worker that joins later."""
        self._sequence_numbers.update(numbers)

    @contextlib.contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Calls `begin_collective` and `leave` around a block; a nested collective is a part of the outer one."""
        if self._collective is not None:
            yield
            return
        self.begin_collective(kind)
        try:
            yield
        finally:
            self.leave()

    def seconds_by_phase(self) -> dict[str, float]:
        """Returns the total seconds of phases and collectives; for the training thread."""
        return dict(self._spent)

    def snapshot(self) -> dict[str, Any]:
        """Returns a snapshot of all values, as plain values; from any thread.

        Returns:
            phase, seconds: The phase, and its seconds so far. hook: The callback's hook of a long phase,
            "Class.on_...", or None. collective: (kind, number, seconds) of the collective in which it waits, or None.
            numbers: Sequence numbers of collectives by kind. step, began, usual: Steps made, those before this
            training, and the usual seconds of one.
            spent: Total seconds of "step" with "sum" and "input", of "callbacks" with "collective", of "checkpoint",
            and of "own", see `clipped`.
            processor: CPU seconds of the process. queued: Seconds for which the training thread and TensorFlow's
            threads were runnable without a CPU. In a checkpoint those of its writer are added. None in a short phase,
            or if the kernel does not report it. switches: Context switches of the training thread, or None if not
            known. failing: Why the storage has not accepted the checkpoint that the phase waits for, or "". clock:
            Monotonic seconds.
        """
        time_now = self._clock()
        (phase, began), collective = self._now, self._collective
        seconds, waiting = time_now - began, None
        if phase in (STEP, VALIDATION) and collective is None and self.pending_input is not None and seconds > _LASTS:
            waiting = self.pending_input()
        if waiting is not None:
            phase, seconds = INPUT, min(seconds, waiting)
        waited = 0.0 if self.waited_input is None else self.waited_input()
        return {
            "phase": phase,
            "seconds": seconds,
            "hook": self._hook() if phase == CALLBACKS and seconds > _LASTS else None,
            "collective": None if collective is None else (collective[0], collective[1], time_now - collective[2]),
            "numbers": dict(self._sequence_numbers),
            "step": self.step,
            "began": self.began,
            "usual": self._median,
            "spent": self._spent | {INPUT: waited},
            "processor": time.process_time(),
            "queued": self._queued(phase) if seconds > _LASTS and collective is None else None,
            "switches": self._switches(),
            "failing": self.failing_storage() if phase == CHECKPOINT and self.failing_storage is not None else "",
            "clock": time_now,
        }

    def stack(self) -> str:
        """Returns the Python stacks of the training thread, and of threads in which TensorFlow calls Python."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        training_thread = self._thread.ident if self._thread is not None else threading.main_thread().ident
        parts = []
        for ident, frame in sys._current_frames().items():
            # Python has not started TensorFlow's threads
            from_tensorflow = ident not in names or names[ident].startswith("Dummy")
            if ident != training_thread and (not from_tensorflow or ident == threading.get_ident()):
                continue
            label = "the training" if ident == training_thread else "a function that TensorFlow calls"
            shown = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:]))
            parts.append((ident != training_thread, f"{label}, innermost call last:\n{shown}"))
        return "\n".join(text for _, text in sorted(parts))

    def _hook(self) -> str | None:
        """Returns the outermost callback hook on the stack of the training thread, or None."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread.ident or 0)
        hook = None
        while frame is not None:
            hook = _named(frame) or hook
            frame = frame.f_back
        return hook

    def _queued(self, phase: str) -> float | None:
        """Returns the runnable seconds without a CPU of all threads that this phase waits for, or None."""
        training_thread = None if self._thread is None else self._thread.native_id

        def counts(thread: int) -> bool:
            return thread == training_thread or procfs.thread_name(thread).startswith(_TENSORFLOWS)

        writers = self.queued_writer() if phase == CHECKPOINT and self.queued_writer is not None else 0.0
        try:
            return writers + procfs.total_queued_seconds(counts=counts)
        except OSError:
            return None

    def _switches(self) -> int | None:
        return None if self._thread is None else procfs.switches(self._thread.native_id)


def clipped(seconds: float, usual: float) -> tuple[float, float]:
    """Returns (the step's own seconds, clipped; the updated median): one slow step adds little.

    Args:
        seconds: Seconds of a step.
        usual: The median so far in seconds, or 0 if it is not known.
    """
    if not usual:
        return seconds, seconds
    return min(seconds, _MOST * usual), usual * (_FOLLOWS if seconds > usual else 1 / _FOLLOWS)


def _named(frame: FrameType) -> str | None:
    name, receiver = frame.f_code.co_name, frame.f_locals.get("self")
    is_hook = name.startswith(_HOOK) and receiver is not None and type(receiver).__name__ != "CallbackList"
    return f"{type(receiver).__name__}.{name}" if is_hook else None


# The tracker of the training in this process.
tracker = PhaseTracker()


def snapshot() -> dict[str, Any]:
    """Returns the snapshot of this process' tracker; another process calls it here."""
    return tracker.snapshot()


def stack() -> str:
    """Returns the stacks of this process' training; another process calls it here."""
    return tracker.stack()
