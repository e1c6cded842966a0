"""Stops a run on a signal to its driver, or when one of its nodes is drained. Driver side.

The first SIGTERM or SIGINT requests a stop after the current step (`worker/stop.py`). A second one stops everything
at once. So does the first one if no worker trains yet, or if a user's own loop makes the steps.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ray.exceptions import RayActorError

from raytf import events, timeouts
from raytf.collectives import recovery_client
from raytf.errors import RaytfError, StoppedError, TrainingError, one_line
from raytf.events import Kind, RunEvent
from raytf.runtime import answers
from raytf.storage import checkpoint_files
from raytf.storage.run_folder import RunFolder
from raytf.worker import stop

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AT_ONCE = "ended at once; a run with a name resumes from its last checkpoint"
# Seconds within which signals count as one: `timeout` may signal both a process and its group.
_SAME_INTERVAL = 1.0
# Seconds after which the request is sent again, as a new worker group has not received it.
_AGAIN_INTERVAL = 5.0


def agree(workers: Sequence, why: str) -> bool:
    """Stops all workers after the same step, the first possible one.

    Args:
        workers: All actors of a group, each with an `execute(function, *arguments)`.
        why: `stop.STOP`, `stop.DRAIN` or `stop.RESIZE`.

    Returns:
        Whether a worker has begun a step; otherwise they stop after the first one.

    Raises:
        NoAnswerError: A worker is frozen.
        RayActorError: A worker has died.
    """
    requests = [worker.execute.remote(stop.request_stop, why) for worker in workers]
    seconds = timeouts.get().stop_answer
    begun = max(answers.collect_answers(requests, seconds, "the current step of each worker"))
    commands = [worker.execute.remote(stop.stop_after, begun) for worker in workers]
    answers.collect_answers(commands, seconds, "the confirmation of the last step")
    return begun > 0


def _seconds_to_end(workers: Sequence) -> float:
    """Returns the seconds that a step may take to end, with its checkpoint; see `agree`."""
    refs = [worker.execute.remote(recovery_client.pace) for worker in workers]
    limits = timeouts.get()
    paces = answers.collect_answers(refs, limits.stop_answer, "the size of the training's state")
    return timeouts.Pace.slowest(paces).deadline(limits.run_end, copies=1) if paces else limits.run_end


class GracefulStop:
    """Handles signals while a `with` block runs in the main thread; other threads receive none.

    Args:
        after_step: Whether the training can stop after a step; otherwise the first signal stops it at once.
        signals: Signals to handle.
        at_once: Message for a stop at once.

    Attributes:
        number: Number of the first signal, or None.
    """

    def __init__(self, after_step: bool = True, signals: Sequence[int] = _SIGNALS, at_once: str = _AT_ONCE):
        self._after_step, self._signals, self._at_once = after_step, signals, at_once
        self.number: int | None = None
        self._received_at = 0.0
        self._raised: StoppedError | None = None
        self._on_request: Callable[[], object] | None = None
        self._changed = threading.Event()
        self._old_handlers: dict[int, object] = {}
        self._recording = contextlib.ExitStack()

    def record(self, filesystem, run: str) -> None:
        """Records the events of this process in a run's folder until the context ends; see `events.Recorder`."""
        self._recording.enter_context(events.recorded(events.Recorder(filesystem, run)))

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        lost = kind is SystemExit and self._raised is not None  # Ray raises it for any error during its waits
        error = self._raised if lost else error
        if isinstance(error, StoppedError):  # Python exits with its code, and prints nothing
            self._emit(Kind.STOPPED, error.status, error.step)
        self._recording.close()
        if lost:
            raise error from None

    def _on_signal(self, number, frame) -> None:
        received_at = time.monotonic()
        if self.number is not None and received_at - self._received_at < _SAME_INTERVAL:
            return
        repeated, self.number, self._received_at = self.number is not None, self.number or number, received_at
        if repeated or self._on_request is None or self._on_request() is False:
            self._raised = StoppedError(self.number, self._at_once)
            raise self._raised

    @contextlib.contextmanager
    def calls(self, on_request: Callable[[], object]) -> Iterator[None]:
        """Calls a function at the first signal, until the context ends; raises at once if it returns False."""
        self._on_request = on_request
        try:
            yield
        finally:
            self._on_request = None

    def emit_stop_requested(self, more: str = "the run stops after this step; a second signal ends it at once") -> None:
        """Emits the event that all workers are requested to stop after a step."""
        self._emit(Kind.STOP_REQUESTED, more)

    def _emit(self, kind: Kind, more: str, step: int | None = None) -> None:
        events.emit(RunEvent(kind=kind, step=step, why=signal.Signals(self.number).name, more=more))

    def result_of(self, future: concurrent.futures.Future, workers: Callable[[], Sequence | None]):
        """Returns the result of a run that a signal stops after a step.

        Args:
            future: The run's result.
            workers: Requests the end of the run, and returns the training actors, see `agree`; None if the loop has
                ended.

        Raises:
            StoppedError: No worker had begun a step.
            TrainingError: The workers did not stop.
        """
        future.add_done_callback(lambda _: self._changed.set())
        with self.calls(self._changed.set) if self._after_step else contextlib.nullcontext():
            while not future.done():
                self._changed.wait()
                self._changed.clear()
                if self.number is not None:
                    self._end(future, workers)
            return future.result()

    def _end(self, future, workers: Callable[[], Sequence | None]) -> None:
        self.emit_stop_requested()
        began, seconds = time.monotonic(), timeouts.get().run_end
        while not future.done():
            try:
                actors = workers()
                if actors is None:  # all steps are made: `check` reports what is saved
                    return
                begun = actors and agree(actors, stop.STOP)
                seconds = max(seconds, _seconds_to_end(actors))
            except RayActorError:  # a worker has just ended
                begun = True
            except answers.NoAnswerError as error:
                raise TrainingError(None, f"it was requested to stop, and could not: {one_line(error)}") from error
            if not begun and not future.done():
                raise StoppedError(self.number, "ended before its workers had begun a step; nothing is lost")
            if time.monotonic() > began + seconds:
                raise TrainingError(None, f"timeout after {seconds:.0f} s: its workers did not stop as requested")
            concurrent.futures.wait([future], _AGAIN_INTERVAL)

    def run_in_process(self, train: Callable):
        """Runs a training in this process; a signal stops it after a step if possible."""

        def on_request():
            if not stop.stop_barrier.request(stop.STOP):
                raise StoppedError(self.number, "ended before it had begun a step; nothing is lost")
            stop.stop_barrier.stop_after(stop.stop_barrier.request(stop.STOP))

        stop.stop_barrier.reset()
        with self.calls(on_request) if self._after_step else contextlib.nullcontext():
            return train()

    def check(self, result, folder: RunFolder) -> None:
        """Raises the error for a run that a signal has stopped; nothing without a signal.

        A run that stopped without a signal could not leave a drained node. It is the node of the driver, or of the
        coordinator of parameter servers. SIGTERM follows a drain.

        Raises:
            StoppedError: All completed steps are saved.
            TrainingError: The last steps are not saved.
        """
        ended, why = getattr(result, "return_value", None), ""
        if self.number is None:
            if ended is None:
                return
            self.number, why = signal.SIGTERM, "a node that it cannot leave is drained; "
        name = signal.Signals(self.number).name
        if ended is None:
            raise StoppedError(
                self.number, f"the run {folder.name!r} had made its last step; its last checkpoint is saved"
            )
        step, last = ended["step"], folder.last()
        if last is None or last.step < step:
            saved = "there is no other one" if last is None else f"the last one is of step {last.step}"
            why += f"it has stopped after step {step}, and the checkpoint of that step is not saved; {saved}"
            raise TrainingError(None, f"{name}: {why}")
        position = checkpoint_files.describe_progress(last.epoch, last.epoch_step)
        raise StoppedError(
            self.number,
            f"{why}the run {folder.name!r} has stopped after step {step} ({position}); checkpoint of step {step} "
            "saved. Start it again with this name to resume at the next step",
            step,
        )


def try_stop(workers: Sequence, how: str, why: str) -> bool:
    """Stops workers after the same step, as `agree`; returns whether they will, and takes the request back otherwise.

    Args:
        workers: Actors, as in `agree`.
        how: `stop.DRAIN` or `stop.RESIZE`; after `stop.STOP` the run ends, see `GracefulStop.check`.
        why: The reason as a clause, for the event of a request that is taken back.
    """
    try:
        agree(workers, how)
        return True
    except (RaytfError, RayActorError) as error:
        for worker in workers:  # one is lost: the others must not wait for the last step
            worker.execute.remote(stop.withdraw_request, how)
        events.emit(RunEvent(kind=Kind.STOP_NOT_DELIVERED, why=one_line(error), more=why))
        return False
