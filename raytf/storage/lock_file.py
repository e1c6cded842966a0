"""The lock file on a mounted file system, with exclusive creation, and on an object store, without it."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from raytf.storage import stored_json

# Seconds by which the writes of two concurrent drivers to an object store may differ, with a margin.
SETTLE_INTERVAL = 1.0


class MountedFile:
    """A lock file on a mounted file system."""

    def __init__(self, filesystem, path: str, owner: str):
        self._path, self._owner, self._fd = path, owner, None

    def create(self, text: str) -> bool:
        """Creates the file. Returns False if it exists."""
        try:
            self._fd = _exclusive(self._path)
        except FileExistsError:
            return False
        try:
            self._write(text)
        except OSError:  # such as a full disk: an empty file would be the lock of an unknown driver
            with contextlib.suppress(OSError):
                self.delete()
            self.close()
            raise
        return True

    def replace(self, text: str, seen: str | None) -> bool:
        """Replaces a dead owner's file; returns False if another driver was faster."""
        taken = f"{self._path}.{self._owner}"
        try:
            os.rename(self._path, taken)  # of several drivers one gets the file
        except FileNotFoundError:
            return False
        with open(taken, "rb") as file:
            is_dead_ones = _text(file.read()) == seen
        if not is_dead_ones:  # it was replaced before the rename: it stays with that driver
            os.rename(taken, self._path)
            return False
        os.unlink(taken)
        return self.create(text)

    def wait_until_visible(self) -> None:
        """Returns at once: creation is exclusive."""

    def read(self) -> str | None:
        """Returns the text, or None if there is no file."""
        try:
            with open(self._path, "rb") as file:
                return _text(file.read())
        except FileNotFoundError:
            return None

    def age(self) -> float | None:
        """Returns the seconds since the last heartbeat, by the clock of the file system."""
        probe = f"{self._path}.{self._owner}.now"
        with contextlib.suppress(FileNotFoundError):  # released in the meantime
            os.close(_exclusive(probe))
            try:
                return os.stat(probe).st_mtime - os.stat(self._path).st_mtime
            finally:
                os.unlink(probe)
        return 0.0

    def beat(self, text: str) -> bool:
        """Refreshes the file's time if it still belongs to this driver. Returns whether it does."""
        try:
            stored, opened = os.stat(self._path), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        except OSError as error:  # on NFS another host has removed the open file, or the server was restarted
            if error.errno == errno.ESTALE and read_owner(self)[1].get("id") != self._owner:
                return False
            raise
        if (stored.st_dev, stored.st_ino) != (opened.st_dev, opened.st_ino):
            return False
        self._write(text)
        return True

    def _write(self, text: str) -> None:
        os.pwrite(self._fd, text.encode(), 0)
        os.fsync(self._fd)

    def delete(self) -> None:
        os.unlink(self._path)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class StoredFile:
    """A lock file in an object store."""

    def __init__(self, filesystem, path: str, owner: str):
        self._filesystem, self._path, self._owner = filesystem, path, owner
        self._written = 0.0

    def create(self, text: str) -> bool:
        if self.read() is not None:
            return False
        self._write(self._path, text)
        return True

    def replace(self, text: str, seen: str | None) -> bool:
        if self.read() != seen:
            return False
        self._write(self._path, text)
        return True

    def wait_until_visible(self) -> None:
        """Waits until a driver that writes at the same time has written."""
        time.sleep(max(0.0, self._written + SETTLE_INTERVAL - time.monotonic()))

    def read(self) -> str | None:
        try:
            with self._filesystem.open_input_stream(self._path) as file:
                return _text(file.read())
        except FileNotFoundError:
            return None

    def age(self) -> float | None:
        probe = f"{self._path}.{self._owner}.now"
        self._write(probe, "")
        probed, locked = self._filesystem.get_file_info([probe, self._path])
        self._filesystem.delete_file(probe)
        if probed.mtime is None or locked.mtime is None:
            return None
        return (probed.mtime_ns - locked.mtime_ns) / 1e9

    def beat(self, text: str) -> bool:
        if read_owner(self)[1].get("id") != self._owner:
            return False
        self._write(self._path, text)
        return True

    def _write(self, path: str, text: str) -> None:
        with self._filesystem.open_output_stream(path) as file:
            file.write(text.encode())
        if path == self._path:
            self._written = time.monotonic()

    def delete(self) -> None:
        self._filesystem.delete_file(self._path)

    def close(self) -> None:
        """Does nothing: no file is open."""


def _text(content: bytes) -> str:
    """Decodes any bytes without loss: different bytes give different texts, and invalid UTF-8 names no owner."""
    return content.decode(errors="surrogateescape")


def _exclusive(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)


def read_owner(file: MountedFile | StoredFile) -> tuple[str | None, dict]:
    """Returns the lock's text and its owner; retries briefly if none is named, as the file may be half written."""
    end = time.monotonic() + SETTLE_INTERVAL
    while True:
        text = file.read()
        owner = _owner_in(text)
        if text is None or owner or time.monotonic() >= end:
            return text, owner
        time.sleep(SETTLE_INTERVAL / 20)


def _owner_in(text: str | None) -> dict:
    """Returns the owner named in a lock's text; {} if it names none, such as just after creation."""
    try:
        return stored_json.parse_object((text or "{}").encode(errors="surrogateescape"))
    except stored_json.UnreadableError:
        return {}
