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

    def write(self, size: int = 0) -> None:
        """Says that it finishes so many bytes; where the storage takes no note, it takes no checkpoint either."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over:
                with self._filesystem.open_output_stream(self._path) as file:
                    file.write(
                        f"a worker of this run has gone; what it handed over is written, bytes: {size}\n".encode()
                    )
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


def seconds_more(filesystem, folder: str) -> float:
    """How much longer than others those may take that write much, as their notes say, which may be anybody's."""
    sizes = [0]
    for path in _notes(filesystem, folder):
        with contextlib.suppress(FileNotFoundError, ValueError), filesystem.open_input_stream(path) as file:
            sizes.append(int(file.read(1000).rpartition(b" ")[2]))
    return min(timeouts.deadline(0.0, max(sizes)), timeouts.get().writer_bytes_at_most)


def _notes(filesystem, folder: str) -> set[str]:
    infos = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    return {info.path for info in infos if info.base_name.startswith(_PREFIX)}
