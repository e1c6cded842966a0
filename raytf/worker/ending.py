"""Ending a training after the same step on all workers, when their run is told to end. On a worker; no TensorFlow.

Workers are asked for the executions that they have begun: from then on none begins another before it is told which one
is the last. That is the largest of the answers, so that none is past it, and none waits in it for another. All
this takes two messages, and nothing of the time of a training that nobody ends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError

from raytf import timeouts
from raytf.errors import RaytfError

STOP, DRAIN, RESIZE = "stop", "drain", "resize"
# Why workers end after a step to go on elsewhere, or with others.
_MOVES = {DRAIN: "a node of the run is drained", RESIZE: "the number of workers changes"}


class StopTraining(BaseException):
    """Ends `model.fit` after a step; no `except Exception` of the user's holds it up.

    Args:
        why: STOP, DRAIN or RESIZE.
        step: steps that are made in all.
    """

    def __init__(self, why: str, step: int):
        super().__init__(why, step)
        self.why, self.step = why, step


class MovedError(RayActorError):
    """The workers have ended after the same step, for the run to go on with others: to Ray Train a loss of a node.

    Args:
        step: steps that are made in all.
        why: DRAIN, of a worker's node, or RESIZE.
    """

    def __init__(self, step: int, why: str = DRAIN):
        text = f"{_MOVES[why]}; all workers have ended after step {step}, from which the run resumes"
        super().__init__(error_msg=text, preempted=True)
        self.step, self.why = step, why

    def __reduce__(self):
        return type(self), (self.step, self.why)


class NotToldError(RaytfError, TimeoutError):
    """A worker was asked to end, and not told after which step."""


class Gate:
    """Between the thread that trains and those that ask it to end.

    Attributes:
        why: STOP, DRAIN or RESIZE, or None as long as nobody asks.
    """

    def __init__(self):
        self._changed = threading.Condition(threading.RLock())  # a signal's handler runs in the training's own thread
        self.reset()

    def reset(self) -> None:
        """Forgets what was asked: for another training in this process."""
        with self._changed:
            self._asked: list[str] = []
            self._begun, self._end_after = 0, None

    @property
    def why(self) -> str | None:
        return self._asked[0] if self._asked else None

    def ask(self, why: str) -> int:
        """The executions of steps that have begun, or begin without another look here; 0 before the training."""
        with self._changed:
            self._asked.append(why)
            return self._begun

    def end_after(self, executions: int) -> None:
        """Says after how many executions to end: the most that any worker has begun; at least one.

        A word that comes when the training that was asked has ended, and its process stays, is none for the next one.
        """
        with self._changed:
            if not self._asked:
                return
            self._end_after = self._end_after or max(1, executions)
            self._changed.notify_all()

    def withdraw(self, why: str) -> None:
        """Takes an `ask` back, unless it was said after which execution to end."""
        with self._changed:
            if self._end_after is None and why in self._asked:
                self._asked.remove(why)
                self._changed.notify_all()

    def begin(self, told: Mapping[str, Any] | None = None) -> None:
        """Called as a training begins: its first execution is sure to come.

        Args:
            told: `told()` of another worker, whose execution this one is to make with it; or None.
        """
        with self._changed:
            self._begun = 1 if told is None else told["begun"]
            if told is not None and told["end_after"] is not None:
                self._asked, self._end_after = list(told["asked"]), told["end_after"]

    def told(self) -> dict[str, Any]:
        """Where it stands, for a worker that joins the training; one that was only asked is asked again."""
        with self._changed:
            return {"begun": self._begun, "asked": list(self._asked), "end_after": self._end_after}

    def is_last(self) -> bool:
        """Called after each execution: whether to end now; waits while that is being asked.

        Raises:
            NotToldError: no answer came.
        """
        with self._changed:
            told = lambda: self.why is None or self._end_after is not None
            seconds = timeouts.get().stop_step
            if not self._changed.wait_for(told, seconds):
                raise NotToldError(
                    f"This worker was asked to stop, and the driver has not sent the last step within {seconds:g} s: "
                    "another one gave no answer"
                )
            self._begun += 1
            return self.is_over()

    def is_over(self) -> bool:
        """Called between executions: whether the last one was the one to end after, or came after it."""
        with self._changed:
            return self._end_after is not None and self._begun > self._end_after


# Of the training in this process.
gate = Gate()


def ask(why: str) -> int:
    """`Gate.ask`, as a function that another process sends here."""
    return gate.ask(why)


def end_after(executions: int) -> None:
    """`Gate.end_after`, likewise."""
    gate.end_after(executions)


def withdraw(why: str) -> None:
    """`Gate.withdraw`, likewise."""
    gate.withdraw(why)
