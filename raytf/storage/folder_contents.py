"""The files of a small folder in memory, as a checkpoint travels between processes."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping

import ray.train

from raytf.storage import checkpoint_files, scratch


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
    with scratch.name_errors(), saved.as_directory() as folder:
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
