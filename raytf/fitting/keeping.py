"""What a call of `raytf.fit` that has a name keeps, so that the same call goes on at the next step. Driver side.

The checkpoints lie in `<storage>/<name>/fit`, and are removed when the training has come to its end: what it learnt is
in the model then, and the next call trains that on.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from ray.train import Checkpoint, RunConfig

from raytf import validation
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.fitting.arrays import Data
from raytf.identity import contents, fingerprint, meaning, same_run
from raytf.storage import checkpoint_files, run_folder, snapshots, step_folders, stored_json
from raytf.storage.checkpoint_files import STATE, CheckpointState
from raytf.storage.run_folder import RunFolder
from raytf.storage.run_lock import RunLock
from raytf.worker import checkpoint_every as checkpoint_every_module
from raytf.worker.checkpoint_every import Every
from raytf.worker.session import Within, fetched

_FOLDER = "fit"
# Of larger tables a sample of the rows is compared.
_ALL_ROWS_BYTES = 1 << 30


@dataclass(frozen=True)
class Keeping:
    """Where a call keeps checkpoints, and when.

    Args:
        run: the folder of its name.
        every: see `checkpoint_every`.
        resume: "auto", True or False, as of a `KerasTrainer`.
        where: the folder as its user would write it.
    """

    run: RunFolder
    every: Every
    resume: str | bool
    where: str

    @staticmethod
    def of(name: str | None, storage, checkpoint_every: str, resume: str | bool) -> Keeping | None:
        """What arguments of `raytf.fit` stand for; None without a name.

        Raises:
            ConfigError: one is wrong, or means nothing without a name.
        """
        every = checkpoint_every_module.parse(checkpoint_every)
        if not isinstance(resume, bool) and resume != "auto":
            raise ConfigError('resume must be "auto", True or False', repr(resume), "Choose one")
        if name is None:
            given = {"storage": storage is not None, "checkpoint_every": not every.auto, "resume": resume != "auto"}
            if any(given.values()):
                raise ConfigError(
                    "raytf.fit keeps checkpoints, and goes on from them, under a name",
                    f"no name, and {', '.join(key for key, its in given.items() if its)}",
                    'Pass name="...", too',
                )
            return None
        validation.check_run_name(name)
        where = {} if storage is None else {"storage_path": os.fspath(storage)}
        config = run_folder.located(RunConfig(name=name, **where))
        return Keeping(RunFolder.of(config), every, resume, run_folder.where(config))

    @property
    def folder(self) -> str:
        """The path of the checkpoints' folder."""
        return posixpath.join(self.run.path, _FOLDER)

    @property
    def within(self) -> Within:
        """What the workers are told of it."""
        return Within(self.run.filesystem, self.folder, 0)

    def lock(self) -> RunLock:
        """Keeps others from calling by the same name meanwhile."""
        return RunLock(self.run.filesystem, self.run.path)

    def newest(self, now: Mapping[str, Any]) -> tuple[dict[str, bytes], CheckpointState] | tuple[None, None]:
        """(files, state) of the checkpoint to go on from, or Nones.

        Args:
            now: of `identity`.

        Raises:
            ConfigError: it is of another training, or there is none and resume=True.
            DamagedCheckpointError: there are some, and none is whole.
        """
        snapshots.wait_for_all(self.run.filesystem, self.folder)
        if self.resume is False:
            self.forget()
        steps = step_folders.listed(self.run.filesystem, self.folder)
        if not steps and self.resume is True:
            raise ConfigError(
                "With resume=True a training goes on from a checkpoint",
                f"none in {self.folder}",
                'Correct name and storage, or use resume="auto"',
            )
        if not steps:
            return None, None
        paths = [posixpath.join(self.folder, name) for _, name in steps]
        candidates = [Checkpoint(path, filesystem=self.run.filesystem) for path in paths]
        saved, files = checkpoint_files.first_whole(candidates, fetched)
        state = checkpoint_files.state_of(files[STATE], posixpath.basename(saved.path))
        same_run.check(state.identity, now, self.resume, self.run.name)
        where = checkpoint_files.standing(state.epoch, state.epoch_step)
        print(f"{self.run.name}: goes on after step {state.step} ({where})")
        return files, state

    def last(self) -> int:
        """Steps made in all of the last checkpoint that was finished; 0 without one."""
        steps = step_folders.listed(self.run.filesystem, self.folder)
        return steps[0][0] if steps else 0

    def forget(self) -> None:
        """Removes the checkpoints."""
        if self.run.filesystem.get_file_info(self.folder).type.name != "NotFound":
            self.run.filesystem.delete_dir(self.folder)


def identity(model, parts: Mapping[str, Data], rows: Mapping[str, int], batch: int, arguments: Mapping[str, Any]):
    """What tells a training from others, see `same_run.compare`; JSON.

    Args:
        model: compiled and built.
        parts: its data.
        rows: of those that are no tables.
        batch: rows of the global one.
        arguments: of the call that change what is computed.
    """
    data = {}
    for name, part in parts.items():
        if isinstance(part.dataset, TFData):
            data[name] = fingerprint.of_pipeline(part.dataset)
        elif part.table is None:
            data[name] = fingerprint.of_dataset(part.dataset, rows[name])
        else:
            data[name] = {"rows": part.table.num_rows, "sources": [_content(part.table)], "operations": []}
    used = arguments["shuffle"]
    told = {
        "version": same_run.VERSION,
        **fingerprint.of_model(model),
        "columns": {role: fingerprint.of_columns(spec) for role, spec in parts["train"].batch.roles.items()},
        "map": None if parts["train"].batch.map is None else fingerprint.described(parts["train"].batch.map),
        "batch_size": batch,
        "order": {"shuffle": used, "used": used, "window": None},
        "settings": dict(arguments),
        "data": data,
    }
    return stored_json.parsed(json.dumps(told))


def _content(table: pa.Table) -> dict[str, str]:
    if not table.num_rows:
        return {"content": ""}
    stride = contents.stride(table.num_rows) if table.nbytes > _ALL_ROWS_BYTES else 1
    return {"content": meaning.hashed(meaning.dumped(contents.digest(table, 0, stride)))}
