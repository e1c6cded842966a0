"""A trial's checkpoints within its epochs: where they lie, and which one a trial that is started again goes on from.

Those of the ends of epochs are Tune's, which names the one that a trial starts from; it may be another trial's. What a
trial has kept since lies in its own folder, in one named after its config and after the foreign checkpoint that it
began with. So a trial never goes on from what it has kept before it took another one's weights, or another config.
"""

from __future__ import annotations

import contextlib
import posixpath
import warnings
from collections.abc import Mapping
from typing import Any

from pyarrow.fs import FileSelector, FileType
from ray.tune import Checkpoint

from raytf.identity import canonical
from raytf.storage import checkpoint_files, snapshots, step_folders, stored_json
from raytf.storage.checkpoint_files import MANIFEST, DamagedCheckpointError
from raytf.worker.session import TRIAL, fetched

PREFIX = "steps_"


def folder_of(config: Mapping[str, Any], begun_with: str) -> str:
    """The name of the folder in that of a trial; the same in every process.

    Args:
        config: the trial's.
        begun_with: "<trial>/<checkpoint>" of another trial, or "".
    """
    told = {name: canonical.described(value) for name, value in config.items()}
    return PREFIX + canonical.hashed(canonical.dumped([begun_with, told]))


def begun_with(checkpoint: str, trial: str, files: Mapping[str, bytes]) -> str:
    """What a trial has begun with that starts from a checkpoint of Tune: that of another trial, or "".

    Args:
        checkpoint: path of it.
        trial: path of the folder of the trial that starts.
        files: of the checkpoint, by name.
    """
    where, name = posixpath.split(checkpoint.rstrip("/"))
    if where == trial.rstrip("/") and TRIAL in files:
        found = stored_json.parsed(files[TRIAL]).get("begun_with")
        if isinstance(found, str):
            return found
    return f"{posixpath.basename(where)}/{name}"


def newest(filesystem, folder: str, after: int) -> tuple[dict[str, bytes], int] | None:
    """(files, reports that the trial had made) of the last whole one behind a step; None where there is none.

    Waits for the processes that write some; warns of those that are damaged.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: path there, see `folder_of`.
        after: steps made in all at Tune's checkpoint, 0 without one.
    """
    snapshots.wait_for_all(filesystem, folder)
    steps = [name for step, name in step_folders.listed(filesystem, folder) if step > after]
    if not steps:
        return None
    candidates = [Checkpoint(posixpath.join(folder, name), filesystem=filesystem) for name in steps]
    try:
        return checkpoint_files.first_whole(candidates, _read)[1]
    except DamagedCheckpointError as error:
        warnings.warn(
            f"Damaged: {error.received}. The trial goes on from step {after}, that of Tune's checkpoint", stacklevel=2
        )
        return None


def _read(saved: Checkpoint) -> tuple[dict[str, bytes], int]:
    name = posixpath.basename(saved.path)
    files = fetched(saved)
    reports = checkpoint_files.object_of(files.get(TRIAL, b""), TRIAL, name).get("reports")
    if type(reports) is not int or reports < 0:
        raise checkpoint_files.damaged(name, f"{TRIAL} does not say how many reports there were")
    return files, reports


def is_kept(filesystem, folder: str, step: int) -> bool:
    """Whether a finished one of a step is there."""
    return any(its == step for its, _ in step_folders.listed(filesystem, folder))


def remove(filesystem, folder: str, step: int) -> None:
    """Removes those of no more than so many steps, as Tune's checkpoint holds more."""
    for its, name in step_folders.listed(filesystem, folder):
        if its <= step:
            path = posixpath.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # the process that writes removes old ones, too
                filesystem.delete_file(posixpath.join(path, MANIFEST))
                filesystem.delete_dir(path)


def remove_all(filesystem, sweep: str) -> None:
    """Removes those of all trials of a sweep that has ended, once nobody writes any more.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        sweep: path of the sweep's folder there.
    """
    found = filesystem.get_file_info(FileSelector(sweep, allow_not_found=True))
    for trial in [info.path for info in found if info.type == FileType.Directory]:
        for info in filesystem.get_file_info(FileSelector(trial, allow_not_found=True)):
            if info.type == FileType.Directory and info.base_name.startswith(PREFIX):
                snapshots.wait_for_all(filesystem, info.path)
                filesystem.delete_dir(info.path)
