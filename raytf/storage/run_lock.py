"""One driver for a run's folder: a lock file with its owner and a heartbeat, on any storage.

On a mounted file system the file is created exclusively: exactly one of two drivers gets it. pyarrow offers no such
call for object stores. There a driver writes the file and reads it back shortly afterwards, and the last write counts.
A driver takes over the lock of a dead owner. An owner that was frozen for so long detects this at its next heartbeat,
and its run ends.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

import psutil
import pyarrow.fs

from raytf import logs, procfs, timeouts
from raytf.errors import ConfigError, TrainingError, one_line
from raytf.storage.lock_file import MountedFile, StoredFile, read_owner

logger = logs.get_logger(__name__)

LOCK = "run.lock"
_BEAT_INTERVAL = 10.0

# Locks that this process holds. A lock that names this process, but is not in this set, was left by an earlier one.
_acquired_locks: set[str] = set()


class RunLock:
    """The lock of a run's folder; a context manager that excludes other drivers.

    Args:
        filesystem: File system of the folder.
        folder: Its path there; created if missing, and removed again if nothing else was written into it.
        on_lost: Called from another thread when another driver has taken over the lock: no further write is allowed.
        clock: Returns seconds; for tests.

    Attributes:
        lost: A clause that names the driver that took over the lock, or None.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        folder: str,
        on_lost: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.lost: str | None = None
        self.on_lost = on_lost
        self._filesystem, self._folder = filesystem, folder
        self._id = uuid.uuid4().hex
        self._owner = {
            "id": self._id,
            "host": socket.gethostname(),
            "machine": procfs.machine_id(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "since": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "beat": 0,
        }
        local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        kind = MountedFile if local else StoredFile
        self._file = kind(filesystem, f"{folder}/{LOCK}", self._id)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._made = False

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.release()
        self.check()

    def acquire(self) -> None:
        """Acquires the lock and starts its heartbeat.

        Raises:
            ConfigError: Another driver holds it, or the folder is not writable.
        """
        _acquired_locks.add(self._id)  # first: another thread may see the file before this one continues
        try:
            self._made = self._filesystem.get_file_info(self._folder).type == pyarrow.fs.FileType.NotFound
            self._filesystem.create_dir(self._folder)
            self._take()
        except ConfigError:
            _acquired_locks.discard(self._id)
            self._remove_folder()
            raise
        except Exception as error:  # each file system has its own errors
            _acquired_locks.discard(self._id)
            self._remove_folder()
            raise ConfigError(
                "The storage of a run must be one that this process can write to",
                f"{self._folder!r}, where there is {one_line(error)}",
                "Choose another RunConfig(storage_path=...), or ask for access to this one",
            ) from error
        self._thread = threading.Thread(target=self._beat, name="raytf_heartbeat", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Confirms the lock if two drivers may both believe that they hold it; call before the first write.

        Raises:
            ConfigError: Another driver holds it.
        """
        self._file.wait_until_visible()
        owner = read_owner(self._file)[1]
        if owner.get("id") != self._id:
            self._stop()
            _acquired_locks.discard(self._id)
            self._thread = None
            self.lost = None  # a heartbeat may have detected it first; this error has more detail
            raise self._refused(owner, 0.0)

    def check(self) -> None:
        """Raises TrainingError if the lock was lost."""
        if self.lost is not None:
            raise TrainingError(None, self.lost)

    def release(self) -> None:
        """Stops the heartbeat and releases the lock; detects whether it was lost in the meantime."""
        if self._thread is None:
            return
        self._stop()
        self._thread = None
        _acquired_locks.discard(self._id)
        try:
            if self.lost is None and read_owner(self._file)[1].get("id") != self._id:
                self._lose()
            if self.lost is None:
                self._file.delete()
                self._remove_folder()
        except Exception as error:  # the training's results remain; the next driver sees that this one has died
            logger.warning(
                f"{self._folder}: its lock could not be released: {one_line(error)}. It lapses after "
                f"{timeouts.get().lock_silent:g} s; until then a start from another host is refused. Remove {LOCK} "
                "there to start sooner"
            )
        finally:
            self._file.close()

    def _stop(self) -> None:
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeouts.get().lock_release)

    def _take(self) -> None:
        text = self._text()
        if self._file.create(text):
            return
        lock_text, owner = read_owner(self._file)
        if lock_text is None:  # released in the meantime
            if self._file.create(text):
                return
            lock_text, owner = read_owner(self._file)
        age = None if _same_machine(owner) else self._age(owner, lock_text)
        if not _is_dead(owner, age):
            raise self._refused(owner, self._file.age() if age is None else age)
        if not self._file.replace(text, lock_text):
            raise self._refused(read_owner(self._file)[1], 0.0)
        why = "is gone" if age is None else f"sent no heartbeat for {age:.0f} s (timeout)"
        logger.info(f"{self._folder}: the lock of {_describe_owner(owner)}, which {why}, is taken over")

    def _age(self, owner: dict, seen: str | None) -> float:
        """Returns the seconds since the last heartbeat by the storage's clock, or by this host's if it has no times."""
        age = self._file.age()
        if age is not None:
            return age
        seconds = timeouts.get().lock_silent
        logger.info(f"{self._folder}: waiting {seconds:g} s for a heartbeat of {_describe_owner(owner)}")
        began = self._clock()
        while (waited := self._clock() - began) <= seconds:
            time.sleep(min(1.0, seconds / 10))
            if self._file.read() != seen:
                return 0.0
        return waited

    def _refused(self, owner: dict, age: float | None) -> ConfigError:
        heartbeat = "" if age is None else f", whose last heartbeat is {max(0.0, age):.0f} s old"
        seconds = timeouts.get().lock_silent
        lapses = "" if _same_machine(owner) else f" (if it has died, its lock lapses after {seconds:g} s)"
        return ConfigError(
            "The folder of a run takes one driver at a time",
            f"{self._folder!r}, held by {_describe_owner(owner)}{heartbeat}",
            f"Wait for its end{lapses}, or choose another RunConfig(name=...)",
        )

    def _beat(self) -> None:
        failed: str | None = None
        while not self._end.wait(_BEAT_INTERVAL):
            self._owner["beat"] += 1
            try:
                if not self._file.beat(self._text()):
                    self._lose()
                    return
                failed = None
            except Exception as error:  # the storage may recover; until then others see an old heartbeat
                if failed is None:
                    failed = one_line(error)
                    logger.warning(
                        f"{self._folder}: the heartbeat of its lock cannot be written: {failed}. It is retried; "
                        "another driver may take over after a timeout. Mend the storage"
                    )

    def _lose(self) -> None:
        with contextlib.suppress(Exception):  # it only adds the name
            owner = read_owner(self._file)[1]
            holder_name = _describe_owner(owner) if owner else "another driver, which has ended since,"
            self.lost = (
                f"{holder_name} has taken over {self._folder!r} while this driver did not answer; it writes no more"
            )
        self.lost = self.lost or f"another driver has taken over {self._folder!r}; this one writes no more"
        if self.on_lost is not None:
            self.on_lost()

    def _text(self) -> str:
        return json.dumps(self._owner)

    def _remove_folder(self) -> None:
        """Removes an empty folder that was created for the lock; on object stores a folder is only a name."""
        if self._made and isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)


def describe_holder(filesystem: pyarrow.fs.FileSystem, folder: str) -> str | None:
    """Returns the holder of a run folder's lock as a clause; None if there is none, or it is dead.

    Writes nothing, as this user may only read there. So a heartbeat's age is by the clock of this host.
    """
    local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    file = (MountedFile if local else StoredFile)(filesystem, f"{folder}/{LOCK}", "")
    lock_text, owner = read_owner(file)
    if lock_text is None:
        return None
    info = filesystem.get_file_info(f"{folder}/{LOCK}")
    if _is_dead(owner, None if info.mtime is None else time.time() - info.mtime_ns / 1e9):
        return None
    return _describe_owner(owner)


def _describe_owner(owner: dict) -> str:
    if not owner:
        return "an unknown driver"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"


def _same_machine(owner: dict) -> bool:
    return bool(owner) and owner.get("machine") == procfs.machine_id()


def _is_dead(owner: dict, age: float | None) -> bool:
    """Returns whether the owner is dead: by its process on this machine, by its heartbeat on another one."""
    if not _same_machine(owner):
        return age is not None and age > timeouts.get().lock_silent
    pid = owner.get("pid")
    if pid == os.getpid():
        return owner.get("id") not in _acquired_locks
    started = _started(pid)
    return started is None or started != owner.get("started")


def _started(pid: int) -> str | None:
    """Returns the kernel's start time of a process on this machine; None if it does not exist or has ended."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    seen = procfs.read_state(pid)
    if seen is None:  # outside Linux it is not known
        return "unknown" if procfs.read_state(os.getpid()) is None and psutil.pid_exists(pid) else None
    return None if seen.state in "ZX" else str(seen.started)
