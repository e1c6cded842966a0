"""The folder of a stored checkpoint on this machine, and the files of a small one in memory."""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyarrow.fs import FileSelector, LocalFileSystem, copy_files

from raytf.storage import checkpoint_files, scratch

if TYPE_CHECKING:
    import ray.train

_COPIED_AT_ONCE = 64 << 20  # bytes


@contextlib.contextmanager
def local_folder(saved: ray.train.Checkpoint) -> Iterator[str]:
    """Yields the folder of a checkpoint on this machine: its own, or a copy that is removed after the block.

    Ray's `as_directory` copies into the system's temporary folder, which may be small. Its lock is in a folder that
    belongs to the first user of the host.

    Raises:
        ScratchError: No folder has room for the copy.
    """
    if isinstance(saved.filesystem, LocalFileSystem):
        yield saved.path
        return
    infos = saved.filesystem.get_file_info(FileSelector(saved.path, recursive=True))
    with scratch.temporary_folder(sum(info.size or 0 for info in infos)) as folder:
        copy(saved, folder)
        yield folder


def copy(saved: ray.train.Checkpoint, folder: str) -> None:
    """Copies the files of a stored checkpoint into a local folder."""
    os.makedirs(folder, exist_ok=True)
    copy_files(
        saved.path,
        folder,
        source_filesystem=saved.filesystem,
        destination_filesystem=LocalFileSystem(),
        chunk_size=_COPIED_AT_ONCE,
    )


def read_files(folder: str) -> dict[str, bytes]:
    """Returns the content of files below a folder, by relative path."""
    files = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with open(path, "rb") as file:
                files[os.path.relpath(path, folder)] = file.read()
    return files


def fetch_files(saved: ray.train.Checkpoint) -> dict[str, bytes]:
    """Returns the content of files of a stored checkpoint, by relative path.

    Raises:
        DamagedCheckpointError: The checkpoint is not whole.
    """
    with local_folder(saved) as folder:
        checkpoint_files.check_folder(folder, name=posixpath.basename(saved.path))
        return read_files(folder)


def size_of_files(files: Mapping[str, bytes]) -> int:
    """Returns the size in bytes of a result of `read_files`."""
    return sum(map(len, files.values()))


def write_files(files: dict[str, bytes], folder: str) -> None:
    """Writes a result of `read_files` to a folder."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
