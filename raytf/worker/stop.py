"""Stops a training after the same step on all workers. Runs on a worker, without TensorFlow.

The driver first requests the number of steps (executions) that each worker has begun. From then on no worker begins
another one until it receives the last step: the maximum of the answers. So no worker is past it, and none waits in it
for another. This takes two messages, and costs nothing in a training that nobody stops.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError

from raytf import timeouts
from raytf.errors import RaytfError

STOP, DRAIN, RESIZE = "stop", "drain", "resize"
# Why workers stop after a step, for the run to continue on other nodes or with other workers.
_MOVES = {DRAIN: "a node of the run is drained", RESIZE: "the number of workers changes"}


class StopTraining(BaseException):
    """Ends `model.fit` after a step. It is no `Exception`, so that the user's `except Exception` does not catch it.

    Args:
        why: STOP, DRAIN or RESIZE.
        step: Number of steps in all.
    """

    def __init__(self, why: str, step: int):
        super().__init__(why, step)
        self.why, self.step = why, step


class StoppedForRestartError(RayActorError):
    """Ends the workers after the same step, for the run to continue with others. To the driver it is a node loss.

    Args:
        step: Number of steps in all.
        why: DRAIN of a worker's node, or RESIZE.
    """

    def __init__(self, step: int, why: str = DRAIN):
        text = f"{_MOVES[why]}; all workers have ended after step {step}, from which the run resumes"
        super().__init__(error_msg=text, preempted=True)
        self.step, self.why = step, why

    def __reduce__(self):
        return type(self), (self.step, self.why)


class NoStopAnswerError(RaytfError, TimeoutError):
    """A worker was requested to stop, and did not receive the last step before the timeout."""


class StopBarrier:
    """Barrier between the training thread and threads that request its stop.

    Attributes:
        why: STOP, DRAIN or RESIZE, or None without a request.
    """

    def __init__(self):
        # reentrant, as a signal's handler runs in the training thread
        self._condition = threading.Condition(threading.RLock())
        self.reset()

    def reset(self) -> None:
        """Drops all requests, for another training in this process."""
        with self._condition:
            self._requests: list[str] = []
            self._begun, self._last_execution = 0, None

    @property
    def why(self) -> str | None:
        return self._requests[0] if self._requests else None

    def request(self, why: str) -> int:
        """Requests a stop. Returns the executions that have begun by the next check; 0 before the training."""
        with self._condition:
            self._requests.append(why)
            return self._begun

    def stop_after(self, executions: int) -> None:
        """Sets the execution to stop after: the maximum that any worker has begun, at least 1.

        Without a request it has no effect. The training that it was for has then ended, and the process runs another
        one.
        """
        with self._condition:
            if not self._requests:
                return
            self._last_execution = self._last_execution or max(1, executions)
            self._condition.notify_all()

    def withdraw(self, why: str) -> None:
        """Withdraws a request, unless the last execution is already set."""
        with self._condition:
            if self._last_execution is None and why in self._requests:
                self._requests.remove(why)
                self._condition.notify_all()

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Marks the begin of a training, whose first execution always runs.

        Args:
            state: `state()` of another worker whose execution this worker joins, or None.
        """
        with self._condition:
            self._begun = 1 if state is None else state["begun"]
            if state is not None and state["end_after"] is not None:
                self._requests, self._last_execution = list(state["requests"]), state["end_after"]

    def state(self) -> dict[str, Any]:
        """Returns the state for a replacement worker. A request without a last execution is sent again to it."""
        with self._condition:
            return {"begun": self._begun, "requests": list(self._requests), "end_after": self._last_execution}

    def is_last(self) -> bool:
        """Returns whether to stop after this execution. Blocks while a request waits for its last execution.

        Raises:
            NoStopAnswerError: The driver did not send the last execution before the timeout.
        """
        with self._condition:
            is_resolved = lambda: self.why is None or self._last_execution is not None
            seconds = timeouts.get().stop_step
            if not self._condition.wait_for(is_resolved, seconds):
                raise NoStopAnswerError(
                    f"timeout after {seconds:g} s: this worker was requested to stop, and the driver did not send its "
                    "last step, as another worker did not answer"
                )
            self._begun += 1
            return self.is_over()

    def is_over(self) -> bool:
        """Returns whether the last execution is the one to stop after, or a later one. Called between executions."""
        with self._condition:
            return self._last_execution is not None and self._begun > self._last_execution


# The barrier of the training in this process.
stop_barrier = StopBarrier()


def request_stop(why: str) -> int:
    """Calls `StopBarrier.request`; a function that another process sends to this one."""
    return stop_barrier.request(why)


def stop_after(executions: int) -> None:
    """Calls `StopBarrier.stop_after`; a function that another process sends to this one."""
    stop_barrier.stop_after(executions)


def withdraw_request(why: str) -> None:
    """Calls `StopBarrier.withdraw`; a function that another process sends to this one."""
    stop_barrier.withdraw(why)
