"""Temporary folders that do not outlive the process that made them for long, however it ends.

A process that is killed removes nothing. So the name of a folder says whose it is, and whoever makes the next one on
the same host removes those whose owners have gone.

They lie where `TMPDIR` says, in a worker of Ray below `--temp-dir` of its node, else in Python's temporary folder: the
first of these that can be written to, and has room. Where none can, or one is full, the error names it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

from raytf import procfs
from raytf.errors import ConfigError, first_line

_PREFIX = "raytf_"
# Errors of a file system that takes nothing more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# One with less left is full.
_LEAST_BYTES = 1 << 22


class ScratchError(ConfigError):
    """A temporary folder cannot be written to."""


def make(needs: int = 0) -> str:
    """A new folder of this process; removes those that others of this host have left, the first time.

    Args:
        needs: bytes that are to be written there, as far as known.

    Raises:
        ScratchError: no place for temporary folders can be written to, or has room; names each of them.
    """
    _clean_once()
    refused = []
    for place in places():
        try:
            os.makedirs(place, exist_ok=True)
            if needs and _free(place) < needs:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return tempfile.mkdtemp(prefix=f"{_PREFIX}{_owner(os.getpid())}_", dir=place)
        except OSError as error:
            refused.append(f"{place} ({_what(place, error)})")
    raise _error(needs, "; ".join(refused) or "none: Python finds no temporary folder")


@contextlib.contextmanager
def folder(needs: int = 0) -> Iterator[str]:
    """A new folder that is removed behind.

    Args:
        needs: bytes that are to be written there, as far as known.

    Raises:
        ScratchError: see `make`; or the folder has become full in the block.
    """
    path = make(needs)
    try:
        with named(path, needs):
            yield path
    finally:
        remove(path)


@contextlib.contextmanager
def named(path: str | None = None, needs: int = 0) -> Iterator[None]:
    """Errors of a file system that is full, or read-only, name the folder in the block.

    Args:
        path: of the folder that is written to there; None: Python's temporary folder, which Keras and Ray use.
        needs: bytes that are written, as far as known.

    Raises:
        ScratchError: that of a file in the folder, or of none where its file system is full.
    """
    try:
        yield
    except Exception as error:
        path = tempfile.gettempdir() if path is None else path
        if not _is_of(error, path):
            raise
        raise _error(needs, f"{path} ({_what(path, error)})") from error


def places() -> list[str]:
    """Where temporary folders may lie, the first choice first."""
    found = [os.environ["TMPDIR"]] if os.environ.get("TMPDIR") else []
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # who uses Ray has given its folder the room that its spilling needs
        from raytf.compat import ray_core

        session = ray_core.session_folder()
        found += [] if session is None else [os.path.join(session, "raytf")]
    with contextlib.suppress(FileNotFoundError):
        found.append(tempfile.gettempdir())
    return list(dict.fromkeys(map(os.path.abspath, found)))


def _is_of(error: Exception, path: str) -> bool:
    """Whether an error is that of a folder that takes nothing more."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and any(f"errno = {full}" in str(error) for full in _FULL):  # as HDF5 says it
        number = errno.ENOSPC
    if number not in _FULL:
        return False
    name = getattr(error, "filename", None)
    if isinstance(name, (str, bytes)):
        return os.path.abspath(os.fsdecode(name)).startswith(f"{os.path.abspath(path)}{os.sep}")
    return number == errno.EROFS or _free(path) < _LEAST_BYTES


def _free(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _what(path: str, error: Exception) -> str:
    """What is wrong with a folder, and its room."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        free, size = (blocks * found.f_frsize >> 20 for blocks in (found.f_bavail, found.f_blocks))
        return f"{said}; {free} of {size} MB are free"
    return said


def _error(needs: int, received: str) -> ScratchError:
    return ScratchError(
        f"A temporary folder must take what is written there{f', {-(-needs >> 20)} MB' if needs else ''}",
        received,
        "Make room, or name another folder: TMPDIR in the environment of the job (`runtime_env`), or "
        "`ray start --temp-dir` on each node",
    )


def remove(path: str) -> None:
    """Removes a folder with what is in it."""
    shutil.rmtree(path, ignore_errors=True)


def clean() -> int:
    """Removes what processes of this user and host that have gone have left; how many folders."""
    removed = 0
    if procfs.look(os.getpid()) is None:  # not Linux: nothing tells who lives
        return 0
    for where in places():
        with contextlib.suppress(OSError):  # it is not there so far
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
    seen = procfs.look(pid)
    return f"{_host()}_{pid}_{seen.started if seen else 0}"


@functools.cache
def _host() -> str:
    """The boot of this kernel and the container: numbers of processes mean others elsewhere, in a shared folder too."""
    boot, container = procfs.boot_id(), procfs.pid_namespace()
    return "unknown" if boot is None or container is None else f"{boot[:8]}{container:x}"
