"""A run's folder on its storage: its name, the run's progress, and archiving. Driver side.

A run resumes from the checkpoints that Ray's `checkpoint_manager_snapshot.json` lists. Each checkpoint also holds
raytf's own `state.json`. Both are read in place, without a download of the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import numbers
import os
import posixpath
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow.fs
from pyarrow.fs import FileSelector, FileType
from ray.train import Checkpoint, CheckpointConfig

from raytf import logs
from raytf.compat.ray_train import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,
    CheckpointManagerState,
    TrainingResultState,
    get_fs_and_path,
)
from raytf.errors import ConfigError, one_line
from raytf.storage import checkpoint_files, step_folders, stored_json
from raytf.storage.checkpoint_files import AT_ENDS, CheckpointState, DamagedCheckpointError
from raytf.storage.folder_contents import local_folder
from raytf.storage.run_lock import LOCK

logger = logs.get_logger(__name__)

# Ray Train names every unnamed RunConfig by the second of its creation.
_RAYS_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")

# Ray Train's names of checkpoint folders, unless a train loop names them otherwise.
_RAYS_CHECKPOINT = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def new_name(kind: str) -> str:
    """Returns a unique run name that contains the time."""
    return f"{kind}_{_now()}_{secrets.token_hex(3)}"


def is_unnamed(run_config) -> bool:
    """Returns whether a RunConfig was created without a name."""
    return not run_config.name or _RAYS_NAME.fullmatch(run_config.name) is not None


def with_name(run_config, kind: str):
    """Returns the RunConfig with a name; copies one without a name and creates a new name each time."""
    return dataclasses.replace(run_config, name=new_name(kind)) if is_unnamed(run_config) else run_config


def with_absolute_path(run_config):
    """Returns the RunConfig with an absolute storage path, as Ray requires; keeps a URI."""
    path = run_config.storage_path
    if path is None or run_config.storage_filesystem is not None or "://" in os.fspath(path):
        return run_config
    absolute = os.path.abspath(os.path.expanduser(path))
    return run_config if path == absolute else dataclasses.replace(run_config, storage_path=absolute)


def folder_in_users_form(run_config) -> str:
    """Returns the folder of a named RunConfig in the user's notation: a path or a URI."""
    storage = os.fspath(run_config.storage_path)
    return f"{storage.rstrip('/')}/{run_config.name}" if "://" in storage else RunFolder.from_config(run_config).path


@dataclasses.dataclass(frozen=True)
class LastCheckpoint:
    """Progress of a run, from the `state.json` of its last checkpoint.

    Args:
        epoch: Completed epochs.
        step: Steps made in total.
        epoch_step: Completed steps of the unfinished epoch.
        stopped: Whether a callback ended the run.
        identity: The run's identity, see `same_run.py`; {} if unknown.
        order: Mid-epoch, values that determine the rows of its steps, see `Feed.order`.
        relisted: (checkpoints, error in the list) if Ray's list must be rewritten, see `relist`.
        name: Name of the checkpoint's folder.
    """

    epoch: int
    step: int
    epoch_step: int
    stopped: bool
    identity: dict[str, Any]
    order: dict[str, Any] = dataclasses.field(default_factory=dict)
    relisted: tuple[tuple[str, ...], str] | None = None
    name: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Args:
        filesystem: File system of the storage.
        path: Path of the folder there.
        name: Name of the run.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    name: str

    @staticmethod
    def from_config(run_config) -> RunFolder:
        """Returns the folder of a named RunConfig of Ray Train or Tune.

        Raises:
            ConfigError: The file system does not exist.
        """
        try:
            filesystem, path = get_fs_and_path(run_config.storage_path, run_config.storage_filesystem)
        except (ValueError, OSError) as error:
            raise ConfigError(
                "storage_path must be a path, or the URI of a storage that pyarrow knows",
                f"{run_config.storage_path!r}, for which there is {one_line(error)}",
                "Correct RunConfig(storage_path=...)",
            ) from error
        return RunFolder(filesystem, posixpath.join(path, run_config.name), run_config.name)

    def last(self, finished: Callable[[LastCheckpoint], bool] = lambda last: False) -> LastCheckpoint | None:
        """Returns the run's progress from its newest whole checkpoint; None without one.

        Compares sizes. For a finished run, which no worker resumes, it compares every byte.

        Args:
            finished: Returns whether a run at this checkpoint is complete.

        Raises:
            DamagedCheckpointError: There are finished checkpoints, but no whole one of raytf's.
            ConfigError: A newer raytf wrote one of them.
        """
        steps = [name for _, name in step_folders.finished_folders(self.filesystem, self.path)]
        mid_epoch, refused = self._first_whole(steps, finished)
        try:
            last, epoch_errors = self._last_of_epochs(finished)
        except DamagedCheckpointError as error:
            if mid_epoch is None:
                raise
            last, epoch_errors = None, [str(error.received)]
        chosen = last
        if mid_epoch is not None and (last is None or last.step < mid_epoch.step):
            chosen = dataclasses.replace(mid_epoch, relisted=last.relisted if last else None)
        damaged = refused + epoch_errors
        if chosen is not None and damaged:
            logger.warning(f"{self.name}: {checkpoint_files.describe_choice(damaged, chosen.name)}")
        elif refused:
            raise self._none_whole(f"none is whole: {'; '.join(damaged)}")
        elif damaged:
            logger.warning(
                f"{self.name}: none of its checkpoints is whole ({'; '.join(damaged)}). The run starts from scratch. "
                "Stop it, and bring back a copy of its folder, if you need its state"
            )
        return chosen

    def _none_whole(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            "A run resumes from checkpoints of raytf.KerasTrainer",
            f"{self.path!r}, where {why}",
            "Use resume=False (--resume false) to start from scratch, or choose another RunConfig(name=...)",
        )

    def _first_whole(
        self, names: Sequence[str], finished: Callable[[LastCheckpoint], bool]
    ) -> tuple[LastCheckpoint | None, list[str]]:
        """Returns the progress at the first whole checkpoint, and the damage of those before it."""
        refused: list[str] = []
        for name in names:
            try:
                progress = self._check_stored(name, finished)
            except DamagedCheckpointError as error:
                refused.append(str(error.received))
                continue
            return progress, refused
        return None, refused

    def _last_of_epochs(self, finished: Callable[[LastCheckpoint], bool]) -> tuple[LastCheckpoint | None, list[str]]:
        """Returns the progress at the newest whole epoch-end checkpoint, and the damage of newer ones."""
        list_error, names, unlisted = "", [], []
        try:
            names = [entry.checkpoint_dir_name for entry in self._by_age(self._listed())]
            unlisted = self._unlisted(names)
            names = unlisted + names
        except stored_json.UnreadableError as error:
            list_error, listed = str(error), not error.missing
            names = self._stored()
            if not names and not listed:
                return None, []
        progress, refused = self._first_whole(names, finished)
        if progress is not None:
            if list_error or refused or unlisted:
                progress = dataclasses.replace(progress, relisted=(tuple(names[len(refused) :]), list_error))
            return progress, refused
        if list_error and not listed:  # of a run that ended before its first checkpoint was whole
            return None, refused
        if names or list_error:
            problem = f"none is whole: {'; '.join(refused)}" if names else "there is none"
            list_error = (
                f", and {CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, which lists them, {list_error}" if list_error else ""
            )
            raise self._none_whole(f"{problem}{list_error}")
        return None, []

    def relist(self, last: LastCheckpoint, config: CheckpointConfig) -> None:
        """Rewrites Ray's list of the checkpoints if it is unusable, or lists newer ones that are damaged.

        Args:
            last: Result of `last`.
            config: The run's config; determines the order in which Ray keeps checkpoints.

        Raises:
            ConfigError: The list cannot be written.
        """
        if last.relisted is None:
            return
        names, list_error = last.relisted
        known = {}
        if not list_error:
            known = {entry.checkpoint_dir_name: entry.metrics for entry in self._listed().checkpoint_results}
        entries = []
        for name in reversed(names):
            try:
                state = checkpoint_files.check_stored(self.filesystem, f"{self.path}/{name}")
            except DamagedCheckpointError:
                continue
            entries.append(TrainingResultState(checkpoint_dir_name=name, metrics=known.get(name) or state.reported))
        order = {entry.checkpoint_dir_name: i for i, entry in enumerate(entries)}
        ordered = sorted(entries, key=lambda entry: score_key(entry.metrics, config))
        snapshot = CheckpointManagerState(
            checkpoint_results=ordered,
            checkpoint_report_indices=[order[entry.checkpoint_dir_name] for entry in ordered],
            latest_checkpoint_result=entries[-1],
            pending_training_results=[],
            pending_validation_specs=[],
            current_report_index=len(entries),
            validated_checkpoint_dir_names=[],
            timed_out_validation_checkpoint_dir_names=[],
            failed_validation_checkpoint_dir_names=[],
        )
        try:
            with self.filesystem.open_output_stream(f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}") as file:
                file.write(snapshot.model_dump_json().encode())
        except OSError as error:
            raise ConfigError(
                "Ray's list of a run's checkpoints must be a file that can be written",
                f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, where there is {one_line(error)}",
                "Move what is there away, or use resume=False (--resume false) to start from scratch",
            ) from error
        file = CHECKPOINT_MANAGER_SNAPSHOT_FILENAME + (f", which {list_error}," if list_error else "")
        logger.warning(
            f"{self.name}: {file} is rebuilt from the folders, and lists {len(entries)} whole checkpoint(s) now. "
            "Nothing to do"
        )

    def check_list(self) -> None:
        """Raises ConfigError if Ray's list of the checkpoints is unusable or lost."""
        try:
            self._listed()
        except stored_json.UnreadableError as error:
            if error.missing and sum(map(bool, map(_RAYS_CHECKPOINT.match, self._stored()))) < 2:
                return  # a run may end during its first checkpoint
            raise ConfigError(
                "A run resumes from the checkpoints that Ray's list in its folder names",
                f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, which {error}",
                "Bring the file back from a copy, or choose another RunConfig(name=...)",
            ) from error

    def _listed(self) -> CheckpointManagerState:
        """Returns Ray's list, if Ray itself would accept it.

        Raises:
            UnreadableError: Ray would not.
        """
        content = stored_json.read_object(self.filesystem, f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}")
        try:
            listed = CheckpointManagerState.model_validate(content)
        except (ValueError, TypeError, RecursionError) as error:  # of pydantic
            raise stored_json.UnreadableError("is no list of this version of Ray") from error
        results, latest = listed.checkpoint_results, listed.latest_checkpoint_result
        names = [entry.checkpoint_dir_name for entry in results]
        referenced = [*listed.pending_training_results, *([latest] if latest else [])]
        referenced_names = {entry.checkpoint_dir_name for entry in referenced}
        if len(names) != len(listed.checkpoint_report_indices) or not referenced_names <= set(names):
            raise stored_json.UnreadableError("contradicts itself")
        if any(name != posixpath.basename(name) or name in ("", ".", "..") for name in names):
            raise stored_json.UnreadableError("names folders elsewhere")
        infos = self.filesystem.get_file_info([f"{self.path}/{name}" for name in names])
        if missing := [name for name, info in zip(names, infos, strict=True) if info.type != FileType.Directory]:
            raise stored_json.UnreadableError(f"lists {missing[0]!r}, which is missing")
        return listed

    @staticmethod
    def _by_age(listed: CheckpointManagerState) -> list[TrainingResultState]:
        """Returns the listed checkpoints, newest first."""
        pairs = zip(listed.checkpoint_report_indices, listed.checkpoint_results, strict=True)
        return [entry for _, entry in sorted(pairs, key=lambda pair: pair[0], reverse=True)]

    def _unlisted(self, listed: Sequence[str]) -> list[str]:
        """Returns whole epoch-end checkpoints after the last listed one, newest first; their run was killed."""
        states = checkpoint_files.unlisted_checkpoints(self.filesystem, self.path, lambda: listed)
        last = -1
        if states and listed:
            with contextlib.suppress(DamagedCheckpointError):  # reported when it is tried
                last = checkpoint_files.check_stored(self.filesystem, f"{self.path}/{listed[0]}").step
        steps = sorted(((state.step, name) for name, state in states), reverse=True)
        return [name for step, name in steps if step > last]

    def _stored(self) -> list[str]:
        """Returns the checkpoints in the folder, newest first."""
        infos = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        folders = [info.base_name for info in infos if info.type == FileType.Directory]
        return checkpoint_files.by_step((n for n in folders if n.startswith(AT_ENDS)), str, self._step)

    def _step(self, name: str) -> int | None:
        """Returns the steps made before a checkpoint; None if it is unreadable."""
        try:
            return checkpoint_files.check_stored(self.filesystem, f"{self.path}/{name}").step
        except DamagedCheckpointError:
            return None

    def _check_stored(self, name: str, finished: Callable[[LastCheckpoint], bool]) -> LastCheckpoint:
        """Returns the progress at a checkpoint; raises DamagedCheckpointError unless it is whole."""
        path = f"{self.path}/{name}"
        state: CheckpointState = checkpoint_files.check_stored(self.filesystem, path)
        last = LastCheckpoint(
            state.epoch, state.step, state.epoch_step, state.stopped, state.identity, state.order, name=name
        )
        if finished(last):
            with local_folder(Checkpoint(path, filesystem=self.filesystem)) as folder:
                checkpoint_files.check_folder(folder, name=name)
        return last

    def archive(self) -> str | None:
        """Moves the run's files into a new folder next to this one, from which they can be loaded and resumed.

        Returns:
            The name of that folder, or None if there was nothing to move.
        """
        infos = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        members = [info for info in infos if not info.base_name.startswith(LOCK) and not self._is_a_run(info)]
        if not members:
            return None
        archive = f"{self.name}_until_{_now()}_{secrets.token_hex(3)}"
        target = posixpath.join(posixpath.dirname(self.path), posixpath.basename(archive))
        self.filesystem.create_dir(target)
        # moves the list of the checkpoints first: after a crash, no list names missing files
        for info in sorted(members, key=lambda info: info.base_name != CHECKPOINT_MANAGER_SNAPSHOT_FILENAME):
            self._move(info, f"{target}/{info.base_name}")
        return archive

    def _is_a_run(self, info) -> bool:
        """Returns whether an entry is the folder of another run, whose name begins with this one's and a slash."""
        if info.type != FileType.Directory:
            return False
        markers = [f"{info.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}", f"{info.path}/{LOCK}"]
        return any(marker.type == FileType.File for marker in self.filesystem.get_file_info(markers))

    def _move(self, info, target: str) -> None:
        """Moves a file or a folder; file by file on object stores, where folders are only names."""
        if info.type != FileType.Directory or isinstance(self.filesystem, pyarrow.fs.LocalFileSystem):
            self.filesystem.move(info.path, target)
            return
        for inner in self.filesystem.get_file_info(FileSelector(info.path, recursive=True)):
            if inner.type == FileType.File:
                destination = f"{target}/{posixpath.relpath(inner.path, info.path)}"
                self.filesystem.create_dir(posixpath.dirname(destination))
                self.filesystem.move(inner.path, destination)
        self.filesystem.delete_dir(info.path)


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def score_key(metrics: Mapping[str, Any], config: CheckpointConfig) -> tuple[bool, float]:
    """Returns Ray's sort key of a run's checkpoints, worst first; those without a score precede all others."""
    score = metrics.get(config.checkpoint_score_attribute)
    if isinstance(score, bool) or not isinstance(score, numbers.Real) or math.isnan(score):
        return False, 0.0
    return True, float(score) if config.checkpoint_score_order == "max" else -float(score)
