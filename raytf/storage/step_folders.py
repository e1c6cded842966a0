"""Checkpoints within epochs: folders `step_<steps made in all>` in a run's folder, beside Ray's `checkpoint_...`."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re

import pyarrow.fs
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


def upload(folder: str, filesystem, run: str, name: str) -> None:
    """Copies a folder of this machine into a run's folder, its manifest last.

    Args:
        folder: what `checkpoint.save` wrote.
        filesystem, run: see `listed`.
        name: of the new folder; what is left there is removed first.
    """
    target = posixpath.join(run, name)
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_dir(target)
    filesystem.create_dir(target)
    for part in sorted(os.listdir(folder), key=lambda part: part == MANIFEST):
        pyarrow.fs.copy_files(
            os.path.join(folder, part),
            posixpath.join(target, part),
            source_filesystem=pyarrow.fs.LocalFileSystem(),
            destination_filesystem=filesystem,
        )


def remove_older(filesystem, run: str, keep: int) -> None:
    """Removes all but the newest finished ones.

    Args:
        filesystem, run: see `listed`.
        keep: how many stay, at least 1.
    """
    for _, name in listed(filesystem, run)[keep:]:
        filesystem.delete_dir(posixpath.join(run, name))
