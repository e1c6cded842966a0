"""Temporary folders that do not outlive their process for long, however it ends.

A killed process removes nothing. So a folder's name contains its owner. The next process that creates a folder on the
same host removes those of dead owners.

The folders are below `TMPDIR`; in a Ray worker else below its node's `--temp-dir`; else in Python's temporary folder.
The first of these that is writable and has room is used. If none is, or one becomes full, the error names it.
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
# Errors of a file system that accepts no more data.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# A file system with fewer free bytes is full.
_LEAST_BYTES = 1 << 22


class ScratchError(ConfigError):
    """A temporary folder is not writable."""


def make_folder(needs: int = 0) -> str:
    """Creates a folder of this process; the first call removes those that dead processes of this host left.

    Args:
        needs: Bytes to be written there, as far as known.

    Raises:
        ScratchError: No location for temporary folders is writable and has room; names each of them.
    """
    _clean_once()
    refused = []
    for location in locations():
        try:
            os.makedirs(location, exist_ok=True)
            if needs and _free(location) < needs:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return tempfile.mkdtemp(prefix=f"{_PREFIX}{_owner(os.getpid())}_", dir=location)
        except OSError as error:
            refused.append(f"{location} ({_describe_defect(location, error)})")
    raise _error(needs, "; ".join(refused) or "none: Python finds no temporary folder")


@contextlib.contextmanager
def temporary_folder(needs: int = 0) -> Iterator[str]:
    """Yields a new folder and removes it afterwards.

    Args:
        needs: Bytes to be written there, as far as known.

    Raises:
        ScratchError: See `make_folder`; or the folder became full in the block.
    """
    path = make_folder(needs)
    try:
        with name_errors(path, needs):
            yield path
    finally:
        remove_folder(path)


@contextlib.contextmanager
def name_errors(path: str | None = None, needs: int = 0) -> Iterator[None]:
    """Names the folder in errors of a full or read-only file system that the block raises.

    Args:
        path: The folder that the block writes to; None is Python's temporary folder, which Keras uses.
        needs: Bytes that are written, as far as known.

    Raises:
        ScratchError: The error names a file in the folder, or no file while its file system is full.
    """
    try:
        yield
    except Exception as error:
        path = tempfile.gettempdir() if path is None else path
        if not _is_of(error, path):
            raise
        raise _error(needs, f"{path} ({_describe_defect(path, error)})") from error


def locations() -> list[str]:
    """Returns the locations of temporary folders, in order of preference."""
    locations = [os.environ["TMPDIR"]] if os.environ.get("TMPDIR") else []
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():  # users of Ray have given its folder room for spilling
        from raytf.compat import ray_core

        session = ray_core.session_folder()
        locations += [] if session is None else [os.path.join(session, "raytf")]
    with contextlib.suppress(FileNotFoundError):
        locations.append(tempfile.gettempdir())
    return list(dict.fromkeys(map(os.path.abspath, locations)))


def _is_of(error: Exception, path: str) -> bool:
    """Returns whether an error means that a folder accepts no more data."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and any(f"errno = {full}" in str(error) for full in _FULL):  # HDF5's wording
        number = errno.ENOSPC
    if number not in _FULL:
        return False
    name = getattr(error, "filename", None)
    if isinstance(name, (str, bytes)):
        return os.path.abspath(os.fsdecode(name)).startswith(f"{os.path.abspath(path)}{os.sep}")
    return number == errno.EROFS or _free(path) < _LEAST_BYTES


def _free(path: str) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _describe_defect(path: str, error: Exception) -> str:
    """Describes a folder's defect and free space."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    with contextlib.suppress(OSError):
        status = os.statvfs(path)
        free, size = (blocks * status.f_frsize >> 20 for blocks in (status.f_bavail, status.f_blocks))
        return f"{reason}; {free} of {size} MB are free"
    return reason


def _error(needs: int, received: str) -> ScratchError:
    return ScratchError(
        f"A temporary folder must take what is written there{f', {-(-needs >> 20)} MB' if needs else ''}",
        received,
        "Make room, or name another folder: TMPDIR in the environment of the job (`runtime_env`), or "
        "`ray start --temp-dir` on each node",
    )


def remove_folder(path: str) -> None:
    """Removes a folder with its content."""
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> int:
    """Removes folders that dead processes of this user and host left. Returns their number."""
    removed = 0
    if procfs.read_state(os.getpid()) is None:  # not Linux: no process can be checked
        return 0
    for location in locations():
        with contextlib.suppress(OSError):  # it does not exist yet
            for name in os.listdir(location):
                path = os.path.join(location, name)
                with contextlib.suppress(OSError):  # another process was faster
                    if _is_abandoned(name) and os.lstat(path).st_uid == os.getuid():
                        remove_folder(path)
                        removed += not os.path.exists(path)
    return removed


@functools.cache
def _clean_once() -> None:
    remove_abandoned()


def _is_abandoned(name: str) -> bool:
    """Returns whether a folder's name contains a process of this host that has ended."""
    parts = name.removeprefix(_PREFIX).split("_")
    if not name.startswith(_PREFIX) or len(parts) < 4 or parts[0] != _host() or not parts[1].isdecimal():
        return False
    return "_".join(parts[:3]) != _owner(int(parts[1]))


def _owner(pid: int) -> str:
    """Returns a unique id of a process: host and container, pid and start time."""
    process = procfs.read_state(pid)
    return f"{_host()}_{pid}_{process.started if process else 0}"


@functools.cache
def _host() -> str:
    """Returns an id of this boot and container, as pids differ in meaning between them, even in a shared folder."""
    boot, container = procfs.boot_id(), procfs.pid_namespace()
    return "unknown" if boot is None or container is None else f"{boot[:8]}{container:x}"
