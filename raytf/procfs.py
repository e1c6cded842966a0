"""Reads the state of this host's processes from Linux' `/proc`, as far as psutil does not provide it.

psutil reports a process' start by the wall clock, which may be changed. This module uses clock ticks since the boot.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class ProcessState:
    """The state of a process at one time.

    Args:
        state: Linux' letter: "R" runs, "S" waits, "D" waits uninterruptibly, "T" stopped, "t" traced, "Z" zombie.
        started: Start of the process in clock ticks since the host's boot. It differs for a later process of the same
            pid.
        ticks: CPU time of all its threads, in clock ticks.
    """

    state: str
    started: int
    ticks: int


def read_state(pid: int, proc: str = "/proc") -> ProcessState | None:
    """Returns the state of a process of this host; None if it does not exist or `proc` lacks such files."""
    try:
        return parse_stat(_text(f"{proc}/{pid}/stat"))
    except OSError:  # ProcessLookupError if the process ends meanwhile
        return None


def queued_seconds(thread: int, pid: int | str = "self", proc: str = "/proc") -> float:
    """Returns the seconds that a thread was ready to run, and waited for a processor.

    It is the second number of `schedstat`, nanoseconds; see proc(5).

    Args:
        thread: Linux' id of the thread; the main thread has the id of the process.
        pid: Id of its process on this host, or "self".
        proc: Path of the kernel's process files.

    Raises:
        OSError: There is no such thread, or the kernel does not report it.
    """
    path = f"{proc}/{pid}/task/{thread}/schedstat"
    numbers = _text(path).split()
    if len(numbers) < 2:
        raise OSError(f"{path} has {len(numbers)} numbers")
    return int(numbers[1]) / 1e9


def total_queued_seconds(pid: int | str = "self", counts: Callable[[int], bool] = lambda thread: True) -> float:
    """Returns the sum of `queued_seconds` over the threads of a process of this host, in seconds.

    Args:
        pid: Id of the process, or "self".
        counts: Function `counts(thread)` that returns whether to include a thread.

    Raises:
        OSError: There is no such process, or the kernel does not report it.
    """
    total = 0.0
    for thread in thread_ids(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            if counts(thread):
                total += queued_seconds(thread, pid)
    return total


def parse_stat(text: str) -> ProcessState:
    """Returns a `ProcessState` from the text of `/proc/PID/stat`, whose command may contain blanks and brackets."""
    fields = text.rpartition(")")[2].split()
    return ProcessState(state=fields[0], started=int(fields[19]), ticks=int(fields[11]) + int(fields[12]))


def read_states(pids: list[int]) -> dict[int, ProcessState | None]:
    """Returns the states of several processes of this host, by pid."""
    return {pid: read_state(pid) for pid in pids}


def thread_ids(pid: int | str = "self") -> list[int]:
    """Returns the thread ids of a process of this host; raises OSError if it does not exist."""
    return list(map(int, os.listdir(f"/proc/{pid}/task")))


def thread_name(thread: int) -> str:
    """Returns the name of a thread of this process; raises OSError if it does not exist."""
    return _text(f"/proc/self/task/{thread}/comm")


def switches(thread: int | None) -> int | None:
    """Returns the number of context switches of a thread of this process, voluntary or not; None if unknown."""
    try:
        status = _text(f"/proc/self/task/{thread}/status")
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


def sockets() -> list[int]:
    """Returns the file descriptors of this process' sockets."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself, closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                descriptors.append(int(name))
    return descriptors


def abstract_sockets(prefix: str) -> list[str]:
    """Returns names of this host's abstract Unix sockets, with this prefix after their first byte, which is 0."""
    with contextlib.suppress(FileNotFoundError):  # not Linux
        words = [line.split()[-1] for line in _text("/proc/net/unix").splitlines() if "@" in line]
        return [f"\0{word[1:]}" for word in dict.fromkeys(words) if word.startswith(f"@{prefix}")]
    return []


def set_session_niceness(pid: int, niceness: int) -> None:
    """Sets the niceness of a process' session, for Linux' scheduling between sessions; raises OSError."""
    with open(f"/proc/{pid}/autogroup", "w") as weight:
        weight.write(str(niceness))


def boot_id() -> str | None:
    """Returns the boot id of this host's kernel, which containers share; None outside Linux."""
    with contextlib.suppress(OSError):
        return _text("/proc/sys/kernel/random/boot_id").strip()
    return None


def pid_namespace() -> int | None:
    """Returns the id of this process' pid namespace, which differs between containers; None outside Linux."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def machine_id() -> str:
    """Returns an id of the machine, its boot and the container, as containers number their processes separately."""
    boot, container = boot_id(), pid_namespace()
    if boot is None or container is None:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"
    return f"{boot} pid:[{container}]"


def mounts() -> str:
    """Returns the text of `/proc/self/mountinfo`; empty outside Linux."""
    with contextlib.suppress(OSError):
        return _text("/proc/self/mountinfo")
    return ""


def memory_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
