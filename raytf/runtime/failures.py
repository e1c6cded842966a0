"""The worker that failed first, and its error: one cause with its rank instead of a page of gRPC text. Driver side."""

from __future__ import annotations

import traceback

from ray.train import TrainingFailedError

from raytf.compat.ray_train import CollectiveTimeoutError
from raytf.errors import ConfigError, PeerLostError, RaytfError, TrainingError, one_line, passed_user_code
from raytf.runtime.roles import is_consequence_of_tensorflow


class WorkerFailedError(TrainingError, TrainingFailedError):
    """A `TrainingError` that is Ray Train's `TrainingFailedError` too; `worker_failures` maps rank to exception."""

    worker_failures: dict

    def __init__(self, rank, cause, details="", worker_failures=None):
        TrainingError.__init__(self, rank, cause, details)
        self.worker_failures = worker_failures or {}

    def __reduce__(self):
        return type(self), (self.rank, self.cause, self.details, self.worker_failures)


class WorkerFrozenError(RaytfError, RuntimeError):
    """A worker hung, and was ended.

    Args:
        how: Sentence without a full stop: where and how it hung, and which workers waited for it.
        stack: Stack of its threads, "" if unknown.
    """

    def __init__(self, how: str, stack: str = ""):
        super().__init__(how, stack)
        self.how, self.stack = how, stack

    def __str__(self) -> str:
        return self.how

    def __reduce__(self):
        return type(self), (self.how, self.stack)


def first_cause(failures: dict[int, BaseException]) -> WorkerFailedError:
    """Returns the error of a run whose workers have failed: that of the rank that failed first."""
    rank = first_rank(failures)
    return WorkerFailedError(rank, _line(failures[rank]), _details(failures[rank]), failures)


def first_rank(failures: dict[int, BaseException]) -> int:
    """Returns the rank whose error is a cause, not the consequence of another's; a hang is always a cause."""
    frozen = [rank for rank, error in sorted(failures.items()) if isinstance(error, WorkerFrozenError)]
    if frozen:
        return frozen[0]
    causes = [rank for rank, error in sorted(failures.items()) if not is_consequence(error)]
    return causes[0] if causes else min(failures)


def is_consequence(error: BaseException) -> bool:
    """Returns whether a worker failed because another died: by the type of its error, and TensorFlow's text."""
    cause = user_error(error)
    kind = type(cause)
    return isinstance(cause, (PeerLostError, CollectiveTimeoutError)) or is_consequence_of_tensorflow(
        f"{kind.__module__}.{kind.__name__}", str(cause)
    )


def user_error(error: BaseException | None) -> BaseException | None:
    """Returns the error of the user's process that Ray Train's errors wrap."""
    for name in ("_base_exc", "health_check_failure", "cause"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException):
            return user_error(inner)
    return error


def _line(error: BaseException) -> str:
    return one_line(user_error(error))


def _details(error: BaseException) -> str:
    cause = user_error(error)
    if isinstance(cause, WorkerFrozenError):
        return cause.stack
    text = getattr(error, "_traceback_str", None)
    if text is None or (isinstance(cause, ConfigError) and not passed_user_code(text)):
        return ""  # a rule, what was received and the fix need no lines of raytf
    shown = "".join(traceback.format_exception_only(cause))
    return text if shown.strip() in text else f"{text}\n{shown}"
