"""A trial's mid-epoch checkpoints: their folders, and the one that a restarted trial resumes from.

Epoch-end checkpoints are Tune's, which selects the one that a trial starts from, perhaps another trial's. Later ones
are in a subfolder, named after the trial's config and the foreign checkpoint that it began with. So a trial never
resumes from checkpoints of other weights or another config.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping
from typing import Any

from pyarrow.fs import FileSelector, FileType
from ray.tune import Checkpoint

from raytf import logs
from raytf.identity import canonical
from raytf.storage import checkpoint_files, snapshots, step_folders, stored_json
from raytf.storage.checkpoint_files import MANIFEST, DamagedCheckpointError
from raytf.storage.folder_contents import fetch_files
from raytf.worker.session import TRIAL

logger = logs.get_logger(__name__)

PREFIX = "steps_"


def trial_folder(config: Mapping[str, Any], begun_with: str) -> str:
    """Returns the name of the subfolder in a trial's folder; equal in every process.

    Args:
        config: The trial's config.
        begun_with: "<trial>/<checkpoint>" of another trial, or "".
    """
    descriptions = {name: canonical.describe(value) for name, value in config.items()}
    return PREFIX + canonical.hash_value(canonical.dump([begun_with, descriptions]))


def initial_checkpoint(checkpoint: str, trial: str, files: Mapping[str, bytes]) -> str:
    """Returns the foreign checkpoint that a trial began with, from the Tune checkpoint that it now starts from, or "".

    Args:
        checkpoint: Path of the checkpoint.
        trial: Path of the folder of the trial that starts.
        files: Files of the checkpoint, by name.
    """
    trial_folder, name = posixpath.split(checkpoint.rstrip("/"))
    if trial_folder == trial.rstrip("/") and TRIAL in files:
        recorded = stored_json.parse_object(files[TRIAL]).get("begun_with")
        if isinstance(recorded, str):
            return recorded
    return f"{posixpath.basename(trial_folder)}/{name}"


def newest_checkpoint(filesystem, folder: str, step_limit: int) -> tuple[dict[str, bytes], int] | None:
    """Returns (files, number of the trial's reports) of the last whole checkpoint after a step; None without one.

    Waits for the processes that write some; warns of damaged ones.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: Path there, see `trial_folder`.
        step_limit: Total steps at Tune's checkpoint, 0 without one.
    """
    snapshots.wait_for_all(filesystem, folder)
    steps = [name for step, name in step_folders.finished_folders(filesystem, folder) if step > step_limit]
    if not steps:
        return None
    candidates = [Checkpoint(posixpath.join(folder, name), filesystem=filesystem) for name in steps]
    try:
        return checkpoint_files.first_whole(candidates, _read)[1]
    except DamagedCheckpointError as error:
        logger.warning(
            f"Damaged: {error.received}. The trial resumes from step {step_limit}, that of Tune's checkpoint"
        )
        return None


def _read(saved: Checkpoint) -> tuple[dict[str, bytes], int]:
    name = posixpath.basename(saved.path)
    files = fetch_files(saved)
    reports = checkpoint_files.parse_object(files.get(TRIAL, b""), TRIAL, name).get("reports")
    if type(reports) is not int or reports < 0:
        raise checkpoint_files.damaged_error(name, f"{TRIAL} does not say how many reports there were")
    return files, reports


def reported_rows(trial: str, name: str, filesystem) -> bytes | None:
    """Returns the rows that a trial has reported until its newest checkpoint within an epoch; None without one.

    Args:
        trial: Path of the trial's folder.
        name: Name of the file of rows: progress.csv, or result.json with a JSON object in each line.
        filesystem: A `pyarrow.fs.FileSystem`.
    """
    infos = filesystem.get_file_info(FileSelector(trial, allow_not_found=True))
    folders = [info.path for info in infos if info.type == FileType.Directory and info.base_name.startswith(PREFIX)]
    saved = [
        (step, f"{folder}/{checkpoint}")
        for folder in folders
        for step, checkpoint in step_folders.finished_folders(filesystem, folder)
    ]
    if not saved or f"{trial}/{name}" not in {info.path for info in infos}:
        return None
    try:
        reports = stored_json.read_object(filesystem, f"{max(saved)[1]}/{TRIAL}").get("reports")
        lines = stored_json.read_bytes(filesystem, f"{trial}/{name}").splitlines(keepends=True)
    except stored_json.UnreadableError:
        return None  # it is reported as the trial starts
    if type(reports) is not int:
        return None
    return b"".join(lines[: reports + (name.endswith(".csv") and reports > 0)])


def is_finished(filesystem, folder: str, step: int) -> bool:
    """Returns whether there is a finished checkpoint of a step."""
    return any(saved_step == step for saved_step, _ in step_folders.finished_folders(filesystem, folder))


def remove_until(filesystem, folder: str, step: int) -> None:
    """Removes the checkpoints up to a step, as Tune's checkpoint holds more."""
    for saved_step, name in step_folders.finished_folders(filesystem, folder):
        if saved_step <= step:
            path = posixpath.join(folder, name)
            with contextlib.suppress(FileNotFoundError):  # the process that writes removes old ones, too
                filesystem.delete_file(posixpath.join(path, MANIFEST))
                filesystem.delete_dir(path)


def remove_all_trials(filesystem, sweep: str) -> None:
    """Removes the checkpoints of all trials of a finished sweep, once no process writes any more.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        sweep: Path of the sweep's folder there.
    """
    infos = filesystem.get_file_info(FileSelector(sweep, allow_not_found=True))
    for trial in [info.path for info in infos if info.type == FileType.Directory]:
        for info in filesystem.get_file_info(FileSelector(trial, allow_not_found=True)):
            if info.type == FileType.Directory and info.base_name.startswith(PREFIX):
                snapshots.wait_for_all(filesystem, info.path)
                filesystem.delete_dir(info.path)
