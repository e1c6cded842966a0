"""Pure: the tasks of a TensorFlow cluster, and the effect of one task's end on the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytf.errors import ConfigError
from raytf.runtime.topology import tf_config

# Errors of a healthy task after the loss of a peer: a consequence, never the cause. TensorFlow's error types, ...
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
# ... the text of its other errors and its log, also for a raytf error within a graph, ...
_SIGNS = (
    *_CONSEQUENCES,
    "PeerLostError",
    "Collective ops is aborted",
    "Connection reset by peer",
    "failed to connect to all addresses",
    "CoordinationService",
    "RPC: /tensorflow",
)
# ... and raytf's own.
_PEER_LOST = "raytf.errors.PeerLostError"

# Lines of TensorFlow's own log, in both of its forms.
_LOG_LINE = re.compile(r"[IWEF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+ [IWEF] ")
_LOGGED_ERROR = re.compile(r"[EF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+ [EF] ")


def is_consequence_of_tensorflow(kind: str, text: str) -> bool:
    """Returns whether an exception of TensorFlow, by its type or text, means that a peer is lost; pure.

    Args:
        kind: Its type, with the module before it.
        text: Its message; messages of other libraries may contain any word.
    """
    if kind.partition(".")[0] != "tensorflow":
        return False
    return kind.rpartition(".")[2] in _CONSEQUENCES or any(sign in text for sign in _SIGNS)


@dataclass(frozen=True, order=True)
class Task:
    """A process of a TensorFlow cluster.

    Args:
        role: "chief", "worker", "ps" or "evaluator".
        index: Index within its role, from 0.
    """

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


def run_tasks(num_workers: int, *, num_ps: int = 0, chief: bool = False, evaluator: bool = False) -> list[Task]:
    """Returns the tasks of a cluster; the first one writes files.

    Args:
        num_workers: Number of training processes, at least 1; includes the chief unless there are parameter servers.
        num_ps: Number of parameter servers; they require a coordinating chief in addition to the workers.
        chief: Whether the first worker is the chief.
        evaluator: Whether one more task evaluates during the training.

    Raises:
        ConfigError: A number is out of range, or TensorFlow does not have such a mix of roles.
    """
    if num_workers < 1:
        raise ConfigError("num_workers must be at least 1", num_workers, "Ask for a worker")
    if num_ps < 0:
        raise ConfigError("num_ps must be at least 0", num_ps, "Ask for parameter servers, or leave it out")
    if num_ps and chief:
        raise ConfigError(
            "Parameter servers bring a chief that coordinates", f"num_ps={num_ps} and a chief", "Leave the chief out"
        )
    result = [Task("chief", 0)] if chief or num_ps else []
    result += [Task("worker", i) for i in range(num_workers - chief)]
    result += [Task("ps", i) for i in range(num_ps)]
    return [*result, *([Task("evaluator", 0)] if evaluator else [])]


def environment(addresses: Mapping[Task, str]) -> dict[Task, str]:
    """Returns TF_CONFIG of each task, from their addresses ("host:port"); the evaluator is outside the cluster."""
    cluster: dict[str, list[str]] = {}
    for task, address in addresses.items():
        if task.role != "evaluator":
            cluster.setdefault(task.role, []).append(address)
    return {task: tf_config(cluster, task.role, task.index) for task in addresses}


@dataclass(frozen=True)
class TaskExit:
    """The end of a task's process.

    Args:
        code: 0, the exit code, or minus the number of the signal that ended it.
        error: The end of its stderr.
        why: Reason in one line, if other processes know a better one than its stderr; else "".
    """

    code: int
    error: str = ""
    why: str = ""

    @property
    def status(self) -> int:
        """Returns the exit status of a shell: 128 plus the number of a signal."""
        return 128 - self.code if self.code < 0 else self.code

    def is_consequence(self) -> bool:
        """Returns whether it failed because another task was lost."""
        exception = _exception(self.error)
        if exception:
            kind, _, text = exception.partition(":")
            return kind.strip() == _PEER_LOST or is_consequence_of_tensorflow(kind.strip(), text)
        logged = [line for line in self.error.splitlines() if _LOGGED_ERROR.match(line)]
        return any(sign in line for line in logged for sign in _SIGNS)

    def reason(self) -> str:
        """Returns the reason of the end in one line."""
        if self.why:
            return self.why
        how = f"ended by signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        exception = _exception(self.error)
        lines = [line for line in (exception or self.error).splitlines() if line.strip() and not _LOG_LINE.match(line)]
        if not lines:
            return how
        return f"{how}: {lines[0] if exception else lines[-1]}"


def _exception(text: str) -> str:
    """Returns the last exception of a text with tracebacks, with its message; "" if there is none."""
    _, separator, rest_of_text = text.rpartition("Traceback (most recent call last):\n")
    if not separator:
        return ""
    lines = [line for line in rest_of_text.splitlines() if not _LOG_LINE.match(line)]
    first = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
    return "" if first is None else "\n".join(lines[first:])


def ends_run(tasks: Sequence[Task]) -> set[Task]:
    """Returns the tasks that end by themselves after the training; servers and evaluators wait forever."""
    if any(task.role == "ps" for task in tasks):
        return {task for task in tasks if task.role == "chief"}
    return {task for task in tasks if task.role in ("chief", "worker")}


def can_restart_by_itself(task: Task, tasks: Sequence[Task]) -> bool:
    """Returns whether a task can restart while the others continue: a worker of a coordinator, or an evaluator."""
    return task.role == "evaluator" or (task.role == "worker" and any(other.role == "ps" for other in tasks))


def first_failure(exits: Mapping[Task, TaskExit]) -> Task | None:
    """Returns the task that failed first and not because of another; `exits` are in the order of their ends."""
    failed = [task for task, end in exits.items() if end.code]
    return next((task for task in failed if not exits[task].is_consequence()), failed[0] if failed else None)
