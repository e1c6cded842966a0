"""Results of several actors in order of completion: the first failure or a deadline ends the wait."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from raytf.errors import RaytfError

# Seconds between two calls of `check`.
_CHECK_INTERVAL = 1.0


class NoAnswerError(RaytfError, TimeoutError):
    """Processes did not answer before the deadline.

    Args:
        names: Names of the processes without an answer.
        seconds: Length of the wait.
        action: Awaited result, as a clause.
    """

    def __init__(self, names: Sequence[str], seconds: float, action: str):
        super().__init__(list(names), seconds, action)
        self.names, self.seconds, self.action = list(names), seconds, action

    def __str__(self) -> str:
        return f"timeout after {self.seconds:g} s: {', '.join(self.names)} did not answer; waited for: {self.action}"

    def __reduce__(self):
        return type(self), (self.names, self.seconds, self.action)


def collect_answers(
    refs: Sequence,
    seconds: float | None,
    action: str,
    *,
    names: Sequence[str] | None = None,
    check: Callable[[], None] | None = None,
    failure: Callable[[str, Exception], Exception] | None = None,
) -> list:
    """Returns the results of several actors in the order of `refs`. Unlike `ray.get`, waits for all at once.

    Args:
        refs: An object ref for each actor.
        seconds: Deadline for all; None only if `check` or the death of the actors ends the wait.
        action: Awaited result, as a clause: "the workers' addresses".
        names: Names of the actors for messages; None uses "worker 0", "worker 1", ...
        check: Function that is called about every second during the wait; its exception ends the wait.
        failure: failure(name, error) returns the exception to raise instead of an error; None raises the error with a
            note.

    Raises:
        NoAnswerError: Not all actors answered in time.
    """
    names = names or _workers(refs)
    results = [None] * len(refs)
    for index, answer in _settled(refs, seconds, action, names, check):
        try:
            results[index] = answer.result()
        except Exception as error:
            replacement = error if failure is None else failure(names[index], error)
            if replacement is not error:
                raise replacement from error
            error.add_note(f"{names[index]} failed first; waited for: {action}")
            raise
    return results


def in_completion_order(
    refs: Sequence,
    seconds: float | None,
    action: str,
    *,
    names: Sequence[str] | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[tuple[int, object]]:
    """Yields (index, ref) of each of `refs` as soon as it has completed or failed; see `collect_answers`."""
    for index, _ in _settled(refs, seconds, action, names, check):
        yield index, refs[index]


def _settled(refs: Sequence, seconds: float | None, action: str, names, check) -> Iterator[tuple[int, Future]]:
    """Yields (index, future) of each ref as soon as it is done. The cost of a wait does not depend on their number."""
    done: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
    for index, ref in enumerate(refs):
        ref.future().add_done_callback(lambda future, index=index: done.put((index, future)))
    pending = set(range(len(refs)))
    deadline = None if seconds is None else time.monotonic() + seconds
    while pending:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        step = remaining if check is None else min(_CHECK_INTERVAL, _CHECK_INTERVAL if remaining is None else remaining)
        try:
            index, answer = done.get(timeout=step)
        except queue.Empty:
            if remaining == 0:
                all_names = names or _workers(refs)
                raise NoAnswerError([all_names[index] for index in sorted(pending)], seconds, action) from None
            if check is not None:
                check()
            continue
        pending.remove(index)
        yield index, answer


def _workers(refs: Sequence) -> list[str]:
    return [f"worker {rank}" for rank in range(len(refs))]
