"""How a run is told to end: by a signal to its driver, or because a node of it is drained. Driver side.

The first SIGTERM or SIGINT asks for an end after the step that is being made (`worker/ending.py`); a second one ends
everything at once, and so does the first as long as no worker trains, or where a user's own loop makes the steps.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raytf import events, timeouts
from raytf.collectives import healing
from raytf.errors import RaytfError, StoppedError, TrainingError, in_a_line
from raytf.events import Kind, RunEvent
from raytf.runtime import answers
from raytf.storage import checkpoint_files
from raytf.storage.run_folder import RunFolder
from raytf.worker import ending

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE = "ended at once; a run resumes from the last checkpoint that it kept"
# Who ends a group of processes, as `timeout` does, may send a signal to it and to each.
_SAME_INTERVAL = 1.0
# After this it is asked again: a worker group that replaces another knows nothing of it.
_AGAIN_INTERVAL = 5.0


def agree(workers: Sequence, why: str) -> bool:
    """Has all workers end after the same step, the first that they can.

    Args:
        workers: actors with an `execute(function, *arguments)`, all of a group.
        why: `ending.STOP`, `ending.DRAIN` or `ending.RESIZE`.

    Returns:
        Whether any of them has begun a step; else they end after the first.

    Raises:
        NoAnswerError: one stands still.
        RayActorError: one has died.
    """
    asked = [worker.execute.remote(ending.ask, why) for worker in workers]
    seconds = timeouts.get().stop_answer
    begun = max(answers.collect(asked, seconds, "how far a worker is, to end after the same step as others"))
    told = [worker.execute.remote(ending.end_after, begun) for worker in workers]
    answers.collect(told, seconds, "that a worker has heard after which step to end")
    return begun > 0


def _seconds_to_end(workers: Sequence) -> float:
    """How long a step may take to end, and its checkpoint to be written; see `agree`."""
    told = [worker.execute.remote(healing.pace) for worker in workers]
    its = timeouts.get()
    paces = answers.collect(told, its.stop_answer, "how large a worker's training is")
    return timeouts.Pace.slowest(paces).deadline(its.run_end, copies=1) if paces else its.run_end


class Ending:
    """Takes signals while a `with` block runs in the main thread; in another thread none come.

    Args:
        after_step: whether what trains can be asked to end after a step; else the first signal ends it at once.
        signals: those that are taken.
        at_once: what is said then.

    Attributes:
        number: of the first signal that came, or None.
    """

    def __init__(self, after_step: bool = True, signals: Sequence[int] = _SIGNALS, at_once: str = _AT_ONCE):
        self._after_step, self._signals, self._at_once = after_step, signals, at_once
        self.number: int | None = None
        self._since = 0.0
        self._raised: StoppedError | None = None
        self._heard: Callable[[], object] | None = None
        self._changed = threading.Event()
        self._before: dict[int, object] = {}
        self._recording = contextlib.ExitStack()

    def record(self, filesystem, run: str) -> None:
        """Has what happens in this process be recorded in a run's folder, until this ends; see `events.Recorder`."""
        self._recording.enter_context(events.recorded(events.Recorder(filesystem, run)))

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in self._signals}
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        lost = kind is SystemExit and self._raised is not None  # Ray raises it for what is raised while it waits
        error = self._raised if lost else error
        if isinstance(error, StoppedError):  # Python ends with its code, and says nothing
            self._tell(Kind.STOPPED, error.where, error.step)
        self._recording.close()
        if lost:
            raise error from None

    def _hear(self, number, frame) -> None:
        now = time.monotonic()
        if self.number is not None and now - self._since < _SAME_INTERVAL:
            return
        again, self.number, self._since = self.number is not None, self.number or number, now
        if again or self._heard is None or self._heard() is False:
            self._raised = StoppedError(self.number, self._at_once)
            raise self._raised

    @contextlib.contextmanager
    def calls(self, heard: Callable[[], object]) -> Iterator[None]:
        """Within it the first signal calls a function, and what runs ends by itself; at once if that gives False."""
        self._heard = heard
        try:
            yield
        finally:
            self._heard = None

    def tell_request(self, more: str = "ends after this step; a second signal ends it at once") -> None:
        """Says that all are asked to end after a step."""
        self._tell(Kind.STOP_REQUESTED, more)

    def _tell(self, kind: Kind, more: str, step: int | None = None) -> None:
        events.emit(RunEvent(kind=kind, step=step, why=signal.Signals(self.number).name, more=more))

    def result_of(self, ref, workers: Callable[[], object]):
        """What `ray.get(ref)` gives, for a run that a signal is to end well.

        Args:
            ref: of the run's end.
            workers: gives a ref of the actors that train, see `agree`.

        Raises:
            StoppedError: no worker had begun a step.
            TrainingError: the workers did not end.
        """
        future = ref.future()  # Ray looks at signals once in a second only
        future.add_done_callback(lambda _: self._changed.set())
        with self.calls(self._changed.set) if self._after_step else contextlib.nullcontext():
            while not future.done():
                self._changed.wait()
                self._changed.clear()
                if self.number is not None:
                    self._end(future, workers)
            return future.result()

    def _end(self, future, workers: Callable[[], object]) -> None:
        self.tell_request()
        began, seconds = time.monotonic(), timeouts.get().run_end
        while not future.done():
            try:
                there = ray.get(workers(), timeout=timeouts.get().stop_answer)
                begun = there and agree(there, ending.STOP)
                seconds = max(seconds, _seconds_to_end(there))
            except GetTimeoutError:  # Ray Train's controller stands still while it starts workers
                begun = False
            except RayActorError:  # a worker that has just ended, or the controller, whose end is the run's
                begun = True
            except answers.NoAnswerError as error:
                raise TrainingError(None, f"it was to end, and could not: {in_a_line(error)}") from error
            if not begun and not future.done():
                raise StoppedError(self.number, "ended before its workers had begun a step; nothing is lost")
            if time.monotonic() > began + seconds:
                raise TrainingError(None, f"it was to end, and its workers have not within {seconds:.0f} s")
            concurrent.futures.wait([future], _AGAIN_INTERVAL)

    def here(self, train: Callable):
        """Calls a training in this very process; a signal ends it after a step, where that can be."""

        def heard():
            if not ending.gate.ask(ending.STOP):
                raise StoppedError(self.number, "ended before it had begun a step; nothing is lost")
            ending.gate.end_after(ending.gate.ask(ending.STOP))

        ending.gate.reset()
        with self.calls(heard) if self._after_step else contextlib.nullcontext():
            return train()

    def check(self, result, folder: RunFolder) -> None:
        """Raises what a signal has made of a run that has ended without an error; nothing without a signal.

        Where a run was ended without one, a node is drained that it cannot leave, the driver's or that of the
        coordinator of parameter servers: what follows a drain is SIGTERM.

        Raises:
            StoppedError: all steps that were made are kept.
            TrainingError: the last ones are not.
        """
        ended, why = getattr(result, "return_value", None), ""
        if self.number is None:
            if ended is None:
                return
            self.number, why = signal.SIGTERM, "a node that it cannot leave is drained; "
        name = signal.Signals(self.number).name
        if ended is None:
            raise StoppedError(self.number, f"the run {folder.name!r} had made its last step; all is kept")
        step, last = ended["step"], folder.last()
        if last is None or last.step < step:
            kept = "none is" if last is None else f"the last that is is that of step {last.step}"
            why += f"it has ended after step {step}, whose checkpoint is not kept; {kept}"
            raise TrainingError(None, f"{name}: {why}")
        where = checkpoint_files.standing(last.epoch, last.epoch_step)
        raise StoppedError(
            self.number,
            f"{why}the run {folder.name!r} has ended after step {step} ({where}), which is kept; started again with "
            f"this name it resumes at the next",
            step,
        )


def end_of_drained(workers: Sequence, stay: bool) -> None:
    """Has workers end after the same step because a node of theirs is drained; one that has gone already is no news.

    Args:
        workers: see `agree`.
        stay: whether others can take their place; else the run ends, see `Ending.check`.
    """
    _end(workers, ending.DRAIN if stay else ending.STOP, "a node is drained")


def end_of_resized(workers: Sequence) -> bool:
    """Has workers end after the same step because others are to come, or some to go; whether they will."""
    return _end(workers, ending.RESIZE, "the number of workers is to change")


def _end(workers: Sequence, how: str, why: str) -> bool:
    try:
        agree(workers, how)
        return True
    except (RaytfError, RayActorError) as error:
        for worker in workers:  # one is lost: the others are not to wait for a word that does not come
            worker.execute.remote(ending.withdraw, how)
        events.emit(RunEvent(kind=Kind.NOT_TOLD, why=in_a_line(error), more=why))
        return False
