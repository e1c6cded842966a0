"""One driver for a run's folder: a lock file with its owner and a heartbeat, on whatever storage the folder is.

On a file system that this machine mounts the file is created exclusively, so that exactly one of two drivers gets it.
An object store has no such call in pyarrow: there a driver writes the file and reads it back when a moment has passed,
and what was written last counts. A lock whose owner is dead is taken over. An owner that was frozen for so long that
another has taken its lock sees so at its next heartbeat, and its run ends.
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

from raytf import procfs, timeouts
from raytf.errors import ConfigError, TrainingError, in_a_line
from raytf.storage.lock_file import MountedFile, StoredFile, look

LOCK = "run.lock"
_BEAT_INTERVAL = 10.0

# The locks that this process holds: one that names this process and is not among them was left behind.
_held: set[str] = set()


class RunLock:
    """The lock of a run's folder; a context, in which no other driver gets it.

    Args:
        filesystem: where the folder is.
        folder: its path there; made if it does not exist, and removed again if nothing else came into it.
        on_lost: called from another thread when another driver has taken the lock over: nothing more may be written.
        clock: gives seconds; for tests.

    Attributes:
        lost: a clause that says who has taken the lock over, or None.
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
            "machine": _machine(),
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
        """Takes the lock, and starts its heartbeat.

        Raises:
            ConfigError: another driver has it, or the folder cannot be written.
        """
        _held.add(self._id)  # first: another thread may see the file before this one goes on
        try:
            self._made = self._filesystem.get_file_info(self._folder).type == pyarrow.fs.FileType.NotFound
            self._filesystem.create_dir(self._folder)
            self._take()
        except ConfigError:
            _held.discard(self._id)
            self._remove_folder()
            raise
        except Exception as error:  # each file system has errors of its own
            _held.discard(self._id)
            self._remove_folder()
            raise ConfigError(
                "The storage of a run must be one that this process can write to",
                f"{self._folder!r}, where there is {in_a_line(error)}",
                "Choose another RunConfig(storage_path=...), or ask for access to this one",
            ) from error
        self._thread = threading.Thread(target=self._beat, name="raytf_heartbeat", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Makes sure of the lock where two drivers may both have believed to have it; call before anything is written.

        Raises:
            ConfigError: another driver has it.
        """
        self._file.settle()
        owner = look(self._file)[1]
        if owner.get("id") != self._id:
            self._stop()
            _held.discard(self._id)
            self._thread = None
            self.lost = None  # a heartbeat may have seen it first; what is raised here says more
            raise self._refused(owner, 0.0)

    def check(self) -> None:
        """Raises TrainingError if the lock was lost."""
        if self.lost is not None:
            raise TrainingError(None, self.lost)

    def release(self) -> None:
        """Ends the heartbeat and gives the lock back; sees whether it was lost meanwhile."""
        if self._thread is None:
            return
        self._stop()
        self._thread = None
        _held.discard(self._id)
        try:
            if self.lost is None and look(self._file)[1].get("id") != self._id:
                self._lose()
            if self.lost is None:
                self._file.delete()
                self._remove_folder()
        except Exception as error:  # what was trained is not lost for it; the next driver sees that this one is gone
            print(f"{self._folder}: its lock could not be given back: {in_a_line(error)}")
        finally:
            self._file.close()

    def _stop(self) -> None:
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeouts.get().lock_release)

    def _take(self) -> None:
        mine = self._text()
        if self._file.create(mine):
            return
        seen, owner = look(self._file)
        if seen is None:  # given back meanwhile
            if self._file.create(mine):
                return
            seen, owner = look(self._file)
        age = None if _same_machine(owner) else self._age(owner, seen)
        if not _is_dead(owner, age):
            raise self._refused(owner, self._file.age() if age is None else age)
        if not self._file.replace(mine, seen):
            raise self._refused(look(self._file)[1], 0.0)
        why = "is gone" if age is None else f"gave no sign of life for {age:.0f} s"
        print(f"{self._folder}: the lock of {_shown(owner)}, which {why}, is taken over")

    def _age(self, owner: dict, seen: str | None) -> float:
        """Seconds without a heartbeat, by the storage's own clock; by this one where files there have no times."""
        age = self._file.age()
        if age is not None:
            return age
        seconds = timeouts.get().lock_silent
        print(f"{self._folder}: waits {seconds:g} s to see whether {_shown(owner)} is alive")
        began = self._clock()
        while (waited := self._clock() - began) <= seconds:
            time.sleep(min(1.0, seconds / 10))
            if self._file.read() != seen:
                return 0.0
        return waited

    def _refused(self, owner: dict, age: float | None) -> ConfigError:
        beat = "" if age is None else f", whose last heartbeat is {max(0.0, age):.0f} s old"
        seconds = timeouts.get().lock_silent
        lapses = "" if _same_machine(owner) else f" (if it has died, its lock lapses after {seconds:g} s)"
        return ConfigError(
            "The folder of a run takes one driver at a time",
            f"{self._folder!r}, held by {_shown(owner)}{beat}",
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
            except Exception as error:  # the storage may answer again; until then others see an old heartbeat
                if failed is None:
                    failed = in_a_line(error)
                    print(f"{self._folder}: the heartbeat of its lock cannot be written: {failed}")

    def _lose(self) -> None:
        with contextlib.suppress(Exception):  # it only says who
            other = look(self._file)[1]
            who = _shown(other) if other else "another driver, which has ended since,"
            self.lost = f"{who} has taken over {self._folder!r} while this driver did not answer; it writes no more"
        self.lost = self.lost or f"another driver has taken over {self._folder!r}; this one writes no more"
        if self.on_lost is not None:
            self.on_lost()

    def _text(self) -> str:
        return json.dumps(self._owner)

    def _remove_folder(self) -> None:
        """Removes a folder that was made for the lock and is empty; of object stores it is no more than a name."""
        if self._made and isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)


def holder(filesystem: pyarrow.fs.FileSystem, folder: str) -> str | None:
    """Returns who holds the lock of a run's folder, as a clause; None where nobody does, or who did is dead."""
    local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    file = (MountedFile if local else StoredFile)(filesystem, f"{folder}/{LOCK}", "")
    seen, owner = look(file)
    if seen is None or _is_dead(owner, None if _same_machine(owner) else file.age()):
        return None
    return _shown(owner)


def _shown(owner: dict) -> str:
    if not owner:
        return "an unknown driver"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"


def _same_machine(owner: dict) -> bool:
    return bool(owner) and owner.get("machine") == _machine()


def _is_dead(owner: dict, age: float | None) -> bool:
    """Whether the owner is gone: of this machine by its process, of another one by its heartbeat."""
    if not _same_machine(owner):
        return age is not None and age > timeouts.get().lock_silent
    pid = owner.get("pid")
    if pid == os.getpid():
        return owner.get("id") not in _held
    started = _started(pid)
    return started is None or started != owner.get("started")


def _machine() -> str:
    """What tells machines and their reboots apart, and containers, which count their processes each for itself."""
    boot, container = procfs.boot_id(), procfs.pid_namespace()
    if boot is None or container is None:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"
    return f"{boot} pid:[{container}]"


def _started(pid: int) -> str | None:
    """When a process of this machine started, in words of its kernel; None where there is none, or it has ended."""
    if not isinstance(pid, int) or pid <= 0:
        return None
    seen = procfs.look(pid)
    if seen is None:  # outside Linux it is not told
        return "unknown" if procfs.look(os.getpid()) is None and psutil.pid_exists(pid) else None
    return None if seen.state in "ZX" else str(seen.started)
