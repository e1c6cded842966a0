"""Checkpoint files: which parts exist, whether they are whole, and the small state; see `checkpoint.py`.

Over 500 lines: every file of the format, with its reader next to its writer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import posixpath
import shutil
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from raytf import logs
from raytf.errors import ConfigError, first_line
from raytf.storage import scratch, stored_json

logger = logs.get_logger(__name__)

# Format 4 stores the model in parts. Format 3 is used only mid-epoch; older versions would restart the epoch.
VERSION_OF_PARTS, VERSION, VERSION_OF_EPOCHS = 4, 3, 2
MODEL, STATE, SEEDS, MANIFEST = "model.keras", "state.json", "seeds.npz", "manifest.json"
CALLBACKS, ARRAYS, BUILD = "callbacks.json", "callbacks.npz", "build.json"
METRICS, RANDOM = "metrics.npz", "random.npz"
# Prefix of Ray's folder names for epoch-end checkpoints; a timestamp follows.
AT_ENDS = "checkpoint_"
_LONGEST_METADATA = 1 << 16
# Largest ratio of unpacked to packed bytes of a Keras file. Keras does not compress, and weights compress little. Small
# files may exceed it.
_MOST_UNPACKED = 16
_ALWAYS_UNPACKED = 1 << 26
_CHUNK_BYTES = 1 << 22


class DamagedCheckpointError(ConfigError):
    """A part of a checkpoint is missing, truncated or not as written."""


@dataclasses.dataclass
class CheckpointState:
    """Training progress that a checkpoint stores.

    Args:
        epoch: Completed epochs, at least 0.
        step: Training steps made in total, at least 0.
        seed: The run's seed.
        stopped: Whether a callback ended the run before its last epoch.
        history: A dict of metric values for each epoch.
        identity: Values that identify the run, by name; {} in checkpoints without them.
        learning_rate: The config's learning rate, or None if it is not a number.
        epoch_step: Completed steps of the next epoch; 0 at the end of an epoch.
        logs: Metrics of these steps, in the format of an epoch's end; {} there.
        metrics: Descriptions of the model's metrics, whose variables are in `metrics.npz`; [] at the end of an epoch.
        order: Values that determine the rows of an epoch's steps, see `Feed.order`; {} at the end of an epoch.
        batch_scale: Factor above 0 by which rows of a step, and the learning rate, exceeded the config's.
    """

    epoch: int
    step: int
    seed: int
    stopped: bool
    history: list[dict[str, float]]
    identity: dict = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None
    epoch_step: int = 0
    logs: dict = dataclasses.field(default_factory=dict)
    metrics: list[str] = dataclasses.field(default_factory=list)
    order: dict = dataclasses.field(default_factory=dict)
    batch_scale: float = 1.0

    @property
    def version(self) -> int:
        """The format version of a checkpoint with this state."""
        return VERSION if self.epoch_step else VERSION_OF_EPOCHS

    @property
    def reported(self) -> dict[str, Any]:
        """The metrics that Ray lists with the checkpoint: those of the last epoch."""
        return {"epoch": self.epoch, **(self.history[-1] if self.history else {})}

    def to_json(self) -> str:
        return json.dumps({"version": self.version, **dataclasses.asdict(self)})

    @classmethod
    def from_dict(cls, content: dict, name: str) -> CheckpointState:
        """Parses what `to_json` wrote.

        Args:
            content: The object in the file.
            name: The checkpoint's name, for errors.

        Raises:
            DamagedCheckpointError: The object is not such a state.
            ConfigError: A newer raytf wrote it.
        """
        check_version(content.get("version", 1), name)
        fields = {f.name: content[f.name] for f in dataclasses.fields(cls) if f.name in content}
        right = {
            "epoch": _is_count,
            "step": _is_count,
            "seed": _is_count,
            "stopped": lambda v: type(v) is bool,
            "history": lambda v: type(v) is list and all(type(row) is dict for row in v),
            "identity": lambda v: type(v) is dict,
            "learning_rate": lambda v: v is None or (type(v) in (int, float) and math.isfinite(v)),
            "epoch_step": _is_count,
            "logs": lambda v: type(v) is dict,
            "metrics": lambda v: type(v) is list and all(type(name) is str for name in v),
            "order": lambda v: type(v) is dict,
            "batch_scale": lambda v: type(v) in (int, float) and math.isfinite(v) and v > 0,
        }
        for field in dataclasses.fields(cls):
            missing = field.name not in fields and field.default is field.default_factory is dataclasses.MISSING
            if missing or (field.name in fields and not right[field.name](fields[field.name])):
                raise damaged_error(name, f"{STATE} has no right {field.name!r}")
        return cls(**fields)


def _is_count(value) -> bool:
    return type(value) is int and value >= 0


def damaged_error(name: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "A checkpoint is used only if every part of it is what was written",
        f"{name} ({why})",
        "Use one before it, or start a run with another name",
    )


def check_version(version, name: str) -> None:
    """Raises ConfigError for a checkpoint of a newer format."""
    if type(version) is not int or version < 1:
        raise damaged_error(name, "it has no right version")
    if version > VERSION_OF_PARTS:
        raise ConfigError(
            f"This raytf reads checkpoints of format {VERSION_OF_PARTS} and before",
            f"{name} of format {version}",
            "Use the raytf that wrote it, or a newer one",
        )


def read_json(folder: str, part: str, name: str | None = None) -> dict:
    """Returns the object in a JSON file of a checkpoint's folder.

    Args:
        folder: The checkpoint's folder.
        part: The file's name.
        name: The checkpoint's name for errors, if it is not the folder's.

    Raises:
        DamagedCheckpointError: The file holds no readable object.
    """
    try:
        # absolute: pyarrow takes a relative path with a colon for a URI
        return stored_json.read_object(LocalFileSystem(), os.path.abspath(os.path.join(folder, part)))
    except stored_json.UnreadableError as error:
        raise damaged_error(name or _name(folder), f"{part} {error}") from error


def read_state(folder: str, name: str | None = None) -> CheckpointState:
    """Returns the `CheckpointState` of a checkpoint folder; see `read_json`."""
    return CheckpointState.from_dict(read_json(folder, STATE, name), name or _name(folder))


def read_state_of(checkpoint) -> CheckpointState:
    """Returns the `CheckpointState` of a `ray.train.Checkpoint`; reads only this small file from the storage.

    Raises:
        DamagedCheckpointError: The checkpoint has no readable state.
    """
    name = posixpath.basename(checkpoint.path.rstrip("/"))
    return parse_state(_small(checkpoint.filesystem, checkpoint.path, STATE, name), name)


def parse_state(text: bytes, name: str) -> CheckpointState:
    """Parses the text of a `state.json` as a `CheckpointState`.

    Args:
        text: Content of the file.
        name: The checkpoint's name, for errors.

    Raises:
        DamagedCheckpointError: The text is not such a state.
        ConfigError: A newer raytf wrote it.
    """
    return CheckpointState.from_dict(parse_object(text, STATE, name), name)


def describe_progress(epoch: int, epoch_step: int) -> str:
    """Describes the training progress for the user.

    Args:
        epoch: Completed epochs.
        epoch_step: Completed steps of the next epoch.
    """
    return f"step {epoch_step} of epoch {epoch + 1}" if epoch_step else f"epoch {epoch} complete"


def check_stored(filesystem, path: str) -> CheckpointState:
    """Returns the state of a stored checkpoint after a check of the parts' sizes and the state's checksum.

    Reads only the small files; `check_folder` reads the others.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        path: Path of the checkpoint there.

    Raises:
        DamagedCheckpointError: The check fails.
        ConfigError: A newer raytf wrote it.
    """
    name = posixpath.basename(path.rstrip("/"))
    text = _small(filesystem, path, STATE, name)
    state = parse_object(text, STATE, name)
    try:
        manifest = stored_json.read_object(filesystem, posixpath.join(path, MANIFEST))
    except stored_json.UnreadableError as error:
        if not error.missing or "version" in state:
            raise damaged_error(name, f"{MANIFEST} {error}") from error
        return CheckpointState.from_dict(state, name)  # format 1
    parts = _parts(manifest, name)
    for info, (part, known) in zip(
        filesystem.get_file_info([posixpath.join(path, part) for part in parts]), parts.items(), strict=True
    ):
        _check_size(part, info.size if info.is_file else None, known, name)
    if zlib.crc32(text) != parts[STATE]["crc32"]:
        raise damaged_error(name, f"{STATE} is not what was written")
    return CheckpointState.from_dict(state, name)


def finished_names(filesystem, run: str, wanted: Callable[[str], bool]) -> list[str]:
    """Returns the names of finished checkpoints in a run's folder: those with a manifest, which is written last.

    Other damage shows when the checkpoint is opened.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder there; it may be missing.
        wanted: Predicate wanted(folder name) that selects the folders to check.
    """
    infos = filesystem.get_file_info(FileSelector(run, allow_not_found=True))
    names = [info.base_name for info in infos if info.type == FileType.Directory and wanted(info.base_name)]
    ends = filesystem.get_file_info([posixpath.join(run, name, MANIFEST) for name in names]) if names else []
    return [name for name, end in zip(names, ends, strict=True) if end.type == FileType.File]


def unlisted_checkpoints(
    filesystem, run: str, listed: Callable[[], Container[str]]
) -> list[tuple[str, CheckpointState]]:
    """Returns (name, state) of whole epoch-end checkpoints that Ray does not list, as their workers ended first.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder there; it may be missing.
        listed: Returns the names that Ray lists; called only if raytf's checkpoints exist.
    """
    stored = finished_names(filesystem, run, lambda name: name.startswith(AT_ENDS))
    known, states = listed() if stored else (), []
    for name in stored:
        if name not in known:
            with contextlib.suppress(DamagedCheckpointError):  # Ray was removing it
                states.append((name, check_stored(filesystem, posixpath.join(run, name))))
    return states


def _small(filesystem, path: str, part: str, name: str) -> bytes:
    try:
        return stored_json.read_bytes(filesystem, posixpath.join(path, part))
    except stored_json.UnreadableError as error:
        raise damaged_error(name, f"{part} {error}") from error


def parse_object(text: bytes, part: str, name: str) -> dict:
    try:
        return stored_json.parse_object(text)
    except stored_json.UnreadableError as error:
        raise damaged_error(name, f"{part} {error}") from error


def _name(folder: str) -> str:
    return os.path.basename(os.path.normpath(folder))


def _check_regular(path: str, part: str, name: str) -> None:
    if not os.path.isfile(path):
        raise damaged_error(name, f"{part} is {'not a file' if os.path.lexists(path) else 'missing'}")


def check_archive(path: str, name: str) -> None:
    """Raises DamagedCheckpointError unless a Keras file is a zip archive whose parts are not absurdly large.

    Unpacks nothing. zipfile cuts off a part that unpacks to more than the archive declares.

    Args:
        path: Path of the file.
        name: Name of its checkpoint.
    """
    part = os.path.basename(path)
    _check_regular(path, part, name)
    if not zipfile.is_zipfile(path):
        raise damaged_error(name, f"{part} is {'no archive' if os.path.getsize(path) else 'empty'}")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise damaged_error(name, f"{part} is no archive: {first_line(error)}") from error
    if unpacked > max(_ALWAYS_UNPACKED, _MOST_UNPACKED * os.path.getsize(path)):
        raise damaged_error(name, f"{part} has {os.path.getsize(path)} bytes and would unpack to {unpacked}")


def keras_version(path: str) -> str:
    """Returns the version of Keras that wrote a file, or "" if the file does not name it."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("metadata.json") as file:
            metadata = stored_json.parse_object(file.read(_LONGEST_METADATA))
    except (KeyError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return ""
    return str(metadata.get("keras_version", ""))


def write_manifest(folder: str, version: int = VERSION_OF_EPOCHS) -> None:
    """Writes sizes and checksums of the files in the folder; the manifest is the last file of a checkpoint.

    Args:
        folder: The checkpoint's folder.
        version: Its format, from `CheckpointState.version`.
    """
    files = {}
    for part in sorted(os.listdir(folder)):
        path = os.path.join(folder, part)
        files[part] = {"bytes": os.path.getsize(path), "crc32": _crc32(path)}
    with open(os.path.join(folder, MANIFEST), "w") as file:
        json.dump({"version": version, "files": files}, file)


def _crc32(path: str) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def check_folder(folder: str, contents: bool = True, name: str | None = None) -> None:
    """Raises unless every part of a checkpoint is as written; uses none of the content.

    Args:
        folder: The checkpoint's folder.
        contents: Whether to compare checksums, which reads every byte, or only sizes.
        name: The checkpoint's name for errors, if it is not the folder's.

    Raises:
        DamagedCheckpointError: A part is missing or differs.
        ConfigError: A newer raytf wrote the checkpoint.
    """
    name = name or _name(folder)
    if not os.path.isdir(folder):
        raise damaged_error(name, "its folder is missing")
    if not os.path.lexists(os.path.join(folder, MANIFEST)):
        _check_first_format(folder, name)
        return
    for part, known in _parts(read_json(folder, MANIFEST, name), name).items():
        path = os.path.join(folder, part)
        _check_regular(path, part, name)
        _check_size(part, os.path.getsize(path), known, name)
        if contents and _crc32(path) != known["crc32"]:
            raise damaged_error(name, f"{part} is not what was written")
    read_state(folder, name)


def _parts(manifest: dict, name: str) -> dict[str, dict[str, int]]:
    """Returns {"bytes", "crc32"} of each part in a manifest."""
    check_version(manifest.get("version"), name)
    files, model = manifest.get("files"), _joined(manifest, name) or [MODEL]
    if type(files) is not dict or not {*model, STATE, SEEDS} <= files.keys():
        raise damaged_error(name, f"{MANIFEST} does not name its parts")
    for part, known in files.items():
        right = type(known) is dict and all(_is_count(known.get(figure)) for figure in ("bytes", "crc32"))
        if not right or os.path.basename(part) != part or part in ("", ".", ".."):
            raise damaged_error(name, f"{MANIFEST} names a part that is none")
    return files


def _joined(manifest: dict, name: str) -> list[str]:
    """Returns the parts that form `model.keras`, in order; [] if it is one file."""
    joined = manifest.get("joined", {})
    parts = joined.get(MODEL, []) if type(joined) is dict else None
    if type(parts) is not list or any(type(part) is not str for part in parts):
        raise damaged_error(name, f"{MANIFEST} does not name the parts of {MODEL}")
    return parts


@contextlib.contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """Yields a folder with the checkpoint's files and `model.keras` as one file: this folder, or a temporary one.

    Args:
        folder: Folder of a checkpoint that was checked.

    Raises:
        DamagedCheckpointError: Parts of its model are missing.
    """
    path = os.path.join(folder, MANIFEST)
    manifest = read_json(folder, MANIFEST) if os.path.isfile(path) else {}
    parts = _joined(manifest, _name(folder))
    if not parts:
        yield folder
        return
    _parts(manifest, _name(folder))
    files = [name for name in parts if os.path.isfile(os.path.join(folder, name))]
    with scratch.temporary_folder(sum(os.path.getsize(os.path.join(folder, name)) for name in files)) as made:
        target = os.path.join(made, _name(folder))
        os.mkdir(target)
        for name in os.listdir(folder):
            if name not in (MODEL, *parts):  # on an object store a whole one of an earlier attempt may be left
                os.symlink(os.path.join(os.path.abspath(folder), name), os.path.join(target, name))
        with open(os.path.join(target, MODEL), "xb") as file:
            for part in parts:
                _check_regular(os.path.join(folder, part), part, _name(folder))
                with open(os.path.join(folder, part), "rb") as part_file:
                    shutil.copyfileobj(part_file, file, _CHUNK_BYTES)
        yield target


def _check_size(part: str, size: int | None, known: dict[str, int], name: str) -> None:
    """Raises unless a part has the recorded size; a size of None means that the file does not exist."""
    if size is None:
        raise damaged_error(name, f"{part} is missing")
    if size != known["bytes"]:
        raise damaged_error(
            name, f"{part} is {'empty' if not size else f'{size} bytes long'}, and was {known['bytes']}"
        )


def _check_first_format(folder: str, name: str) -> None:
    """Checks a checkpoint of format 1, which has no manifest, by the archives' own checksums."""
    if "version" in read_json(folder, STATE, name):
        raise damaged_error(name, f"{MANIFEST} is missing")
    read_state(folder, name)
    for part in (MODEL, SEEDS):
        path = os.path.join(folder, part)
        _check_regular(path, part, name)
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
            problem = "empty" if not os.path.getsize(path) else f"no archive: {first_line(error)}"
            raise damaged_error(name, f"{part} is {problem}") from error
        if broken is not None:
            raise damaged_error(name, f"{part} is broken at {broken}")


@contextlib.contextmanager
def npz_arrays(folder: str, part: str):
    """Yields the arrays of a checkpoint's npz by name; refuses objects and compressed members.

    Raises:
        DamagedCheckpointError: The file holds something else, also while the arrays are read.
    """
    path, name = os.path.join(folder, part), _name(folder)
    _check_regular(path, part, name)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed, as raytf never writes it")
        with np.load(path, allow_pickle=False) as loaded:
            yield loaded
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, KeyError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise damaged_error(name, f"{part}: {first_line(error)}") from error


def first_whole(candidates: Iterable, check: Callable[[object], str]):
    """Returns the first whole checkpoint, and warns with the names of the damaged ones before it.

    Args:
        candidates: `ray.train.Checkpoint`s, newest first.
        check: Returns a result for a whole candidate, else raises DamagedCheckpointError.

    Returns:
        (the candidate, the result of `check_folder`).

    Raises:
        DamagedCheckpointError: No candidate is whole; names all of them.
    """
    refused = []
    for candidate in candidates:
        try:
            result = check(candidate)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            refused.append(error.received if isinstance(error, ConfigError) else f"{candidate.path} is missing")
            continue
        if refused:
            logger.warning(describe_choice(refused, posixpath.basename(candidate.path)))
        return candidate, result
    raise DamagedCheckpointError(
        "A run resumes from a checkpoint of which every part is what was written",
        "; ".join(refused),
        "Start a run with another name",
    )


def describe_choice(refused: Iterable[str], name: str) -> str:
    """Describes which checkpoint is used, and the damage of those that would have come first."""
    return f"Damaged: {'; '.join(refused)}. Using the checkpoint {name} instead"


def merge_newest_first(epochs: Iterable, steps: Sequence[tuple[int, Any]]) -> Iterator:
    """Yields epoch-end and mid-epoch checkpoints in the order in which to try them.

    After equally many steps the epoch's checkpoint comes first, as its validation is complete.

    Args:
        epochs: `ray.train.Checkpoint`s, newest first; consumed lazily.
        steps: (steps made in total, `ray.train.Checkpoint`), newest first.
    """
    remaining = list(steps)
    for epoch in epochs:
        with contextlib.suppress(DamagedCheckpointError):  # reported when it is tried
            step = read_state_of(epoch).step
            while remaining and remaining[0][0] > step:
                yield remaining.pop(0)[1]
        yield epoch
    yield from (candidate for _, candidate in remaining)


def newest_first(checkpoints: Iterable) -> list:
    """Returns the checkpoints of one run by descending step count, without duplicates.

    Ray puts the time of the chief's host into their names, and that clock may be wrong or set back.

    Args:
        checkpoints: Objects with a `path` and a `filesystem`, such as `ray.train.Checkpoint`s.
    """

    def step(checkpoint) -> int | None:
        try:
            return read_state_of(checkpoint).step
        except DamagedCheckpointError:
            return None

    by_path = {checkpoint.path.rstrip("/"): checkpoint for checkpoint in checkpoints}
    return by_step(by_path.values(), lambda checkpoint: posixpath.basename(checkpoint.path.rstrip("/")), step)


def by_step(checkpoints: Iterable, name: Callable[[Any], str], step: Callable[[Any], int | None]) -> list:
    """Returns the checkpoints of one run, newest first.

    Args:
        checkpoints: Objects that represent the checkpoints.
        name: Returns the folder's name of one, which orders those of one step.
        step: Returns the steps made before one; None places it just before the next older one by name.
    """
    placed, last = [], -1
    for checkpoint in sorted(checkpoints, key=name):
        known = step(checkpoint)
        last = last if known is None else known
        placed.append((last, checkpoint))
    placed.reverse()
    placed.sort(key=lambda pair: -pair[0])
    return [checkpoint for _, checkpoint in placed]
