"""Processor shares of a process that runs next to a training: lowest priority, unless the training waits for it.

Linux may leave a process of low priority without a processor for many seconds while others compute. It may need one for
only 1 ms. That is right as long as no thread waits for its work.
"""

from __future__ import annotations

import contextlib
import os
import threading

import psutil

from raytf import procfs

# Training has priority on a contended processor.
_NICE = 10
_NICEST = 19


def set_lowest(forever: bool = False) -> int:
    """Lowers the priority of this process, which has its own session, to the lowest.

    Args:
        forever: Whether `set_normal` need not restore it; otherwise niceness is raised only if this user may lower it.

    Returns:
        The new niceness, for `set_lowest_again`.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if forever or _can_be_reverted():
        niceness = min(_NICEST, niceness + _NICE)
    set_lowest_again(os.getpid(), niceness)
    return niceness


def set_lowest_again(pid: int, niceness: int) -> None:
    """Lowers the priority of a process again, after `set_normal`.

    Args:
        pid: Id of a process on this host.
        niceness: Result of `set_lowest` in that process.
    """
    # under this policy it does not preempt the thread that has just woken it, either
    _set(pid, os.SCHED_BATCH, niceness, _NICE)


def set_normal(pid: int) -> None:
    """Restores normal priority of a process, as far as this user may.

    Args:
        pid: Id of a process on this host.
    """
    _set(pid, os.SCHED_OTHER, 0, 0)


def set_normal_with_children(pid: int) -> None:
    """Restores normal priority of a process and of those that it has started, as far as this user may.

    Args:
        pid: Id of a process on this host.
    """
    set_normal(pid)  # first: what it starts from here on has its priority
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            set_normal(child.pid)


def _can_be_reverted() -> bool:
    """Returns whether niceness can be lowered; tested in a thread, as Linux keeps niceness per thread."""
    successes = []

    def try_it() -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness + 1)
            os.setpriority(os.PRIO_PROCESS, 0, min(niceness, _NICEST - 1))
            successes.append(True)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return bool(successes)


def _set(pid: int, policy: int, niceness: int, group: int) -> None:
    try:
        threads = procfs.thread_ids(pid)
    except OSError:
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    # if Linux first divides the processors among sessions, niceness counts only within a session
    with contextlib.suppress(OSError):
        procfs.set_session_niceness(pid, group)
