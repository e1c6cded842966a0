"""Snapshots in the folder of a run: written so that one is whole or none, and removed when newer ones are there.

On a disk of this machine a snapshot is made in a folder of another name, whose files and names are synchronized, and
then renamed. Object stores rename nothing: there the manifest comes last, and a folder without one is no snapshot.
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
from raytf.storage import checkpoint_files, division, scattered, step_folders, stored_json
from raytf.storage.checkpoint_files import AT_ENDS, MANIFEST, MODEL, STATE, VERSION, VERSION_OF_PARTS

_PARTIAL, _PARTS = ".partial_", ".parts_"
# Parts of other workers are waited for so long, or so many times as long as this one has written its own.
_PATIENCE = 3.0
_LOOKS_INTERVAL = 0.02
_CHUNK_BYTES = 1 << 22


def check_name(name: str) -> None:
    """Raises ConfigError for a name that is not one of a folder, or file, directly within another."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}", name):
        raise ConfigError(
            "The name of a snapshot, and of a part of it, is one word of letters, digits, '_', '-' and '.'",
            repr(name),
            "Name it like that, without slashes and '..'",
        )


def manifest(files: Mapping[str, list], parts: Sequence[str] = ()) -> bytes:
    """What `manifest.json` says of files.

    Args:
        files: as pieces of memory; the version is that of the state among them.
        parts: those of them that are `model.keras`, one after the other.
    """
    found = {part: {"bytes": scattered.size(p), "crc32": scattered.crc32(p)} for part, p in sorted(files.items())}
    if parts:
        return json.dumps({"version": VERSION_OF_PARTS, "files": found, "joined": {MODEL: list(parts)}}).encode()
    state = stored_json.parsed(b"".join(files[STATE])) if STATE in files else {}
    return json.dumps({"version": state.get("version", VERSION), "files": found}).encode()


@dataclasses.dataclass(frozen=True)
class Written:
    """What became of a snapshot.

    Args:
        bytes: written by this process.
        late: workers whose parts did not come in time, so that this process has written them.
        others: those of them that have written other bytes.
    """

    bytes: int
    late: list[int] = dataclasses.field(default_factory=list)
    others: list[int] = dataclasses.field(default_factory=list)


class SnapshotStore:
    """The snapshots of one run; used by one process.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: of the run there.
        keep: how many snapshots that are newer than all checkpoints of epochs stay, at least 1.

    Attributes:
        fails: numbers of the OSErrors with which the next tries to write end, see `planted`.
    """

    def __init__(self, filesystem, folder: str, keep: int = 2):
        self._filesystem, self._folder, self._keep = filesystem, folder, keep
        self._is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        self._steps: dict[str, int] = {}  # of checkpoints of epochs that are whole
        self._whole: set[str] = set()
        self._last: str | None = None  # the last one that was put
        self._asked: set[str] = set()  # what this process has written, or tried to
        self._before: set[str] | None = None  # what had been left half written when it began
        self.fails: list[int] = []

    def put(self, name: str, files: Mapping[str, list], writers: int = 1) -> Written:
        """Writes a snapshot, in the place of one of the same name; on return it is whole and on its disk.

        Args:
            name: of its folder.
            files: the pieces of each file, without the manifest.
            writers: so many workers write `model.keras` together; this one has what all of them write.

        Raises:
            OSError: it could not be written; what was there before still is.
        """
        parts: dict[str, list] = {}
        if writers > 1:
            files = dict(files)
            cut = division.split(files.pop(MODEL), writers)
            parts = {division.name_of(MODEL, i, pieces): pieces for i, pieces in enumerate(cut)}
            files |= parts
        last = manifest(files, list(parts))
        self._begin(name)
        others = _Others(self._filesystem, self._parts(name), parts)
        if self._is_local:
            self._put_local(name, {**files, MANIFEST: [last]}, others)
        else:
            self._put_remote(name, files, last, others)
        self._whole.add(name)
        self._last = name
        return Written(others.size_left(files) + len(last), others.late, others.others)

    def put_part(self, name: str, file: str, index: int, pieces: list) -> int:
        """Writes a worker's part of a file of a snapshot, which another process makes whole.

        Args:
            name: of the snapshot.
            file: of which it is a part.
            index: of the worker.
            pieces: of the part.

        Returns:
            Bytes written.
        """
        self._begin(name)
        folder, part = self._parts(name), division.name_of(file, index, pieces)
        self._filesystem.create_dir(folder)
        if not self._is_local:
            self._write_remote(posixpath.join(folder, part), pieces)
            self._fail_as_planted()
            return scattered.size(pieces)
        partial = os.path.join(folder, f"{_PARTIAL}{secrets.token_hex(4)}")
        _write_local(partial, pieces)
        self._fail_as_planted()
        os.rename(partial, os.path.join(folder, part))
        return scattered.size(pieces)

    def _parts(self, name: str) -> str:
        """Where workers put their parts of a snapshot: beside it, where it gets its name when it is whole."""
        return posixpath.join(self._folder, f"{_PARTS}{name}" if self._is_local else name)

    def _put_local(self, name: str, files: Mapping[str, list], others: _Others) -> None:
        os.makedirs(self._folder, exist_ok=True)
        partial = self._partial(name)
        os.mkdir(partial)
        try:
            for part, pieces in files.items():
                if part not in others.awaited:
                    _write_local(os.path.join(partial, part), pieces)
            for part, is_there in others.wait():
                if is_there:
                    os.rename(os.path.join(others.folder, part), os.path.join(partial, part))
                else:
                    _write_local(os.path.join(partial, part), files[part])
            self._fail_as_planted()
            _sync(partial)
            self._rename(partial, os.path.join(self._folder, name))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if others.awaited:
            others.look()
            shutil.rmtree(others.folder, ignore_errors=True)

    def _rename(self, partial: str, target: str) -> None:
        """Gives a folder its name, in the place of another one; between the two renames there is none of this name."""
        try:
            os.rename(partial, target)
        except OSError:
            if not os.path.lexists(target):
                raise
            before = f"{partial}_before"
            os.rename(target, before)
            os.rename(partial, target)
            shutil.rmtree(before, ignore_errors=True)
        _sync(self._folder)

    def _put_remote(self, name: str, files: Mapping[str, list], last: bytes, others: _Others) -> None:
        folder = posixpath.join(self._folder, name)
        if others.awaited:
            with contextlib.suppress(FileNotFoundError):  # it would vouch for a mixture
                self._filesystem.delete_file(posixpath.join(folder, MANIFEST))
        else:
            self._remove(name)  # with the manifest first
        self._filesystem.create_dir(folder)
        for part, pieces in files.items():
            if part not in others.awaited:
                self._write_remote(posixpath.join(folder, part), pieces)
        for part, is_there in others.wait():
            if not is_there:
                self._write_remote(posixpath.join(folder, part), files[part])
        others.look()
        self._fail_as_planted()
        self._write_remote(posixpath.join(folder, MANIFEST), [last])

    def _fail_as_planted(self) -> None:
        """Called when the bytes of a snapshot are there, and it is not whole so far."""
        if self.fails:
            number = self.fails.pop(0)
            raise OSError(number, os.strerror(number))

    def _write_remote(self, path: str, pieces: list) -> None:
        with self._filesystem.open_output_stream(path) as file:
            for chunk in scattered.chunks(pieces, _CHUNK_BYTES):
                file.write(chunk)
        found = self._filesystem.get_file_info(path).size
        if found != scattered.size(pieces):
            raise OSError(f"{path} has {found} bytes after {scattered.size(pieces)} were written")

    def prune(self, keep: int | None = None) -> list[str]:
        """Removes snapshots that newer ones, or checkpoints of epochs, have made needless; never the newest whole one.

        A checkpoint of an epoch that was put just now is not counted: it is not registered with Ray so far.

        What another writer has left half written is removed, too, where nobody can be at it any more, see `abandoned`.

        Args:
            keep: for once in the place of the store's.

        Returns:
            The names of those removed.

        Raises:
            OSError: it could not look, or not remove one.
        """
        found = self._filesystem.get_file_info(FileSelector(self._folder, allow_not_found=True))
        names = [info.base_name for info in found if info.type == FileType.Directory]
        epoch = max(
            (self._step_of(name) for name in names if name.startswith(AT_ENDS) and name != self._last), default=-1
        )
        steps = {name: step for name in names if (step := step_folders.step_of(name)) is not None}
        whole = [name for name in sorted(steps, reverse=True) if self._is_whole(name)]
        if self._last is not None and self._is_local:
            ends = {name for name in names if name.startswith(AT_ENDS) and self._step_of(name) >= 0}
            newest = max([epoch, *(steps[name] for name in whole)])
            for name in abandoned(names, self._before or (), self._asked, {*whole, *ends}, newest):
                shutil.rmtree(os.path.join(self._folder, name), ignore_errors=True)
        removed = needless(steps, whole, epoch, keep or self._keep)
        for name in removed:
            self._whole.discard(name)
            self._remove(name)
        return removed

    def _remove(self, name: str) -> None:
        """Removes a snapshot, which is none any more from the first moment on."""
        path = posixpath.join(self._folder, name)
        with contextlib.suppress(FileNotFoundError):
            if self._is_local:
                aside = self._partial(name)
                os.rename(path, aside)
                shutil.rmtree(aside)
            else:
                self._filesystem.delete_file(posixpath.join(path, MANIFEST))
        if not self._is_local:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_dir(path)

    def _begin(self, name: str) -> None:
        """Notes what it writes; before the first snapshot also what others have left half written."""
        self._asked.add(name)
        if self._before is None:
            found = self._filesystem.get_file_info(FileSelector(self._folder, allow_not_found=True))
            self._before = {info.base_name for info in found if info.base_name.startswith((_PARTIAL, _PARTS))}

    def _partial(self, name: str) -> str:
        return os.path.join(self._folder, f"{_PARTIAL}{name}_{secrets.token_hex(4)}")

    def _step_of(self, name: str) -> int:
        """The step of a whole checkpoint of an epoch; -1 of others."""
        if name not in self._steps:
            try:
                state = checkpoint_files.look(self._filesystem, posixpath.join(self._folder, name))
            except (ConfigError, FileNotFoundError):
                return -1  # it may be being written
            self._steps[name] = state.step
        return self._steps[name]

    def _is_whole(self, name: str) -> bool:
        """Whether every part of a snapshot has the size that it had."""
        if name not in self._whole:
            try:
                checkpoint_files.look(self._filesystem, posixpath.join(self._folder, name))
            except (ConfigError, FileNotFoundError, stored_json.UnreadableError):
                return False
            self._whole.add(name)
        return True


def abandoned(
    found: Iterable[str], before: Container[str], asked: Container[str], whole: Container[str], newest: int
) -> list[str]:
    """What is half written, and nobody will go on with; pure. No clock is asked, as hosts and file servers differ.

    Args:
        found: the names of the folders that are there.
        before: of what was half written when this process, which has written a snapshot since, began: it is of a run
            before, or of a process that was killed.
        asked: the snapshots that this process has written, or tried to.
        whole: those that are.
        newest: the steps before the newest of them.
    """
    left = []
    for name in found:
        snapshot = _half_written(name)
        if snapshot is None:
            continue
        step = step_folders.step_of(snapshot)
        is_old = step is not None and step < newest  # a worker that is at it still is too late
        if is_old or (name.startswith(_PARTS) and snapshot in whole) or (name in before and snapshot not in asked):
            left.append(name)
    return left


def _half_written(name: str) -> str | None:
    """The snapshot that a folder is to become, or of which it holds parts; None of other folders."""
    if name.startswith(_PARTS):
        return name.removeprefix(_PARTS)
    if not name.startswith(_PARTIAL):
        return None
    return name.removeprefix(_PARTIAL).removesuffix("_before")[: -len("_12345678")]


class _Others:
    """The parts of a snapshot that other workers write, which are waited for, though not for long.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        folder: where they come to lie.
        parts: the pieces of all parts by name, in order: the first and the last are this process's own.

    Attributes:
        awaited: bytes of each part of another worker, by name.
        late: workers whose parts did not come in time.
        others: those of them that have written other bytes.
    """

    def __init__(self, filesystem, folder: str, parts: Mapping[str, list]):
        self._filesystem, self.folder = filesystem, folder
        self._index = {name: i for i, name in enumerate(parts)}
        self.awaited = {name: scattered.size(parts[name]) for name in list(parts)[1:-1]}
        self.late: list[int] = []
        self.others: list[int] = []
        self._began = time.monotonic()

    def wait(self) -> Iterator[tuple[str, bool]]:
        """(name, whether it has come), when that is known; called when this process has written its own."""
        until = time.monotonic() + max(timeouts.get().checkpoint_parts, _PATIENCE * (time.monotonic() - self._began))
        for name, size in self.awaited.items():
            path = posixpath.join(self.folder, name)
            while not (is_there := self._filesystem.get_file_info(path).size == size) and time.monotonic() < until:
                time.sleep(_LOOKS_INTERVAL)
            if not is_there:
                self.late.append(self._index[name])
            yield name, is_there

    def look(self) -> None:
        """Removes parts with other bytes, of which `others` tells."""
        if not self.late:
            return
        infos = self._filesystem.get_file_info(FileSelector(self.folder, allow_not_found=True))
        for index in self.late:
            for info in infos:
                if info.base_name.startswith(division.prefix(MODEL, index)) and info.base_name not in self._index:
                    self.others.append(index)
                    self._filesystem.delete_file(info.path)

    def size_left(self, files: Mapping[str, list]) -> int:
        """Bytes of the files that this process has written."""
        came = [name for name in self.awaited if self._index[name] not in self.late]
        return sum(scattered.size(pieces) for name, pieces in files.items() if name not in came)


def needless(steps: Mapping[str, int], whole: Iterable[str], epoch: int, keep: int) -> list[str]:
    """The snapshots that may be removed; pure.

    Args:
        steps: of each snapshot that is there.
        whole: those of them that are whole, newest first.
        epoch: the step of the newest whole checkpoint of an epoch, -1 without one.
        keep: how many of the newest whole ones stay, at least 1.

    Returns:
        Names: those older than a whole checkpoint of an epoch, which holds more; of the others what is older than the
        newest `keep` whole ones. What is newer than the newest whole one, and not whole, may be being written.
    """
    newer = [name for name in whole if steps[name] >= epoch]
    kept = newer[:keep]
    oldest = min((steps[name] for name in kept), default=epoch)
    return sorted(name for name, step in steps.items() if step < max(oldest, epoch) and name not in kept)


def _write_local(path: str, pieces: list) -> None:
    """Writes a file that is not there, to its disk."""
    with open(path, "xb", buffering=0) as file:
        _write_all(file, pieces)
        os.fsync(file.fileno())


def _write_all(file, pieces: list) -> None:
    for chunk in scattered.chunks(pieces, _CHUNK_BYTES):
        while len(chunk):
            chunk = chunk[file.write(chunk) :]


def _sync(folder: str) -> None:
    """Brings the names in a folder to its disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
