"""Notes in a run's folder of writers that still write after their worker has gone. A resumed run waits for them.

Writers of the same host are found without notes, see `snapshots.wait_for_writers`.
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
_POLL_INTERVAL = 0.2


class WriterNote:
    """The note of one writer.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: The run's folder there.
    """

    def __init__(self, filesystem, folder: str):
        self._filesystem = filesystem
        self._path = posixpath.join(folder, f"{_PREFIX}{secrets.token_hex(8)}")
        self._lock = threading.Lock()
        self._is_over = self._exists = False

    def write(self, size: int = 0) -> None:
        """Notes that the writer finishes `size` bytes; a storage that refuses the note refuses the checkpoint, too."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_over:
                with self._filesystem.open_output_stream(self._path) as file:
                    file.write(
                        f"a worker of this run has gone; what it handed over is written, bytes: {size}\n".encode()
                    )
                self._exists = True

    def remove(self) -> None:
        """Removes the note when the writer has finished; no note is written after this."""
        if self._lock.acquire(timeout=timeouts.get().note_removal):
            self._is_over = True
            if self._exists:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(self._path)
            self._lock.release()


def wait_for_notes(filesystem, folder: str, seconds: float) -> bool:
    """Waits until no writer has a note. Returns whether all have finished.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: The run's folder there.
        seconds: Timeout. Notes that exist during all of it are removed. If it is longer than a writer lives alone,
            their hosts have gone.
    """
    deadline = time.monotonic() + seconds
    first = notes = _notes(filesystem, folder)
    while notes and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
        notes = _notes(filesystem, folder)
    for path in first & notes:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(path)
    return not notes


def seconds_more(filesystem, folder: str) -> float:
    """Returns the extra seconds for writers of many bytes, from their notes, which anybody may have written."""
    sizes = [0]
    for path in _notes(filesystem, folder):
        with contextlib.suppress(FileNotFoundError, ValueError), filesystem.open_input_stream(path) as file:
            sizes.append(int(file.read(1000).rpartition(b" ")[2]))
    most = min(max(sizes), 1 << 62)  # a float holds no number of 400 digits
    return min(timeouts.deadline(0.0, most), timeouts.get().writer_bytes_at_most)


def _notes(filesystem, folder: str) -> set[str]:
    infos = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    return {info.path for info in infos if info.base_name.startswith(_PREFIX)}
