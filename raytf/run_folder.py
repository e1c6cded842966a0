"""The folder of a run on its storage: its name, where its run stands, and how it is put aside. Driver side.

Ray Train goes on from what its `checkpoint_manager_snapshot.json` lists; beside each checkpoint lies raytf's own
`state.json`. Both are read where they are: no checkpoint is downloaded for them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import posixpath
import re
import secrets
from typing import Any

import pyarrow.fs
from pyarrow.fs import FileSelector, FileType
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.storage import get_fs_and_path

from raytf.checkpoint_files import MANIFEST, STATE, DamagedCheckpointError, State
from raytf.errors import ConfigError, in_a_line
from raytf.run_lock import LOCK

# Ray Train names every RunConfig that has no name by the second in which it is made.
_RAYS_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


def new_name(kind: str) -> str:
    """A name that no other run has, with the time in it for its reader."""
    return f"{kind}_{_now()}_{secrets.token_hex(3)}"


def is_unnamed(run_config) -> bool:
    """Whether a RunConfig was given no name."""
    return not run_config.name or _RAYS_NAME.fullmatch(run_config.name) is not None


def named(run_config, kind: str):
    """The RunConfig with a name; one without gets a new one each time, and is itself left as it is."""
    return dataclasses.replace(run_config, name=new_name(kind)) if is_unnamed(run_config) else run_config


def check_name(name: str | None) -> None:
    """Raises ConfigError for a name whose folder would not lie below the storage path."""
    parts = (name or "").split("/")
    if name is None or (name.strip() and not {"", ".", ".."} & set(parts) and not {"\0", "\\"} & set(name)):
        return
    raise ConfigError(
        "The name of a run must name a folder below its storage path",
        repr(name),
        "Use a name without '..', '\\' and slashes at its ends",
    )


@dataclasses.dataclass(frozen=True)
class Last:
    """Where the run of a folder stands: what the `state.json` of its last checkpoint says.

    Args:
        epoch: epochs that are complete.
        stopped: whether a callback ended the run.
        identity: what the run was, see `identity.py`; {} where that is not known.
    """

    epoch: int
    stopped: bool
    identity: dict[str, Any]


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
                "storage_path must be a path from the root, or the URI of a storage that pyarrow knows",
                f"{run_config.storage_path!r}, for which there is {in_a_line(error)}",
                "Correct RunConfig(storage_path=...)",
            ) from error
        return RunFolder(filesystem, posixpath.join(path, run_config.name), run_config.name)

    def last(self) -> Last | None:
        """Where the run stands, by the newest checkpoint that is whole; None without a checkpoint.

        Raises:
            ConfigError: there are checkpoints, and none of them is a whole one of raytf's.
        """
        snapshot = self._json(CHECKPOINT_MANAGER_SNAPSHOT_FILENAME) or {}
        names = [entry["checkpoint_dir_name"] for entry in snapshot.get("checkpoint_results", ())]
        order = dict(zip(names, snapshot.get("checkpoint_report_indices", ()), strict=False))
        names.sort(key=lambda name: order.get(name, 0), reverse=True)
        for name in names:
            try:
                state = State.of(self._json(f"{name}/{STATE}") or {}, name)
            except DamagedCheckpointError:
                continue
            if self._has_its_sizes(name):
                return Last(state.epoch, state.stopped, state.identity)
        if names:
            raise ConfigError(
                "A run goes on from checkpoints of raytf.KerasTrainer",
                f"{self.path!r}, where neither {names[0]!r} nor one before it is a whole one",
                "Use resume=False to start anew, or choose another RunConfig(name=...)",
            )
        return None

    def _has_its_sizes(self, checkpoint: str) -> bool:
        """Whether the parts of a checkpoint are as long as its manifest says; the first ones have no manifest."""
        parts = (self._json(f"{checkpoint}/{MANIFEST}") or {}).get("files", {})
        infos = self.filesystem.get_file_info([f"{self.path}/{checkpoint}/{part}" for part in parts])
        return all(info.size == known.get("bytes") for info, known in zip(infos, parts.values(), strict=True))

    def _json(self, name: str) -> dict[str, Any] | None:
        """What a file of the folder says; None where there is none, or it was cut off."""
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as file:
                found = json.loads(file.read())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

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
