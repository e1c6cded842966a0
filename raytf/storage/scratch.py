"""Temporary folders that do not outlive the process that made them for long, however it ends.

A process that is killed removes nothing. So the name of a folder says whose it is, and whoever makes the next one on
the same host removes those whose owners have gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator

from raytf import liveness

_PREFIX = "raytf_"


def make() -> str:
    """A new folder of this process; removes those that others of this host have left, the first time."""
    _clean_once()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{_owner(os.getpid())}_")


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A new folder that is removed behind."""
    path = make()
    try:
        yield path
    finally:
        remove(path)


def remove(path: str) -> None:
    """Removes a folder with what is in it."""
    shutil.rmtree(path, ignore_errors=True)


def clean() -> int:
    """Removes what processes of this user and host that have gone have left; how many folders."""
    where, removed = tempfile.gettempdir(), 0
    if liveness.look(os.getpid()) is None:  # not Linux: nothing tells who lives
        return 0
    for name in os.listdir(where):
        path = os.path.join(where, name)
        with contextlib.suppress(OSError):  # another one was faster
            if _left(name) and os.lstat(path).st_uid == os.getuid():
                remove(path)
                removed += not os.path.exists(path)
    return removed


@functools.cache
def _clean_once() -> None:
    clean()


def _left(name: str) -> bool:
    """Whether a folder's name says that its owner was a process of this host, and has gone."""
    parts = name.removeprefix(_PREFIX).split("_")
    if not name.startswith(_PREFIX) or len(parts) < 4 or parts[0] != _host() or not parts[1].isdecimal():
        return False
    return "_".join(parts[:3]) != _owner(int(parts[1]))


def _owner(pid: int) -> str:
    """What tells a process from all others: host and container, number, and when it started."""
    seen = liveness.look(pid)
    return f"{_host()}_{pid}_{seen.started if seen else 0}"


@functools.cache
def _host() -> str:
    """The boot of this kernel and the container: numbers of processes mean others elsewhere, in a shared folder too."""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read(8)}{os.stat('/proc/self/ns/pid').st_ino:x}"
    return "unknown"
