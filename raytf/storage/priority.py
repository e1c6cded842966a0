"""How a process that writes beside a training shares processors: it goes last, unless the training waits for it.

Linux may leave a process of low niceness without a processor for many seconds where others compute, though it needs
one for a millisecond. That is right as long as nobody waits for what it does.
"""

from __future__ import annotations

import contextlib
import os
import threading

from raytf import procfs

# Training goes first on a processor that both want.
_NICE = 10
_NICEST = 19


def go_last() -> int:
    """Gives this process, which has a session of its own, what is left of the processors.

    Its niceness is raised only where this user may lower it again: else `share_alike` could not.

    Returns:
        Its niceness from now on, for `go_last_again`.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if _may_be_taken_back():
        niceness = min(_NICEST, niceness + _NICE)
    go_last_again(os.getpid(), niceness)
    return niceness


def go_last_again(pid: int, niceness: int) -> None:
    """Has a process go last once more, after `share_alike`.

    Args:
        pid: of a process of this host.
        niceness: what `go_last` gave there.
    """
    # of this policy it does not take the processor from the thread that has just woken it, either
    _set(pid, os.SCHED_BATCH, niceness, _NICE)


def share_alike(pid: int) -> None:
    """Has a process that went last share processors with all others, as far as this user may say so.

    Args:
        pid: of a process of this host.
    """
    _set(pid, os.SCHED_OTHER, 0, 0)


def _may_be_taken_back() -> bool:
    """Whether niceness can be lowered; tried in a thread, as Linux has one for each."""
    found = []

    def try_it() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, min(before, _NICEST - 1))
            found.append(True)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return bool(found)


def _set(pid: int, policy: int, niceness: int, group: int) -> None:
    try:
        threads = procfs.threads(pid)
    except OSError:
        return
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    # where Linux shares the processors among sessions first, niceness counts within one of them alone
    with contextlib.suppress(OSError):
        procfs.set_session_niceness(pid, group)
