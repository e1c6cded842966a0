"""Files of a dataset: local paths, folders, patterns and URIs, and the format of files by their names.

Needs neither Ray nor TensorFlow.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import csv, fs

from raytf import validation
from raytf.errors import ConfigError, one_line

CSV_ENDINGS = (".csv", ".csv.gz")
_PAUSES = (0.25, 0.5, 1.0)  # seconds before another attempt
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp")


@dataclass(frozen=True)
class Files:
    """Files on one file system, in the order in which they are read.

    Args:
        filesystem: Their file system.
        paths: Their paths.
        sizes: Bytes of each.
        root: The folder that contains them all.
    """

    filesystem: fs.FileSystem
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    root: str

    @property
    def is_local(self) -> bool:
        """Returns whether they are on paths of this machine, which another node may not see."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def filter_names(self, wanted: Callable[[str], bool]) -> Files:
        """Returns the files whose names, in lower case, `wanted` accepts; in the same order."""
        indices = [i for i, path in enumerate(self.paths) if wanted(posixpath.basename(path).lower())]
        return replace(self, paths=tuple(self.paths[i] for i in indices), sizes=tuple(self.sizes[i] for i in indices))


def listed(paths: str | os.PathLike | Sequence, filesystem: fs.FileSystem | None = None, preferred: str = "") -> Files:
    """Returns the files below paths: those of a folder or a pattern sorted by name, without hidden ones.

    Args:
        paths: A path or URI of a file or folder, a pattern, or a list of these. A pattern has `*` in a name, or `**`
            for any folders.
        filesystem: A `pyarrow.fs.FileSystem`, on which the paths are. By default the URI names it.
        preferred: Part of names, in lower case. Of a path with such files others are left out.

    Raises:
        ConfigError: There are no such files, or they are on several file systems.
    """
    kind, expected = fs.FileSystem, "a pyarrow.fs.FileSystem"
    validation.check_kind("filesystem", filesystem, kind, expected, "Pass one, or the URI of the files without it")
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Sequence) else []
    if not given or not all(isinstance(path, str | os.PathLike) for path in given):
        raise ConfigError("Data is named by a path, a URI, or a list of these", repr(paths), "Name files or a folder")
    infos: list[fs.FileInfo] = []
    roots: list[str] = []
    system: Any = filesystem
    for path in given:
        file_system, root, files = _below(os.fspath(path), filesystem)
        if system is not None and not file_system.equals(system):
            raise ConfigError(
                "All files must be on one file system", repr(given), "Read them one by one, and join them"
            )
        system = file_system
        roots.append(root)
        infos += [info for info in files if preferred in posixpath.basename(info.path).lower()] or files
    if not infos:
        raise ConfigError("There must be a file to read", ", ".join(map(repr, given)), "Check the path")
    sizes = tuple(int(info.size or 0) for info in infos)
    return Files(system, tuple(info.path for info in infos), sizes, posixpath.commonpath(roots))


def located(path: str, filesystem: fs.FileSystem | None = None) -> tuple[fs.FileSystem, str]:
    """Returns (file system, path on it) of a local path or a URI."""
    if filesystem is not None:
        return filesystem, path
    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    try:
        return fs.FileSystem.from_uri(path)
    except pa.ArrowInvalid as error:
        try:
            system, path = fsspec.core.url_to_fs(path)
        except (ValueError, ImportError) as unknown:
            raise ConfigError("A URI must name a known file system", f"{path!r} ({error})", str(unknown)) from None
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def retried(read: Callable, *arguments):
    """Returns read(*arguments), which gets some more attempts if the storage fails; Ray Data's own tasks have them.

    pyarrow repeats requests itself, but not one of a few bytes whose error message is longer.
    """
    for pause in _PAUSES:
        try:
            return read(*arguments)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(pause)
    return read(*arguments)


def csv_schema(filesystem: fs.FileSystem, path: str, block_bytes: int = 1 << 20) -> pa.Schema:
    """Returns names and types of a CSV file's columns, by its first bytes; raises ConfigError if it is none."""
    with filesystem.open_input_stream(path) as file:
        try:
            return csv.open_csv(file, csv.ReadOptions(block_size=block_bytes)).schema
        except pa.ArrowInvalid as error:
            raise csv_error(path, error) from error


def csv_error(path: str, error: Exception) -> ConfigError:
    """Returns the error of a CSV file that pyarrow cannot read."""
    return ConfigError(
        "A CSV file must have a header, and values of the types of its columns",
        f"{path!r}: {error}",
        "Correct it, or pass --types COLUMN=TYPE",
    )


def _below(path: str, filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, str, list[fs.FileInfo]]:
    """Returns (file system, folder, files) of one path."""
    folder = path.partition("*")[0].rpartition("/")[0] if "*" in path else path
    pattern = path[len(folder) :].lstrip("/")
    system, root = located(folder or ("/" if path.startswith("/") else "."), filesystem)
    try:
        info = system.get_file_info(root)
        is_folder = info.type == fs.FileType.Directory
        inside = system.get_file_info(fs.FileSelector(root, recursive=True)) if is_folder else []
    except OSError as error:
        raise ConfigError(
            "Data must be a folder or file that can be read",
            f"{path!r} ({one_line(error)})",
            "Check the path, and what gives access to it",
        ) from error
    if info.type == fs.FileType.NotFound:
        raise ConfigError("Data must be a folder or file that exists", repr(path), "Check the path")
    if info.type == fs.FileType.File:
        return system, posixpath.dirname(root), [info]
    files = sorted((entry for entry in inside if entry.type == fs.FileType.File), key=lambda entry: entry.path)
    names = {entry.path: posixpath.relpath(entry.path, root) for entry in files}
    if pattern:
        matches = re.compile(_regex(pattern)).fullmatch
        return system, root, [entry for entry in files if matches(names[entry.path])]
    return system, root, [entry for entry in files if not re.search(r"(^|/)[._]", names[entry.path])]


def _regex(pattern: str) -> str:
    """Returns a regular expression for a pattern: `**/` is any folders, and `*` anything but a slash."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return "".join(known.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*)", pattern))


def _format_of(name: str) -> str | None:
    if "tfrecord" in name:
        return "tfrecord"
    if ".parquet" in name:
        return "parquet"
    return "csv" if name.endswith(CSV_ENDINGS) else "images" if name.endswith(_IMAGE_ENDINGS) else None


def find(name: str, path: str, format: str = "auto") -> tuple[str, Files]:
    """Returns the format of the files below a path, and those that are of it.

    Raises:
        ConfigError: There are none, or files of several formats.
    """
    files = listed(path)
    kinds = Counter(_format_of(posixpath.basename(file).lower()) for file in files.paths)
    kinds.pop(None, None)
    if set(kinds) == {"images", "csv"} and kinds["csv"] == 1:
        kinds.pop("csv")  # the labels
    if format == "auto" and len(kinds) != 1:
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise ConfigError(
            f"The {name} data must hold files of one format, Parquet, CSV, TFRecord or images, by their names",
            f"{path!r} with {shown or 'none of these'}",
            "Check the path, or name the format by --format",
        )
    (kind,) = [format] if format != "auto" else kinds
    if kind == "images":
        chosen = files.filter_names(lambda file: _format_of(file) in ("images", "csv"))
    elif kind in kinds:
        chosen = files.filter_names(lambda file: _format_of(file) == kind)
    else:
        chosen = files
    return kind, chosen
