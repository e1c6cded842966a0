"""Checkpoints of a named `raytf.fit` call, from which the same call resumes at the next step. Driver side.

The checkpoints are in `<storage>/<name>/fit`, and are removed when the training is complete. Then the model has the
result, and the next call trains it further.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.train import Checkpoint, RunConfig

from raytf import logs, validation
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.fitting.arrays import RowData
from raytf.identity import canonical, fingerprint, same_run
from raytf.storage import checkpoint_files, run_folder, snapshots, step_folders, stored_json
from raytf.storage.checkpoint_files import STATE, CheckpointState
from raytf.storage.folder_contents import fetch_files
from raytf.storage.run_folder import RunFolder
from raytf.storage.run_lock import RunLock
from raytf.worker import checkpoint_every as checkpoint_every_module
from raytf.worker.checkpoint_every import CheckpointInterval
from raytf.worker.trial_session import TrialCheckpointDir

logger = logs.get_logger(__name__)

_FOLDER = "fit"


@dataclass(frozen=True)
class NamedFitCheckpoints:
    """Location and schedule of a call's checkpoints.

    Args:
        run: The folder of its name.
        interval: Schedule, see `checkpoint_every`.
        resume: "auto", True or False, as in `KerasTrainer`.
        user_path: The folder in the user's notation.
    """

    run: RunFolder
    interval: CheckpointInterval
    resume: str | bool
    user_path: str

    @staticmethod
    def from_arguments(
        name: str | None, storage, checkpoint_every: str, resume: str | bool
    ) -> NamedFitCheckpoints | None:
        """Parses arguments of `raytf.fit`; returns None without a name.

        Raises:
            ConfigError: An argument is wrong, or has no effect without a name.
        """
        interval = checkpoint_every_module.parse_interval(checkpoint_every)
        validation.check_word("resume", resume, ("auto", True, False))
        validation.check_path("storage", storage)
        if name is None:
            given = {"storage": storage is not None, "checkpoint_every": not interval.auto, "resume": resume != "auto"}
            if any(given.values()):
                raise ConfigError(
                    "raytf.fit keeps checkpoints, and resumes from them, under a name",
                    f"no name, and {', '.join(key for key, is_given in given.items() if is_given)}",
                    'Pass name="...", too',
                )
            return None
        validation.check_run_name(name)
        location = {} if storage is None else {"storage_path": os.fspath(storage)}
        config = run_folder.with_absolute_path(RunConfig(name=name, **location))
        return NamedFitCheckpoints(
            RunFolder.from_config(config), interval, resume, run_folder.folder_in_users_form(config)
        )

    @property
    def folder(self) -> str:
        """Returns the path of the checkpoints' folder."""
        return posixpath.join(self.run.path, _FOLDER)

    @property
    def location(self) -> TrialCheckpointDir:
        """Returns the checkpoint location for the workers."""
        return TrialCheckpointDir(self.run.filesystem, self.folder, 0)

    def lock(self) -> RunLock:
        """Returns a lock that excludes other calls of the same name."""
        return RunLock(self.run.filesystem, self.run.path)

    def newest(self, now: Mapping[str, Any]) -> tuple[dict[str, bytes], CheckpointState] | tuple[None, None]:
        """Returns (files, state) of the checkpoint to resume from, or Nones.

        Args:
            now: Result of `training_identity`.

        Raises:
            ConfigError: It is of another training, or there is none and resume=True.
            DamagedCheckpointError: There are checkpoints, but no whole one.
        """
        snapshots.wait_for_all(self.run.filesystem, self.folder)
        if self.resume is False:
            self.forget()
        steps = step_folders.finished_folders(self.run.filesystem, self.folder)
        if not steps and self.resume is True:
            raise ConfigError(
                "With resume=True a training resumes from a checkpoint",
                f"none in {self.folder}",
                'Correct name and storage, or use resume="auto"',
            )
        if not steps:
            return None, None
        paths = [posixpath.join(self.folder, name) for _, name in steps]
        candidates = [Checkpoint(path, filesystem=self.run.filesystem) for path in paths]
        saved, files = checkpoint_files.first_whole(candidates, fetch_files)
        state = checkpoint_files.parse_state(files[STATE], posixpath.basename(saved.path))
        same_run.check_same_run(state.identity, now, self.resume, self.run.name)
        progress = checkpoint_files.describe_progress(state.epoch, state.epoch_step)
        logger.info(f"{self.run.name}: resuming from step {state.step} ({progress})")
        return files, state

    def last(self) -> int:
        """Returns the total steps at the last finished checkpoint; 0 without one."""
        steps = step_folders.finished_folders(self.run.filesystem, self.folder)
        return steps[0][0] if steps else 0

    def forget(self) -> None:
        """Removes the checkpoints, once no process writes any more."""
        snapshots.wait_for_all(self.run.filesystem, self.folder)
        if self.run.filesystem.get_file_info(self.folder).type.name != "NotFound":
            self.run.filesystem.delete_dir(self.folder)


def training_identity(
    model, parts: Mapping[str, RowData], rows: Mapping[str, int], batch: int, arguments: Mapping[str, Any]
):
    """Returns JSON that identifies a training, see `same_run.find_differences`.

    Args:
        model: A compiled and built model.
        parts: Its data.
        rows: Number of rows of those parts that are no tables.
        batch: Rows of the global batch.
        arguments: Arguments of the call that change the result.
    """
    data = {}
    for name, part in parts.items():
        if isinstance(part.dataset, TFData):
            data[name] = fingerprint.pipeline_fingerprint(part.dataset)
        elif part.table is None:
            data[name] = fingerprint.dataset_fingerprint(part.dataset, rows[name])
        else:
            content = fingerprint.table_fingerprint(part.table)
            data[name] = {"rows": part.table.num_rows, "sources": [{"content": content}], "operations": []}
    used = arguments["shuffle"]
    properties = {
        "version": same_run.VERSION,
        **fingerprint.model_fingerprint(model),
        "columns": {role: fingerprint.columns_fingerprint(spec) for role, spec in parts["train"].batch.roles.items()},
        "map": canonical.describe(parts["train"].batch.map),
        "batch_size": batch,
        "order": {"shuffle": used, "used": used, "window": None},
        "settings": dict(arguments),
        "data": data,
    }
    return stored_json.parse_object(json.dumps(properties))
