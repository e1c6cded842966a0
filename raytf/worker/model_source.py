"""Sources of a model: a path or a URI, a run or a checkpoint, and a run of this process."""

from __future__ import annotations

import dataclasses
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

from pyarrow.fs import FileType

from raytf.errors import ConfigError, one_line
from raytf.storage.checkpoint_files import MANIFEST, MODEL, SEEDS, STATE

# build_model and config of the runs of this process, by the path of the run.
_runs_of_process: dict[str, tuple[Callable, dict]] = {}


def remember_run(run: str, build_model: Callable, config: Mapping) -> None:
    """Stores the build_model and config of a run of this process, as defaults of `load_model`.

    Args:
        run: Path of the run in its storage.
        build_model: The trainer's function.
        config: The trainer's config.
    """
    _runs_of_process[run.rstrip("/")] = build_model, dict(config)


def is_uri(source) -> bool:
    """Returns whether the source is a URI of a storage, and not a path on this machine."""
    return isinstance(source, str) and "://" in source


@dataclasses.dataclass(frozen=True)
class StorageLocation:
    """A location in a storage.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        path: Path in the file system.
        shown: Text for messages.
    """

    filesystem: Any
    path: str
    shown: str

    @staticmethod
    def from_uri(uri: str) -> StorageLocation:
        """Returns the location of a URI; raises ConfigError if the storage or the location does not exist."""
        from raytf.compat.ray_train import get_fs_and_path

        shown = re.sub(r"//[^/]*@", "//", uri)  # without credentials
        try:
            filesystem, path = get_fs_and_path(uri, None)
            stored = StorageLocation(filesystem, path.rstrip("/"), shown)
            exists = stored.kind() != FileType.NotFound
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(
                "A model is loaded from a path, or from the URI of a storage that can be read",
                f"{shown!r}, for which there is {one_line(error)}",
                "Correct the URI, or what gives access to the storage",
            ) from error
        if not exists:
            raise ConfigError("A model is loaded from a place that exists", repr(shown), "Check the URI")
        return stored

    def kind(self) -> FileType:
        """Returns the type of the location."""
        return self.filesystem.get_file_info(self.path).type

    def is_checkpoint(self) -> bool:
        """Returns whether it is the folder of a checkpoint, see the function `is_checkpoint`."""
        parts = [posixpath.join(self.path, part) for part in (MODEL, STATE, SEEDS, MANIFEST)]
        return any(info.type != FileType.NotFound for info in self.filesystem.get_file_info(parts))


def existing_path(source) -> str:
    """Returns the path `source`; raises ConfigError if it is no path, or does not exist."""
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "A model is loaded from a Result, a Checkpoint or a path",
            f"a {type(source).__name__}",
            "Pass what fit() returned, or the folder of the run",
        )
    path = os.path.expanduser(os.fspath(source))
    if not os.path.exists(path):
        fix, location = "Check the path", ""
        if not os.path.isabs(path):
            fix, location = "Check the path; in processes of the cluster use one from the root", f" in {os.getcwd()}"
        raise ConfigError("A model is loaded from a path that exists", f"{path!r}{location}", fix)
    return path


def run_of_process(run: str) -> tuple[Callable, dict] | None:
    """Returns (build_model, config) of a run of this process, or of one of its checkpoints, by its path."""
    return next((build for path, build in _runs_of_process.items() if f"{run}/".startswith(f"{path}/")), None)


def is_checkpoint(folder: str) -> bool:
    """Returns whether a folder is a checkpoint's, whole or not, and not a run's."""
    return os.path.lexists(os.path.join(folder, MODEL)) or is_ours(folder)


def is_ours(folder: str) -> bool:
    """Returns whether a folder contains files of raytf in addition to a model's file."""
    return any(os.path.lexists(os.path.join(folder, part)) for part in (STATE, SEEDS, MANIFEST))


def is_bare(folder: str) -> bool:
    """Returns whether a checkpoint is only a model's file: of Ray's callback, or of Keras 2."""
    return os.path.isfile(os.path.join(folder, MODEL)) and not is_ours(folder)
