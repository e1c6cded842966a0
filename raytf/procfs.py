"""What Linux says of this host's processes: the one reader of `/proc`, where psutil does not have it.

psutil tells when a process started by the wall clock, which may be set; identities here are in ticks since the boot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Look:
    """A process at a moment.

    Args:
        state: Linux' letter: "R" runs, "S" waits, "D" waits uninterruptibly, "T" stopped, "t" traced, "Z" zombie.
        started: when it started, in clock ticks since the host's boot; tells it from a later one of the same number.
        ticks: processor time that it has used, all threads, in clock ticks.
    """

    state: str
    started: int
    ticks: int


def look(pid: int, proc: str = "/proc") -> Look | None:
    """A process of this host as it is now; None where there is none, or where `proc` tells nothing of processes."""
    try:
        return parse(_text(f"{proc}/{pid}/stat"))
    except OSError:  # ProcessLookupError comes for one that ends meanwhile
        return None


def queued(thread: int, pid: int | str = "self", proc: str = "/proc") -> float:
    """For how many seconds a thread was ready to run, and others had the processor.

    It is the second number of `schedstat`, nanoseconds; see proc(5).

    Args:
        thread: its number of Linux; that of the first one is the process'.
        pid: its process' of this host, or "self".
        proc: where the kernel tells it.

    Raises:
        OSError: there is no such thread, or the kernel does not tell.
    """
    path = f"{proc}/{pid}/task/{thread}/schedstat"
    numbers = _text(path).split()
    if len(numbers) < 2:
        raise OSError(f"{path} has {len(numbers)} numbers")
    return int(numbers[1]) / 1e9


def queued_in_all(pid: int | str = "self", counts: Callable[[int], bool] = lambda thread: True) -> float:
    """The seconds of `queued` of all threads of a process of this host.

    Args:
        pid: its, or "self".
        counts: counts(thread): whether that one does.

    Raises:
        OSError: there is no such process, or the kernel does not tell.
    """
    total = 0.0
    for thread in threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if counts(thread):
                total += queued(thread, pid)
    return total


def parse(text: str) -> Look:
    """A `Look` from the text of `/proc/PID/stat`; the command in it may hold blanks and brackets."""
    fields = text.rpartition(")")[2].split()
    return Look(state=fields[0], started=int(fields[19]), ticks=int(fields[11]) + int(fields[12]))


def looks(pids: list[int]) -> dict[int, Look | None]:
    """A look at each of several processes of this host."""
    return {pid: look(pid) for pid in pids}


def threads(pid: int | str = "self") -> list[int]:
    """The threads of a process of this host, by their numbers; raises OSError where there is none."""
    return list(map(int, os.listdir(f"/proc/{pid}/task")))


def thread_name(thread: int) -> str:
    """The name of a thread of this process; raises OSError where there is none."""
    return _text(f"/proc/self/task/{thread}/comm")


def switches(thread: int | None) -> int | None:
    """How often a thread of this process has left its processor, on its own or not; None if that is not told."""
    try:
        status = _text(f"/proc/self/task/{thread}/status")
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


def sockets() -> list[int]:
    """Descriptors of this process' sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own, closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def abstract_sockets(prefix: str) -> list[str]:
    """Names of this host's Unix sockets without a file that begin so behind their first byte, which is 0."""
    with contextlib.suppress(FileNotFoundError):  # not Linux
        words = [line.split()[-1] for line in _text("/proc/net/unix").splitlines() if "@" in line]
        return [f"\0{word[1:]}" for word in dict.fromkeys(words) if word.startswith(f"@{prefix}")]
    return []


def set_session_niceness(pid: int, niceness: int) -> None:
    """Sets that of a process' session, among which Linux may share the processors first; raises OSError."""
    with open(f"/proc/{pid}/autogroup", "w") as weight:
        weight.write(str(niceness))


def boot_id() -> str | None:
    """The id of the boot of this host's kernel, which containers share; None outside Linux."""
    with contextlib.suppress(OSError):
        return _text("/proc/sys/kernel/random/boot_id").strip()
    return None


def pid_namespace() -> int | None:
    """What tells containers apart, which count their processes each for itself; None outside Linux."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def mounts() -> str:
    """The text of `/proc/self/mountinfo`; empty outside Linux."""
    with contextlib.suppress(OSError):
        return _text("/proc/self/mountinfo")
    return ""


def memory_bytes() -> int:
    """The memory that this process holds, resident."""
    return psutil.Process().memory_info().rss


def cpu_seconds(pid: int) -> float:
    """What a process, its children, and those that it has waited for have computed; 0.0 where there is none."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        its = psutil.Process(pid)
        for each in [its, *its.children()]:
            with contextlib.suppress(psutil.Error):
                total += sum(each.cpu_times()[:4])
    return total


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
