"""The folder of a run on its storage: its name, where its run stands, and how it is put aside. Driver side.

Ray Train goes on from what its `checkpoint_manager_snapshot.json` lists; beside each checkpoint lies raytf's own
`state.json`. Both are read where they are: no checkpoint is downloaded for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import posixpath
import re
import secrets
import warnings
from collections.abc import Callable, Sequence
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
from raytf.errors import ConfigError, in_a_line
from raytf.storage import checkpoint_files, step_folders, stored_json
from raytf.storage.checkpoint_files import AT_ENDS, CheckpointState, DamagedCheckpointError
from raytf.storage.run_lock import LOCK

logger = logs.get_logger(__name__)

# Ray Train names every RunConfig that has no name by the second in which it is made.
_RAYS_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")

# How Ray Train names the folders of checkpoints, unless a train loop names them otherwise.
_RAYS_CHECKPOINT = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def new_name(kind: str) -> str:
    """A name that no other run has, with the time in it for its reader."""
    return f"{kind}_{_now()}_{secrets.token_hex(3)}"


def is_unnamed(run_config) -> bool:
    """Whether a RunConfig was given no name."""
    return not run_config.name or _RAYS_NAME.fullmatch(run_config.name) is not None


def named(run_config, kind: str):
    """The RunConfig with a name; one without gets a new one each time, and is itself left as it is."""
    return dataclasses.replace(run_config, name=new_name(kind)) if is_unnamed(run_config) else run_config


def located(run_config):
    """Returns the RunConfig with its storage path from the root, as Ray wants it; a URI stays as it is."""
    path = run_config.storage_path
    if path is None or run_config.storage_filesystem is not None or "://" in os.fspath(path):
        return run_config
    absolute = os.path.abspath(os.path.expanduser(path))
    return run_config if path == absolute else dataclasses.replace(run_config, storage_path=absolute)


def where(run_config) -> str:
    """Returns the folder of a RunConfig that has a name, as its user would write it: a path or a URI."""
    storage = os.fspath(run_config.storage_path)
    return f"{storage.rstrip('/')}/{run_config.name}" if "://" in storage else RunFolder.of(run_config).path


@dataclasses.dataclass(frozen=True)
class LastCheckpoint:
    """Where the run of a folder stands: what the `state.json` of its last checkpoint says.

    Args:
        epoch: epochs that are complete.
        step: steps that are made in all.
        epoch_step: of these, those of an epoch that is not complete.
        stopped: whether a callback ended the run.
        identity: what the run was, see `same_run.py`; {} where that is not known.
        order: within an epoch, what says which rows its steps have, see `Feed.order`.
        relisted: (checkpoints, what is wrong with the list) where Ray's list is to be made anew, see `relist`.
        name: of the checkpoint's folder.
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
        filesystem: of the storage.
        path: of the folder there.
        name: of the run.
    """

    filesystem: pyarrow.fs.FileSystem
    path: str
    name: str

    @staticmethod
    def of(run_config) -> RunFolder:
        """The folder of a RunConfig of Ray Train or Tune, which has a name.

        Raises:
            ConfigError: there is no such file system.
        """
        try:
            filesystem, path = get_fs_and_path(run_config.storage_path, run_config.storage_filesystem)
        except (ValueError, OSError) as error:
            raise ConfigError(
                "storage_path must be a path, or the URI of a storage that pyarrow knows",
                f"{run_config.storage_path!r}, for which there is {in_a_line(error)}",
                "Correct RunConfig(storage_path=...)",
            ) from error
        return RunFolder(filesystem, posixpath.join(path, run_config.name), run_config.name)

    def last(self, finished: Callable[[LastCheckpoint], bool] = lambda last: False) -> LastCheckpoint | None:
        """Where the run stands, by the newest checkpoint that is whole; None without one.

        Whole by sizes; of a run that is finished, from which no worker goes on, every byte is compared.

        Args:
            finished: whether a run that stands there has nothing left to do.

        Raises:
            DamagedCheckpointError: there are checkpoints that were finished, and none is a whole one of raytf's.
            ConfigError: a newer raytf wrote one of them.
        """
        steps = [name for _, name in step_folders.listed(self.filesystem, self.path)]
        within, refused = self._first_whole(steps, finished)
        try:
            last, others = self._last_of_epochs(finished)
        except DamagedCheckpointError as error:
            if within is None:
                raise
            last, others = None, [str(error.received)]
        taken = last
        if within is not None and (last is None or last.step < within.step):
            taken = dataclasses.replace(within, relisted=last.relisted if last else None)
        damaged = refused + others
        if taken is not None and damaged:
            warnings.warn(f"{self.name}: {checkpoint_files.taken_instead(damaged, taken.name)}", stacklevel=3)
        elif refused:
            raise self._none_whole(f"none is whole: {'; '.join(damaged)}")
        elif damaged:
            logger.warning(f"{self.name}: none of its checkpoints is whole ({'; '.join(damaged)}); starts from scratch")
        return taken

    def _none_whole(self, why: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            "A run resumes from checkpoints of raytf.KerasTrainer",
            f"{self.path!r}, where {why}",
            "Use resume=False to start from scratch, or choose another RunConfig(name=...)",
        )

    def _first_whole(
        self, names: Sequence[str], finished: Callable[[LastCheckpoint], bool]
    ) -> tuple[LastCheckpoint | None, list[str]]:
        """Where the run stood at the first checkpoint that is whole, and what is wrong with those before it."""
        refused: list[str] = []
        for name in names:
            try:
                found = self._look(name, finished)
            except DamagedCheckpointError as error:
                refused.append(str(error.received))
                continue
            return found, refused
        return None, refused

    def _last_of_epochs(self, finished: Callable[[LastCheckpoint], bool]) -> tuple[LastCheckpoint | None, list[str]]:
        """Where the run stood at the newest whole checkpoint of an epoch's end, and what is wrong with newer ones."""
        wrong, names, unlisted = "", [], []
        try:
            names = [entry.checkpoint_dir_name for entry in self._by_age(self._listed())]
            unlisted = self._unlisted(names)
            names = unlisted + names
        except stored_json.UnreadableError as error:
            wrong, listed = str(error), not error.missing
            names = self._stored()
            if not names and not listed:
                return None, []
        found, refused = self._first_whole(names, finished)
        if found is not None:
            if wrong or refused or unlisted:
                found = dataclasses.replace(found, relisted=(tuple(names[len(refused) :]), wrong))
            return found, refused
        if wrong and not listed:  # of a run that ended before its first checkpoint was whole
            return None, refused
        if names or wrong:
            where = f"none is whole: {'; '.join(refused)}" if names else "there is none"
            wrong = f", and {CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, which lists them, {wrong}" if wrong else ""
            raise self._none_whole(f"{where}{wrong}")
        return None, []

    def relist(self, last: LastCheckpoint, config: CheckpointConfig) -> None:
        """Writes Ray's list of the checkpoints anew where it cannot be used, or lists newer ones that are damaged.

        Args:
            last: what `last` found.
            config: the run's; says in which order Ray keeps them.

        Raises:
            ConfigError: it cannot be written.
        """
        if last.relisted is None:
            return
        names, wrong = last.relisted
        known = {}
        if not wrong:
            known = {entry.checkpoint_dir_name: entry.metrics for entry in self._listed().checkpoint_results}
        found = []
        for name in reversed(names):
            try:
                state = checkpoint_files.look(self.filesystem, f"{self.path}/{name}")
            except DamagedCheckpointError:
                continue
            found.append(TrainingResultState(checkpoint_dir_name=name, metrics=known.get(name) or state.reported))
        order = {entry.checkpoint_dir_name: i for i, entry in enumerate(found)}
        kept = sorted(found, key=lambda entry: _score(entry.metrics, config))
        snapshot = CheckpointManagerState(
            checkpoint_results=kept,
            checkpoint_report_indices=[order[entry.checkpoint_dir_name] for entry in kept],
            latest_checkpoint_result=found[-1],
            pending_training_results=[],
            pending_validation_specs=[],
            current_report_index=len(found),
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
                f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, where there is {in_a_line(error)}",
                "Move what is there away, or use resume=False to start from scratch",
            ) from error
        file = CHECKPOINT_MANAGER_SNAPSHOT_FILENAME + (f", which {wrong}," if wrong else "")
        logger.warning(f"{self.name}: {file} now lists its {len(found)} whole checkpoint(s)")

    def check_list(self) -> None:
        """Raises ConfigError where Ray's list of the checkpoints is there and cannot be used, or has been lost."""
        try:
            self._listed()
        except stored_json.UnreadableError as error:
            if error.missing and sum(map(bool, map(_RAYS_CHECKPOINT.match, self._stored()))) < 2:
                return  # a run may end within its first checkpoint
            raise ConfigError(
                "A run resumes from the checkpoints that Ray Train lists in its folder",
                f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}, which {error}",
                "Bring the file back from a copy, or choose another RunConfig(name=...)",
            ) from error

    def _listed(self) -> CheckpointManagerState:
        """Ray's list, as far as Ray itself takes it.

        Raises:
            UnreadableError: it does not.
        """
        found = stored_json.fetched(self.filesystem, f"{self.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}")
        try:
            listed = CheckpointManagerState.model_validate(found)
        except (ValueError, TypeError, RecursionError) as error:  # of pydantic
            raise stored_json.UnreadableError("is no list of this version of Ray") from error
        results, latest = listed.checkpoint_results, listed.latest_checkpoint_result
        names = [entry.checkpoint_dir_name for entry in results]
        others = [*listed.pending_training_results, *([latest] if latest else [])]
        named = {entry.checkpoint_dir_name for entry in others}
        if len(names) != len(listed.checkpoint_report_indices) or not named <= set(names):
            raise stored_json.UnreadableError("contradicts itself")
        if any(name != posixpath.basename(name) or name in ("", ".", "..") for name in names):
            raise stored_json.UnreadableError("names folders elsewhere")
        infos = self.filesystem.get_file_info([f"{self.path}/{name}" for name in names])
        if gone := [name for name, info in zip(names, infos, strict=True) if info.type != FileType.Directory]:
            raise stored_json.UnreadableError(f"lists {gone[0]!r}, which is missing")
        return listed

    @staticmethod
    def _by_age(listed: CheckpointManagerState) -> list[TrainingResultState]:
        """What is listed, newest first."""
        pairs = zip(listed.checkpoint_report_indices, listed.checkpoint_results, strict=True)
        return [entry for _, entry in sorted(pairs, key=lambda pair: pair[0], reverse=True)]

    def _unlisted(self, listed: Sequence[str]) -> list[str]:
        """Whole checkpoints of ends of epochs behind the last that is listed, newest first; their run was killed."""
        found = checkpoint_files.unlisted(self.filesystem, self.path, lambda: listed)
        last = -1
        if found and listed:
            with contextlib.suppress(DamagedCheckpointError):  # it is named when it is tried
                last = checkpoint_files.look(self.filesystem, f"{self.path}/{listed[0]}").step
        steps = sorted(((state.step, name) for name, state in found), reverse=True)
        return [name for step, name in steps if step > last]

    def _stored(self) -> list[str]:
        """The checkpoints that lie in the folder, newest first."""
        found = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        folders = [info.base_name for info in found if info.type == FileType.Directory]
        return checkpoint_files.by_step((n for n in folders if n.startswith(AT_ENDS)), str, self._step)

    def _step(self, name: str) -> int | None:
        """The steps that were made before a checkpoint; None where it does not tell."""
        try:
            return checkpoint_files.look(self.filesystem, f"{self.path}/{name}").step
        except DamagedCheckpointError:
            return None

    def _look(self, name: str, finished: Callable[[LastCheckpoint], bool]) -> LastCheckpoint:
        """Where the run stood at a checkpoint; raises DamagedCheckpointError unless it is whole."""
        path = f"{self.path}/{name}"
        state: CheckpointState = checkpoint_files.look(self.filesystem, path)
        last = LastCheckpoint(
            state.epoch, state.step, state.epoch_step, state.stopped, state.identity, state.order, name=name
        )
        if finished(last):
            with Checkpoint(path, filesystem=self.filesystem).as_directory() as folder:
                checkpoint_files.check(folder, name=name)
        return last

    def put_aside(self) -> str | None:
        """Moves what a run has left in the folder into one of its own beside it, where it can be loaded and goes on.

        Returns:
            The name of that folder, or None where there was nothing.
        """
        found = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        mine = [info for info in found if not info.base_name.startswith(LOCK) and not self._is_a_run(info)]
        if not mine:
            return None
        aside = f"{self.name}_until_{_now()}_{secrets.token_hex(3)}"
        target = posixpath.join(posixpath.dirname(self.path), posixpath.basename(aside))
        self.filesystem.create_dir(target)
        # what lists the checkpoints goes first: whatever happens in between, nothing lists what is not there
        for info in sorted(mine, key=lambda info: info.base_name != CHECKPOINT_MANAGER_SNAPSHOT_FILENAME):
            self._move(info, f"{target}/{info.base_name}")
        return aside

    def _is_a_run(self, info) -> bool:
        """Whether an entry is the folder of another run, whose name begins with this one's and a slash."""
        if info.type != FileType.Directory:
            return False
        inside = [f"{info.path}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}", f"{info.path}/{LOCK}"]
        return any(there.type == FileType.File for there in self.filesystem.get_file_info(inside))

    def _move(self, info, target: str) -> None:
        """Moves a file or a folder; the folders of object stores are moved file by file, as they are only names."""
        if info.type != FileType.Directory or isinstance(self.filesystem, pyarrow.fs.LocalFileSystem):
            self.filesystem.move(info.path, target)
            return
        for inner in self.filesystem.get_file_info(FileSelector(info.path, recursive=True)):
            if inner.type == FileType.File:
                place = f"{target}/{posixpath.relpath(inner.path, info.path)}"
                self.filesystem.create_dir(posixpath.dirname(place))
                self.filesystem.move(inner.path, place)
        self.filesystem.delete_dir(info.path)


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def _score(metrics: dict[str, Any], config: CheckpointConfig) -> tuple[bool, float]:
    """What Ray sorts the checkpoints of a run by, the worst first; those without a score before all others."""
    score = metrics.get(config.checkpoint_score_attribute)
    if isinstance(score, bool) or not isinstance(score, (int, float)) or math.isnan(score):
        return False, 0.0
    return True, score if config.checkpoint_score_order == "max" else -score
