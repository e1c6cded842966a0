"""Mid-epoch checkpoints: folders `step_<total steps>` in a run's folder, next to Ray's `checkpoint_...`.

A worker other than the chief writes its in-memory copy as `step_<steps>_copy` when the run breaks.
"""

from __future__ import annotations

import re

from raytf.storage import checkpoint_files

PREFIX = "step_"
_COPY = "_copy"
_NAME = re.compile(rf"{PREFIX}(\d{{12,}})(?:{_COPY})?")


def folder_name(step: int, copy: bool = False) -> str:
    """Returns the folder's name after `step` steps; names sort like the numbers.

    Args:
        step: Steps made in total, at least 0.
        copy: Whether a worker other than the chief writes it: two concurrent writers use separate folders.
    """
    return f"{PREFIX}{step:012d}{_COPY if copy else ''}"


def step_of_folder(name: str) -> int | None:
    """Returns the steps in a folder's name, or None for other names."""
    match = _NAME.fullmatch(name)
    return (
        int(match[1]) if match and name in (folder_name(int(match[1])), folder_name(int(match[1]), copy=True)) else None
    )


def finished_folders(filesystem, run: str) -> list[tuple[int, str]]:
    """Returns (steps, name) of the finished ones in a run's folder, newest first.

    See `checkpoint_files.finished_names`.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder there; it may be missing.
    """
    whole = checkpoint_files.finished_names(filesystem, run, lambda name: step_of_folder(name) is not None)
    return sorted(((step_of_folder(name), name) for name in whole), reverse=True)
