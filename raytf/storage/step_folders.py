"""Checkpoints within epochs: folders `step_<steps made in all>` in a run's folder, beside Ray's `checkpoint_...`."""

from __future__ import annotations

import posixpath
import re

from pyarrow.fs import FileSelector, FileType

from raytf.storage.checkpoint_files import MANIFEST

PREFIX = "step_"
_NAME = re.compile(rf"{PREFIX}(\d{{12,}})")


def name_of(step: int) -> str:
    """The name of the folder after so many steps, at least 0; names are ordered as numbers are."""
    return f"{PREFIX}{step:012d}"


def step_of(name: str) -> int | None:
    """The steps that a folder's name tells, or None for that of something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name == name_of(int(found[1])) else None


def listed(filesystem, run: str) -> list[tuple[int, str]]:
    """(steps, name) of the finished ones in a run's folder, newest first.

    One without a manifest, which is written last, was not finished, and is passed over. What else is wrong with one is
    seen when it is opened.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: path of the run's folder there; it may be missing.
    """
    infos = filesystem.get_file_info(FileSelector(run, allow_not_found=True))
    names = [
        info.base_name for info in infos if info.type == FileType.Directory and step_of(info.base_name) is not None
    ]
    ends = filesystem.get_file_info([posixpath.join(run, name, MANIFEST) for name in names]) if names else []
    whole = [name for name, end in zip(names, ends, strict=True) if end.type == FileType.File]
    return sorted(((step_of(name), name) for name in whole), reverse=True)
