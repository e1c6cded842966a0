"""Pure: which tasks a cluster of TensorFlow has, and what the end of one means for the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytf.errors import ConfigError
from raytf.runtime.topology import tf_config

# What a healthy task reports when a peer has gone: a consequence, never the cause. TensorFlow's types of errors, ...
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
# ... what its other errors and its log then say, as of an error of ours within a graph, ...
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

# Of TensorFlow's own log, in both of its forms.
_LOG_LINE = re.compile(r"[IWEF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+ [IWEF] ")
_LOGGED_ERROR = re.compile(r"[EF]\d{4} |\d{4}-\d\d-\d\d [\d:.]+ [EF] ")


def is_consequence_of_tensorflow(kind: str, text: str) -> bool:
    """Whether an exception says that a peer has gone: if it is TensorFlow's, by its type or what it says; pure.

    Args:
        kind: its type, with the module before it.
        text: its message; that of others may hold any word.
    """
    if kind.partition(".")[0] != "tensorflow":
        return False
    return kind.rpartition(".")[2] in _CONSEQUENCES or any(sign in text for sign in _SIGNS)


@dataclass(frozen=True, order=True)
class Task:
    """A process of a TensorFlow cluster.

    Args:
        role: "chief", "worker", "ps" or "evaluator".
        index: within its role, from 0.
    """

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


def tasks(num_workers: int, *, num_ps: int = 0, chief: bool = False, evaluator: bool = False) -> list[Task]:
    """The tasks of a cluster, the one that writes files first.

    Args:
        num_workers: processes that train, at least 1; the chief is one of them without parameter servers.
        num_ps: parameter servers; with them a chief that coordinates stands beside the workers.
        chief: call the first worker chief.
        evaluator: one more that evaluates beside the training.

    Raises:
        ConfigError: a number out of range, or a mix of roles that TensorFlow does not have.
    """
    if num_workers < 1:
        raise ConfigError("num_workers must be at least 1", num_workers, "Ask for a worker")
    if num_ps < 0:
        raise ConfigError("num_ps must be at least 0", num_ps, "Ask for parameter servers, or leave it out")
    if num_ps and chief:
        raise ConfigError(
            "Parameter servers bring a chief that coordinates", f"num_ps={num_ps} and a chief", "Leave the chief out"
        )
    made = [Task("chief", 0)] if chief or num_ps else []
    made += [Task("worker", i) for i in range(num_workers - chief)]
    made += [Task("ps", i) for i in range(num_ps)]
    return [*made, *([Task("evaluator", 0)] if evaluator else [])]


def environment(addresses: Mapping[Task, str]) -> dict[Task, str]:
    """TF_CONFIG of each task, from their addresses ("host:port"); the evaluator is outside the cluster."""
    cluster: dict[str, list[str]] = {}
    for task, address in addresses.items():
        if task.role != "evaluator":
            cluster.setdefault(task.role, []).append(address)
    return {task: tf_config(cluster, task.role, task.index) for task in addresses}


@dataclass(frozen=True)
class Exit:
    """How a task's process ended.

    Args:
        code: 0, the exit code, or minus the number of the signal that ended it.
        error: the end of what it wrote to stderr.
        why: in a line, where others know better than what it wrote; "" else.
    """

    code: int
    error: str = ""
    why: str = ""

    @property
    def status(self) -> int:
        """The code as a shell has it: 128 and the number of a signal."""
        return 128 - self.code if self.code < 0 else self.code

    def is_consequence(self) -> bool:
        """Whether it failed because another task was gone."""
        exception = _exception(self.error)
        if exception:
            kind, _, text = exception.partition(":")
            return kind.strip() == _PEER_LOST or is_consequence_of_tensorflow(kind.strip(), text)
        logged = [line for line in self.error.splitlines() if _LOGGED_ERROR.match(line)]
        return any(sign in line for line in logged for sign in _SIGNS)

    def reason(self) -> str:
        """In a line."""
        if self.why:
            return self.why
        how = f"ended by signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        exception = _exception(self.error)
        lines = [line for line in (exception or self.error).splitlines() if line.strip() and not _LOG_LINE.match(line)]
        if not lines:
            return how
        return f"{how}: {lines[0] if exception else lines[-1]}"


def _exception(text: str) -> str:
    """The last exception of a text with tracebacks, with its message; "" if there is none."""
    _, found, after = text.rpartition("Traceback (most recent call last):\n")
    if not found:
        return ""
    lines = [line for line in after.splitlines() if not _LOG_LINE.match(line)]
    first = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), None)
    return "" if first is None else "\n".join(lines[first:])


def decides_end(tasks: Sequence[Task]) -> set[Task]:
    """The tasks that end by themselves when the training has ended; servers and evaluators wait for ever."""
    if any(task.role == "ps" for task in tasks):
        return {task for task in tasks if task.role == "chief"}
    return {task for task in tasks if task.role in ("chief", "worker")}


def restarts_alone(task: Task, tasks: Sequence[Task]) -> bool:
    """Whether a task can be started again while the others go on: a worker of a coordinator, or an evaluator."""
    return task.role == "evaluator" or (task.role == "worker" and any(other.role == "ps" for other in tasks))


def first_failure(exits: Mapping[Task, Exit]) -> Task | None:
    """The task that failed first and not because of another; `exits` are in the order in which they ended."""
    failed = [task for task, end in exits.items() if end.code]
    return next((task for task in failed if not exits[task].is_consequence()), failed[0] if failed else None)
