"""Answers of several actors, taken as they come: the first failure ends the wait, and so does a deadline."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from raytf.errors import RaytfError

# Between two calls of what looks after the actors meanwhile.
_LOOK_INTERVAL = 1.0


class NoAnswerError(RaytfError, TimeoutError):
    """Processes did not answer in time.

    Args:
        names: of those that did not.
        seconds: how long they were waited for.
        what: was waited for.
    """

    def __init__(self, names: Sequence[str], seconds: float, what: str):
        super().__init__(list(names), seconds, what)
        self.names, self.seconds, self.what = list(names), seconds, what

    def __str__(self) -> str:
        return f"{', '.join(self.names)} gave no answer within {self.seconds:g} s; waited for: {self.what}"

    def __reduce__(self):
        return type(self), (self.names, self.seconds, self.what)


def collect(
    refs: Sequence,
    seconds: float | None,
    what: str,
    *,
    names: Sequence[str] | None = None,
    look: Callable[[], None] | None = None,
    failure: Callable[[str, Exception], Exception] | None = None,
) -> list:
    """What several actors answer, in the order of `refs`; in place of `ray.get(refs)`, which waits in that order.

    Args:
        refs: an object ref for each actor.
        seconds: deadline for all; None only where `look` or the death of the actors ends the wait.
        what: is waited for, as a clause: "the workers' addresses".
        names: of the actors, for sentences; "worker 0", "worker 1", ... where they are None.
        look: called about every second meanwhile; what it raises ends the wait.
        failure: failure(name, error) is raised in the place of an error; None raises the error, with a note.

    Raises:
        NoAnswerError: not all answered in time.
    """
    names = names or _workers(refs)
    found = [None] * len(refs)
    for index, answer in _settled(refs, seconds, what, names, look):
        try:
            found[index] = answer.result()
        except Exception as error:
            other = error if failure is None else failure(names[index], error)
            if other is not error:
                raise other from error
            error.add_note(f"{names[index]} failed first; waited for: {what}")
            raise
    return found


def as_they_come(
    refs: Sequence,
    seconds: float | None,
    what: str,
    *,
    names: Sequence[str] | None = None,
    look: Callable[[], None] | None = None,
) -> Iterator[tuple[int, object]]:
    """(index, ref) of each of `refs` as soon as it is done, well or not; see `collect`."""
    for index, _ in _settled(refs, seconds, what, names, look):
        yield index, refs[index]


def _settled(refs: Sequence, seconds: float | None, what: str, names, look) -> Iterator[tuple[int, Future]]:
    """Yields (index, future) of each ref as soon as it is done; a wait costs the same however many there are."""
    done: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
    for index, ref in enumerate(refs):
        ref.future().add_done_callback(lambda future, index=index: done.put((index, future)))
    pending = set(range(len(refs)))
    until = None if seconds is None else time.monotonic() + seconds
    while pending:
        left = None if until is None else max(0.0, until - time.monotonic())
        step = left if look is None else min(_LOOK_INTERVAL, _LOOK_INTERVAL if left is None else left)
        try:
            index, answer = done.get(timeout=step)
        except queue.Empty:
            if left == 0:
                late = names or _workers(refs)
                raise NoAnswerError([late[index] for index in sorted(pending)], seconds, what) from None
            if look is not None:
                look()
            continue
        pending.remove(index)
        yield index, answer


def _workers(refs: Sequence) -> list[str]:
    return [f"worker {rank}" for rank in range(len(refs))]
