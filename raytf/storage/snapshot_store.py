"""Snapshots in a run's folder: written atomically, and removed when newer ones exist.

On a local disk a snapshot is written into a folder of another name, synchronized and then renamed. Object stores have
no rename: there the manifest is written last, and a folder without one is no snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
import re
import secrets
import shutil
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import pyarrow.fs
from pyarrow.fs import FileSelector, FileType

from raytf import timeouts
from raytf.errors import ConfigError
from raytf.storage import checkpoint_files, gather_io, sharded_write, step_folders, stored_json
from raytf.storage.checkpoint_files import AT_ENDS, MANIFEST, MODEL, STATE, VERSION, VERSION_OF_PARTS

_PARTIAL, _PARTS = ".partial_", ".parts_"
# Factor of this worker's own writing time for the timeout of other workers' parts, if longer than the configured one.
_PATIENCE = 3.0
_POLL_INTERVAL = 0.02
_CHUNK_BYTES = 1 << 22


def check_name(name: str) -> None:
    """Raises ConfigError unless the name is a plain name of a folder or file, without a path."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}", name):
        raise ConfigError(
            "The name of a snapshot, and of a part of it, is one word of letters, digits, '_', '-' and '.'",
            repr(name),
            "Name it like that, without slashes and '..'",
        )


def manifest(files: Mapping[str, list], parts: Sequence[str] = ()) -> bytes:
    """Returns the content of `manifest.json` for some files.

    Args:
        files: The files as pieces of memory; the state among them determines the version.
        parts: Those of them that form `model.keras`, in order.
    """
    sizes = {part: {"bytes": gather_io.total_size(p), "crc32": gather_io.crc32(p)} for part, p in sorted(files.items())}
    if parts:
        return json.dumps({"version": VERSION_OF_PARTS, "files": sizes, "joined": {MODEL: list(parts)}}).encode()
    state = stored_json.parse_object(b"".join(files[STATE])) if STATE in files else {}
    return json.dumps({"version": state.get("version", VERSION), "files": sizes}).encode()


@dataclasses.dataclass(frozen=True)
class WriteResult:
    """Result of writing a snapshot.

    Args:
        bytes: Bytes that this process wrote.
        late_workers: Workers whose parts missed the timeout, so that this process wrote them.
        others: Those of them that wrote different bytes.
    """

    bytes: int
    late_workers: list[int] = dataclasses.field(default_factory=list)
    others: list[int] = dataclasses.field(default_factory=list)


class SnapshotStore:
    """The snapshots of one run; used by one process.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: The run's folder there.
        keep: Number of snapshots to keep that are newer than all epoch-end checkpoints, at least 1.

    Attributes:
        fails: Errnos of the OSErrors that the next attempts to write raise, see `injected_faults`.
    """

    def __init__(self, filesystem, folder: str, keep: int = 2):
        self._filesystem, self._folder, self._keep = filesystem, folder, keep
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._steps: dict[str, int] = {}  # by name, of whole epoch-end checkpoints
        self._whole: set[str] = set()
        self._last: str | None = None  # the last snapshot that was put
        self._pending_names: set[str] = set()  # snapshots that this process wrote, or tried to
        self._unfinished: set[str] | None = None  # names that were half written when it began
        self.fails: list[int] = []

    def put(self, name: str, files: Mapping[str, list], writers: int = 1) -> WriteResult:
        """Writes a snapshot, and replaces one of the same name; on return it is whole and on disk.

        Args:
            name: Name of its folder.
            files: The pieces of each file, without the manifest.
            writers: Number of workers that write `model.keras` together; this one has the bytes of all parts.

        Raises:
            OSError: It could not be written; an earlier one is unchanged.
        """
        parts: dict[str, list] = {}
        if writers > 1:
            files = dict(files)
            ranges = sharded_write.split_file(files.pop(MODEL), writers)
            parts = {sharded_write.part_name(MODEL, i, pieces): pieces for i, pieces in enumerate(ranges)}
            files |= parts
        last = manifest(files, list(parts))
        self._begin(name)
        other_parts = _OtherParts(self._filesystem, self._parts(name), parts)
        if self._is_local:
            self._put_local(name, {**files, MANIFEST: [last]}, other_parts)
        else:
            self._put_remote(name, files, last, other_parts)
        self._whole.add(name)
        self._last = name
        return WriteResult(other_parts.size_left(files) + len(last), other_parts.late_parts, other_parts.others)

    def put_part(self, name: str, file: str, index: int, pieces: list) -> int:
        """Writes a worker's part of a file of a snapshot that another process completes.

        Args:
            name: Name of the snapshot.
            file: Name of the file.
            index: Index of the worker.
            pieces: Pieces of the part.

        Returns:
            Bytes written.
        """
        self._begin(name)
        folder, part = self._parts(name), sharded_write.part_name(file, index, pieces)
        self._filesystem.create_dir(folder)
        if not self._is_local:
            self._write_remote(posixpath.join(folder, part), pieces)
            self._inject_failure()
            return gather_io.total_size(pieces)
        partial = os.path.join(folder, f"{_PARTIAL}{secrets.token_hex(4)}")
        try:
            _write_local(partial, pieces)
            self._inject_failure()
            os.rename(partial, os.path.join(folder, part))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        return gather_io.total_size(pieces)

    def _parts(self, name: str) -> str:
        """Returns the folder for workers' parts of a snapshot: next to it if it is renamed once it is whole."""
        return posixpath.join(self._folder, f"{_PARTS}{name}" if self._is_local else name)

    def _put_local(self, name: str, files: Mapping[str, list], others: _OtherParts) -> None:
        os.makedirs(self._folder, exist_ok=True)
        partial = self._partial(name)
        os.mkdir(partial)
        try:
            for part, pieces in files.items():
                if part not in others.awaited:
                    _write_local(os.path.join(partial, part), pieces)
            for part, is_complete in others.wait():
                if is_complete:
                    os.rename(os.path.join(others.folder, part), os.path.join(partial, part))
                else:
                    _write_local(os.path.join(partial, part), files[part])
            self._inject_failure()
            _sync(partial)
            self._rename(partial, os.path.join(self._folder, name))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if others.awaited:
            others.remove_stale_parts()
            shutil.rmtree(others.folder, ignore_errors=True)

    def _rename(self, partial: str, target: str) -> None:
        """Renames a folder and replaces an existing one; between the two renames the name does not exist."""
        try:
            os.rename(partial, target)
        except OSError:
            if not os.path.lexists(target):
                raise
            replaced = f"{partial}_before"
            os.rename(target, replaced)
            os.rename(partial, target)
            shutil.rmtree(replaced, ignore_errors=True)
        _sync(self._folder)

    def _put_remote(self, name: str, files: Mapping[str, list], last: bytes, others: _OtherParts) -> None:
        folder = posixpath.join(self._folder, name)
        if others.awaited:
            with contextlib.suppress(FileNotFoundError):  # it would vouch for a mixture
                self._filesystem.delete_file(posixpath.join(folder, MANIFEST))
        else:
            self._remove(name)  # removes the manifest first
        self._filesystem.create_dir(folder)
        for part, pieces in files.items():
            if part not in others.awaited:
                self._write_remote(posixpath.join(folder, part), pieces)
        for part, is_complete in others.wait():
            if not is_complete:
                self._write_remote(posixpath.join(folder, part), files[part])
        others.remove_stale_parts()
        self._inject_failure()
        self._write_remote(posixpath.join(folder, MANIFEST), [last])

    def _inject_failure(self) -> None:
        """Raises an injected error; called when a snapshot's bytes are written, but it is not yet whole."""
        if self.fails:
            number = self.fails.pop(0)
            raise OSError(number, os.strerror(number))

    def _write_remote(self, path: str, pieces: list) -> None:
        with self._filesystem.open_output_stream(path) as file:
            for chunk in gather_io.chunks(pieces, _CHUNK_BYTES):
                file.write(chunk)
        written = self._filesystem.get_file_info(path).size
        if written != gather_io.total_size(pieces):
            raise OSError(f"{path} has {written} bytes after {gather_io.total_size(pieces)} were written")

    def prune(self, keep: int | None = None) -> list[str]:
        """Removes snapshots that newer ones, or epoch-end checkpoints, replace; never the newest whole one.

        The last epoch-end checkpoint of this store does not count: Ray has not registered it yet.

        It also removes what another writer left half written, if no process can continue it, see `abandoned_folders`.

        Args:
            keep: Replaces the store's `keep` for this call.

        Returns:
            The names of the removed snapshots.

        Raises:
            OSError: The folder could not be listed, or a snapshot not removed.
        """
        infos = self._filesystem.get_file_info(FileSelector(self._folder, allow_not_found=True))
        names = [info.base_name for info in infos if info.type == FileType.Directory]
        epoch = max(
            (self._step_of(name) for name in names if name.startswith(AT_ENDS) and name != self._last), default=-1
        )
        steps = {name: step for name in names if (step := step_folders.step_of_folder(name)) is not None}
        whole = [name for name in sorted(steps, reverse=True) if self._is_whole(name)]
        if self._last is not None and self._is_local:
            ends = {name for name in names if name.startswith(AT_ENDS) and self._step_of(name) >= 0}
            newest = max([epoch, *(steps[name] for name in whole)])
            for name in abandoned_folders(names, self._unfinished or (), self._pending_names, {*whole, *ends}, newest):
                shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)
        removed = removable(steps, whole, epoch, keep or self._keep)
        for name in removed:
            self._whole.discard(name)
            self._remove(name)
        return removed

    def _remove(self, name: str) -> None:
        """Removes a snapshot atomically: it is invalid from the first operation on."""
        path = posixpath.join(self._folder, name)
        with contextlib.suppress(FileNotFoundError):
            if self._is_local:
                renamed = self._partial(name)
                os.rename(path, renamed)
                shutil.rmtree(renamed)
            else:
                self._filesystem.delete_file(posixpath.join(path, MANIFEST))
        # Google's storage has another error for a folder that is not there
        if not self._is_local and self._filesystem.get_file_info(path).type != FileType.NotFound:
            self._filesystem.delete_dir(path)

    def _begin(self, name: str) -> None:
        """Records the snapshot's name; before the first one also the folders that others left half written."""
        self._pending_names.add(name)
        if self._unfinished is None:
            infos = self._filesystem.get_file_info(FileSelector(self._folder, allow_not_found=True))
            self._unfinished = {info.base_name for info in infos if info.base_name.startswith((_PARTIAL, _PARTS))}

    def _partial(self, name: str) -> str:
        return os.path.join(self._folder, f"{_PARTIAL}{name}_{secrets.token_hex(4)}")

    def _step_of(self, name: str) -> int:
        """Returns the step of a whole epoch-end checkpoint; -1 for others."""
        if name not in self._steps:
            try:
                state = checkpoint_files.check_stored(self._filesystem, posixpath.join(self._folder, name))
            except (ConfigError, FileNotFoundError):
                return -1  # it may be in progress
            self._steps[name] = state.step
        return self._steps[name]

    def _is_whole(self, name: str) -> bool:
        """Returns whether every part of a snapshot has its recorded size."""
        if name not in self._whole:
            try:
                checkpoint_files.check_stored(self._filesystem, posixpath.join(self._folder, name))
            except (ConfigError, FileNotFoundError, stored_json.UnreadableError):
                return False
            self._whole.add(name)
        return True


def abandoned_folders(
    names: Iterable[str], unfinished: Container[str], requested: Container[str], whole: Container[str], newest: int
) -> list[str]:
    """Returns half-written folders that no process continues; pure. Uses no clock, as clocks of hosts differ.

    Args:
        names: The names of the existing folders.
        unfinished: Names, half written when this process, which has written a snapshot since, began. They are of
            an earlier run, or of a killed process.
        requested: The snapshots that this process wrote, or tried to.
        whole: The whole snapshots.
        newest: The steps before the newest of them.
    """
    leftovers = []
    for name in names:
        snapshot = _half_written(name)
        if snapshot is None:
            continue
        step = step_folders.step_of_folder(snapshot)
        is_old = step is not None and step < newest  # a worker that still writes it is too late
        if (
            is_old
            or (name.startswith(_PARTS) and snapshot in whole)
            or (name in unfinished and snapshot not in requested)
        ):
            leftovers.append(name)
    return leftovers


def _half_written(name: str) -> str | None:
    """Returns the snapshot that a folder will become, or whose parts it holds; None for other folders."""
    if name.startswith(_PARTS):
        return name.removeprefix(_PARTS)
    if not name.startswith(_PARTIAL):
        return None
    return name.removeprefix(_PARTIAL).removesuffix("_before")[: -len("_12345678")]


class _OtherParts:
    """The parts of a snapshot that other workers write, with a short timeout.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        folder: The folder of the parts.
        parts: The pieces of all parts by name, in order: the first and the last are this process's own.

    Attributes:
        awaited: Bytes of each part of another worker, by name.
        late_parts: Workers whose parts missed the timeout.
        others: Those of them that wrote different bytes.
    """

    def __init__(self, filesystem, folder: str, parts: Mapping[str, list]):
        self._filesystem, self.folder = filesystem, folder
        self._index = {name: i for i, name in enumerate(parts)}
        self.awaited = {name: gather_io.total_size(parts[name]) for name in list(parts)[1:-1]}
        self.late_parts: list[int] = []
        self.others: list[int] = []
        self._began = time.monotonic()

    def wait(self) -> Iterator[tuple[str, bool]]:
        """Yields (name, whether it has arrived) of each part; called when this process has written its own."""
        deadline = time.monotonic() + max(timeouts.get().checkpoint_parts, _PATIENCE * (time.monotonic() - self._began))
        for name, size in self.awaited.items():
            path = posixpath.join(self.folder, name)
            while (
                not (is_complete := self._filesystem.get_file_info(path).size == size) and time.monotonic() < deadline
            ):
                time.sleep(_POLL_INTERVAL)
            if not is_complete:
                self.late_parts.append(self._index[name])
            yield name, is_complete

    def remove_stale_parts(self) -> None:
        """Removes parts with different bytes and records their workers in `others`."""
        if not self.late_parts:
            return
        infos = self._filesystem.get_file_info(FileSelector(self.folder, allow_not_found=True))
        for index in self.late_parts:
            for info in infos:
                if (
                    info.base_name.startswith(sharded_write.part_prefix(MODEL, index))
                    and info.base_name not in self._index
                ):
                    self.others.append(index)
                    self._filesystem.delete_file(info.path)

    def size_left(self, files: Mapping[str, list]) -> int:
        """Returns the bytes of the files that this process wrote."""
        came = [name for name in self.awaited if self._index[name] not in self.late_parts]
        return sum(gather_io.total_size(pieces) for name, pieces in files.items() if name not in came)


def removable(steps: Mapping[str, int], whole: Iterable[str], epoch: int, keep: int) -> list[str]:
    """Returns the snapshots that may be removed; pure.

    Args:
        steps: The step of each existing snapshot.
        whole: The whole ones, newest first.
        epoch: The step of the newest whole epoch-end checkpoint, -1 without one.
        keep: Number of the newest whole ones to keep, at least 1.

    Returns:
        Names of those older than a whole epoch-end checkpoint, which holds more, or than the newest `keep` whole ones.
        One that is newer than the newest whole one, and not whole, may be in progress.
    """
    newer = [name for name in whole if steps[name] >= epoch]
    newest = newer[:keep]
    oldest = min((steps[name] for name in newest), default=epoch)
    return sorted(name for name, step in steps.items() if step < max(oldest, epoch) and name not in newest)


def _write_local(path: str, pieces: list) -> None:
    """Writes a new file and synchronizes it to disk."""
    with open(path, "xb", buffering=0) as file:
        for chunk in gather_io.chunks(pieces, _CHUNK_BYTES):
            while len(chunk):
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    """Synchronizes a folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
