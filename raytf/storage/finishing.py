"""Notes in a run's folder of writers whose worker has gone, and that still finish: a run that goes on waits for them.

Those of the same host are seen without one, see `snapshots.wait_for_writers`.
"""

from __future__ import annotations

import contextlib
import posixpath
import secrets
import threading
import time

from pyarrow.fs import FileSelector

from raytf import timeouts

_PREFIX = ".finishing_"
_LOOKS_INTERVAL = 0.2


class Note:
    """That of one writer.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: of the run there.
    """

    def __init__(self, filesystem, folder: str):
        self._filesystem = filesystem
        self._path = posixpath.join(folder, f"{_PREFIX}{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._is_over = self._is_there = False

    def write(self) -> None:
        """Says that it finishes; where the storage takes no note, it takes no checkpoint either."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over:
                with self._filesystem.open_output_stream(self._path) as file:
                    file.write(b"a worker of this run has gone; what it handed over is being written\n")
                self._is_there = True

    def remove(self) -> None:
        """Says that it has finished; no note comes after this."""
        if self._lock.acquire(timeout=timeouts.get().note_removal):
            self._is_over = True
            if self._is_there:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(self._path)
            self._lock.release()


def wait(filesystem, folder: str, seconds: float) -> bool:
    """Waits until nobody finishes any more, and says whether all did.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: of the run there.
        seconds: at most so long. Notes that are there all the time are of hosts that have gone, and removed, where this
            is longer than a writer lives alone.
    """
    until = time.monotonic() + seconds
    first = found = _notes(filesystem, folder)
    while found and time.monotonic() < until:
        time.sleep(_LOOKS_INTERVAL)
        found = _notes(filesystem, folder)
    for path in first & found:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(path)
    return not found


def _notes(filesystem, folder: str) -> set[str]:
    infos = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    return {info.path for info in infos if info.base_name.startswith(_PREFIX)}
