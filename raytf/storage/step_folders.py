"""Checkpoints within epochs: folders `step_<steps made in all>` in a run's folder, beside Ray's `checkpoint_...`.

One that another worker than the chief held in its memory, and wrote, as the run broke, is `step_<steps>_copy`.
"""

from __future__ import annotations

import re

from raytf.storage import checkpoint_files

PREFIX = "step_"
_COPY = "_copy"
_NAME = re.compile(rf"{PREFIX}(\d{{12,}})(?:{_COPY})?")


def name_of(step: int, copy: bool = False) -> str:
    """The name of the folder after so many steps, at least 0; names are ordered as numbers are.

    Args:
        step: steps made in all.
        copy: that of another worker than the chief: two that write at once have a folder each.
    """
    return f"{PREFIX}{step:012d}{_COPY if copy else ''}"


def step_of(name: str) -> int | None:
    """The steps that a folder's name tells, or None for that of something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name in (name_of(int(found[1])), name_of(int(found[1]), copy=True)) else None


def listed(filesystem, run: str) -> list[tuple[int, str]]:
    """(steps, name) of the finished ones in a run's folder, newest first.

    See `checkpoint_files.finished`.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: path of the run's folder there; it may be missing.
    """
    whole = checkpoint_files.finished(filesystem, run, lambda name: step_of(name) is not None)
    return sorted(((step_of(name), name) for name in whole), reverse=True)
