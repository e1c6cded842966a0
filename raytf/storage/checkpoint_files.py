"""Files of a checkpoint: which there are, whether they are whole, and its small state; see `checkpoint.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import posixpath
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from pyarrow.fs import FileSelector, FileType

from raytf.errors import ConfigError, first_line
from raytf.storage import scratch, stored_json

# Format 4 has its model in parts; 3 is written within an epoch alone, which others would begin anew.
VERSION_OF_PARTS, VERSION, VERSION_OF_EPOCHS = 4, 3, 2
MODEL, STATE, SEEDS, MANIFEST = "model.keras", "state.json", "seeds.npz", "manifest.json"
CALLBACKS, ARRAYS, BUILD = "callbacks.json", "callbacks.npz", "build.json"
METRICS, RANDOM = "metrics.npz", "random.npz"
# How Ray names the folders of checkpoints at the ends of epochs, a time behind it.
AT_ENDS = "checkpoint_"
_LONGEST_METADATA = 1 << 16
# How many times its size a file of Keras may unpack to: Keras packs nothing, and weights shrink little. Small ones may.
_MOST_UNPACKED = 16
_ALWAYS_UNPACKED = 1 << 26
_CHUNK_BYTES = 1 << 22


class DamagedCheckpointError(ConfigError):
    """A part of a checkpoint is missing, cut off, or not what was written."""


@dataclasses.dataclass
class CheckpointState:
    """Where a training stands.

    Args:
        epoch: epochs that are complete, at least 0.
        step: training steps that were made in all, at least 0.
        seed: the run's seed.
        stopped: whether a callback ended the run before its last epoch.
        history: a dict of metric values for each epoch.
        identity: what tells this run from another, by name; {} in checkpoints that have none.
        learning_rate: the config's, or None where that is not a number.
        epoch_step: steps of the next epoch that are made, too; 0 at the end of an epoch.
        logs: metrics of these steps, as at the end of an epoch; {} there.
        metrics: what the model's metrics are, whose variables `metrics.npz` holds; [] at the end of an epoch.
        order: what says which rows the steps of an epoch have, see `Feed.order`; {} at the end of an epoch.
        batch_scale: by which rows of a step, and the learning rate, were more than the config's, above 0.
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
        """The format that a checkpoint of it has."""
        return VERSION if self.epoch_step else VERSION_OF_EPOCHS

    @property
    def reported(self) -> dict[str, Any]:
        """The metrics that Ray lists with it: those of the last epoch."""
        return {"epoch": self.epoch, **(self.history[-1] if self.history else {})}

    def to_json(self) -> str:
        return json.dumps({"version": self.version, **dataclasses.asdict(self)})

    @classmethod
    def of(cls, found: dict, name: str) -> CheckpointState:
        """What `to_json` wrote.

        Args:
            found: the object of the file.
            name: of the checkpoint, for errors.

        Raises:
            DamagedCheckpointError: it is not such an object.
            ConfigError: a newer raytf wrote it.
        """
        check_version(found.get("version", 1), name)
        fields = {f.name: found[f.name] for f in dataclasses.fields(cls) if f.name in found}
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
                raise damaged(name, f"{STATE} has no right {field.name!r}")
        return cls(**fields)


def _is_count(value) -> bool:
    return type(value) is int and value >= 0


def damaged(name: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        "A checkpoint is used only if every part of it is what was written",
        f"{name} ({why})",
        "Use one before it, or start a run with another name",
    )


def check_version(version, name: str) -> None:
    """Raises ConfigError for a checkpoint of a newer format."""
    if type(version) is not int or version < 1:
        raise damaged(name, "it has no right version")
    if version > VERSION_OF_PARTS:
        raise ConfigError(
            f"This raytf reads checkpoints of format {VERSION_OF_PARTS} and before",
            f"{name} of format {version}",
            "Use the raytf that wrote it, or a newer one",
        )


def read_json(folder: str, part: str, name: str | None = None) -> dict:
    """The object in a JSON file of a checkpoint's folder.

    Args:
        folder: of the checkpoint.
        part: the file.
        name: of the checkpoint for errors, where that is not the folder's.

    Raises:
        DamagedCheckpointError: there is none.
    """
    try:
        return stored_json.load(os.path.join(folder, part))
    except stored_json.UnreadableError as error:
        raise damaged(name or _name(folder), f"{part} {error}") from error


def read_state(folder: str, name: str | None = None) -> CheckpointState:
    """The `CheckpointState` of a checkpoint folder; see `read_json`."""
    return CheckpointState.of(read_json(folder, STATE, name), name or _name(folder))


def read_state_of(checkpoint) -> CheckpointState:
    """The `CheckpointState` of a `ray.train.Checkpoint`, of which only this small file is read from its storage.

    Raises:
        DamagedCheckpointError: it has none that can be read.
    """
    name = posixpath.basename(checkpoint.path.rstrip("/"))
    return state_of(_small(checkpoint.filesystem, checkpoint.path, STATE, name), name)


def state_of(text: bytes, name: str) -> CheckpointState:
    """The `CheckpointState` of the text of a `state.json`.

    Args:
        text: of the file.
        name: of the checkpoint, for errors.

    Raises:
        DamagedCheckpointError: it is none.
        ConfigError: a newer raytf wrote it.
    """
    return CheckpointState.of(object_of(text, STATE, name), name)


def standing(epoch: int, epoch_step: int) -> str:
    """Where a training stands, for its user.

    Args:
        epoch: epochs that are complete.
        epoch_step: steps of the next one that are made, too.
    """
    return f"step {epoch_step} of epoch {epoch + 1}" if epoch_step else f"epoch {epoch}"


def look(filesystem, path: str) -> CheckpointState:
    """Returns the state of a stored checkpoint whose parts have their lengths, and whose state is what was written.

    Only the small files are read; see `check` for the others.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        path: of the checkpoint there.

    Raises:
        DamagedCheckpointError: it is not such a one.
        ConfigError: a newer raytf wrote it.
    """
    name = posixpath.basename(path.rstrip("/"))
    text = _small(filesystem, path, STATE, name)
    found = object_of(text, STATE, name)
    try:
        manifest = stored_json.fetched(filesystem, posixpath.join(path, MANIFEST))
    except stored_json.UnreadableError as error:
        if not error.missing or "version" in found:
            raise damaged(name, f"{MANIFEST} {error}") from error
        return CheckpointState.of(found, name)  # of format 1
    parts = _parts(manifest, name)
    for info, (part, known) in zip(
        filesystem.get_file_info([posixpath.join(path, part) for part in parts]), parts.items(), strict=True
    ):
        _check_size(part, info.size if info.is_file else None, known, name)
    if zlib.crc32(text) != parts[STATE]["crc32"]:
        raise damaged(name, f"{STATE} is not what was written")
    return CheckpointState.of(found, name)


def finished(filesystem, run: str, wanted: Callable[[str], bool]) -> list[str]:
    """The names of finished checkpoints in a run's folder: those with a manifest, which is written last.

    What else is wrong with one is seen when it is opened.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: path of the run's folder there; it may be missing.
        wanted: wanted(name of a folder) says whether it is looked at.
    """
    infos = filesystem.get_file_info(FileSelector(run, allow_not_found=True))
    names = [info.base_name for info in infos if info.type == FileType.Directory and wanted(info.base_name)]
    ends = filesystem.get_file_info([posixpath.join(run, name, MANIFEST) for name in names]) if names else []
    return [name for name, end in zip(names, ends, strict=True) if end.type == FileType.File]


def unlisted(filesystem, run: str, listed: Callable[[], Container[str]]) -> list[tuple[str, CheckpointState]]:
    """(name, state) of whole checkpoints of ends of epochs that Ray does not list: their workers ended before.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: path of the run's folder there; it may be missing.
        listed: gives the names that Ray lists; called if there are any checkpoints of raytf's.
    """
    stored = finished(filesystem, run, lambda name: name.startswith(AT_ENDS))
    known, found = listed() if stored else (), []
    for name in stored:
        if name not in known:
            with contextlib.suppress(DamagedCheckpointError):  # Ray was removing it
                found.append((name, look(filesystem, posixpath.join(run, name))))
    return found


def _small(filesystem, path: str, part: str, name: str) -> bytes:
    try:
        return stored_json.content(filesystem, posixpath.join(path, part))
    except stored_json.UnreadableError as error:
        raise damaged(name, f"{part} {error}") from error


def object_of(text: bytes, part: str, name: str) -> dict:
    try:
        return stored_json.parsed(text)
    except stored_json.UnreadableError as error:
        raise damaged(name, f"{part} {error}") from error


def _name(folder: str) -> str:
    return os.path.basename(os.path.normpath(folder))


def _check_regular(path: str, part: str, name: str) -> None:
    if not os.path.isfile(path):
        raise damaged(name, f"{part} is {'not a file' if os.path.lexists(path) else 'missing'}")


def check_archive(path: str, name: str) -> None:
    """Raises DamagedCheckpointError unless a file of Keras is an archive, of parts that are not absurdly large.

    Nothing of it is unpacked for this. A part that unpacks to more than its archive says is cut off by zipfile.

    Args:
        path: of the file.
        name: of its checkpoint.
    """
    part = os.path.basename(path)
    _check_regular(path, part, name)
    if not zipfile.is_zipfile(path):
        raise damaged(name, f"{part} is {'no archive' if os.path.getsize(path) else 'empty'}")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise damaged(name, f"{part} is no archive: {first_line(error)}") from error
    if unpacked > max(_ALWAYS_UNPACKED, _MOST_UNPACKED * os.path.getsize(path)):
        raise damaged(name, f"{part} has {os.path.getsize(path)} bytes and would unpack to {unpacked}")


def keras_version(path: str) -> str:
    """The version of Keras that wrote a file of it, or "" where that does not say."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("metadata.json") as file:
            found = stored_json.parsed(file.read(_LONGEST_METADATA))
    except (KeyError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        return ""
    return str(found.get("keras_version", ""))


def write_manifest(folder: str, version: int = VERSION_OF_EPOCHS) -> None:
    """Writes sizes and checksums of what is in the folder; the last file of a checkpoint.

    Args:
        folder: of the checkpoint.
        version: its format, which `CheckpointState.version` tells.
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


def check(folder: str, contents: bool = True, name: str | None = None) -> None:
    """Raises unless every part of a checkpoint is there as it was written; nothing of it is used for this.

    Args:
        folder: of the checkpoint.
        contents: compare checksums, which reads every byte; else sizes alone.
        name: of the checkpoint for errors, where that is not the folder's.

    Raises:
        DamagedCheckpointError: a part is not.
        ConfigError: a newer raytf wrote the checkpoint.
    """
    name = name or _name(folder)
    if not os.path.isdir(folder):
        raise damaged(name, "its folder is missing")
    if not os.path.lexists(os.path.join(folder, MANIFEST)):
        _check_first_format(folder, name)
        return
    for part, known in _parts(read_json(folder, MANIFEST, name), name).items():
        path = os.path.join(folder, part)
        _check_regular(path, part, name)
        _check_size(part, os.path.getsize(path), known, name)
        if contents and _crc32(path) != known["crc32"]:
            raise damaged(name, f"{part} is not what was written")
    read_state(folder, name)


def _parts(manifest: dict, name: str) -> dict[str, dict[str, int]]:
    """{"bytes", "crc32"} of each part that a manifest names."""
    check_version(manifest.get("version"), name)
    files, model = manifest.get("files"), _joined(manifest, name) or [MODEL]
    if type(files) is not dict or not {*model, STATE, SEEDS} <= files.keys():
        raise damaged(name, f"{MANIFEST} does not name its parts")
    for part, known in files.items():
        right = type(known) is dict and all(_is_count(known.get(figure)) for figure in ("bytes", "crc32"))
        if not right or os.path.basename(part) != part or part in ("", ".", ".."):
            raise damaged(name, f"{MANIFEST} names a part that is none")
    return files


def _joined(manifest: dict, name: str) -> list[str]:
    """The parts that are `model.keras`, in order; [] where it is one file."""
    joined = manifest.get("joined", {})
    found = joined.get(MODEL, []) if type(joined) is dict else None
    if type(found) is not list or any(type(part) is not str for part in found):
        raise damaged(name, f"{MANIFEST} does not name the parts of {MODEL}")
    return found


@contextlib.contextmanager
def whole(folder: str) -> Iterator[str]:
    """A folder with the files of a checkpoint in which `model.keras` is one file: this one, or one for the moment.

    Args:
        folder: of a checkpoint that was checked.

    Raises:
        DamagedCheckpointError: parts of its model are missing.
    """
    path = os.path.join(folder, MANIFEST)
    found = read_json(folder, MANIFEST) if os.path.isfile(path) else {}
    parts = _joined(found, _name(folder))
    if not parts:
        yield folder
        return
    _parts(found, _name(folder))
    files = [name for name in parts if os.path.isfile(os.path.join(folder, name))]
    with scratch.folder(sum(os.path.getsize(os.path.join(folder, name)) for name in files)) as made:
        target = os.path.join(made, _name(folder))
        os.mkdir(target)
        for name in os.listdir(folder):
            if name not in parts:
                os.symlink(os.path.join(os.path.abspath(folder), name), os.path.join(target, name))
        with open(os.path.join(target, MODEL), "xb") as file:
            for part in parts:
                _check_regular(os.path.join(folder, part), part, _name(folder))
                with open(os.path.join(folder, part), "rb") as one:
                    shutil.copyfileobj(one, file, _CHUNK_BYTES)
        yield target


def _check_size(part: str, size: int | None, known: dict[str, int], name: str) -> None:
    """Raises unless a part has the size that it had; None: there is no such file."""
    if size is None:
        raise damaged(name, f"{part} is missing")
    if size != known["bytes"]:
        raise damaged(name, f"{part} is {'empty' if not size else f'{size} bytes long'}, and was {known['bytes']}")


def _check_first_format(folder: str, name: str) -> None:
    """What can be seen of a checkpoint of format 1, which had no manifest: archives have checksums of their own."""
    if "version" in read_json(folder, STATE, name):
        raise damaged(name, f"{MANIFEST} is missing")
    read_state(folder, name)
    for part in (MODEL, SEEDS):
        path = os.path.join(folder, part)
        _check_regular(path, part, name)
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
            what = "empty" if not os.path.getsize(path) else f"no archive: {first_line(error)}"
            raise damaged(name, f"{part} is {what}") from error
        if broken is not None:
            raise damaged(name, f"{part} is broken at {broken}")


@contextlib.contextmanager
def arrays(folder: str, part: str):
    """The arrays of an npz of a checkpoint, by name; objects are refused, and what is packed smaller than it is.

    Raises:
        DamagedCheckpointError: it holds something else, also while they are read.
    """
    path, name = os.path.join(folder, part), _name(folder)
    _check_regular(path, part, name)
    try:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("it is compressed, as raytf never writes it")
        with np.load(path, allow_pickle=False) as found:
            yield found
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, KeyError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        raise damaged(name, f"{part}: {first_line(error)}") from error


def first_whole(candidates: Iterable, check: Callable[[object], str]):
    """The first checkpoint that is whole, with a warning that names those that are not.

    Args:
        candidates: `ray.train.Checkpoint`s, newest first.
        check: check(candidate) gives something for a whole one, else raises DamagedCheckpointError.

    Returns:
        (the candidate, what `check` gave).

    Raises:
        DamagedCheckpointError: none is; names all.
    """
    refused = []
    for candidate in candidates:
        try:
            found = check(candidate)
        except (DamagedCheckpointError, FileNotFoundError) as error:
            refused.append(error.received if isinstance(error, ConfigError) else f"{candidate.path} is missing")
            continue
        if refused:
            warnings.warn(taken_instead(refused, posixpath.basename(candidate.path)), stacklevel=3)
        return candidate, found
    raise DamagedCheckpointError(
        "A run resumes from a checkpoint of which every part is what was written",
        "; ".join(refused),
        "Start a run with another name",
    )


def taken_instead(refused: Iterable[str], name: str) -> str:
    """Says which checkpoint is taken, and what is wrong with those that would have come first."""
    return f"Damaged: {'; '.join(refused)}. Instead {name} is taken"


def merged(epochs: Iterable, steps: Sequence[tuple[int, Any]]) -> Iterator:
    """Checkpoints of the ends of epochs and of steps within them, in the order in which they are to be tried.

    After as many steps that of the epoch comes first, as its validation is behind it.

    Args:
        epochs: `ray.train.Checkpoint`s, newest first; taken one by one.
        steps: (steps made in all, `ray.train.Checkpoint`), newest first.
    """
    left = list(steps)
    for epoch in epochs:
        with contextlib.suppress(DamagedCheckpointError):  # it is named when it is tried
            step = read_state_of(epoch).step
            while left and left[0][0] > step:
                yield left.pop(0)[1]
        yield epoch
    yield from (candidate for _, candidate in left)


def newest_first(checkpoints: Iterable) -> list:
    """Checkpoints of one run by the steps that were made before each, each checkpoint once.

    The time in their names, which Ray gives them, is that of the chief's host, whose clock may be wrong, or put back.

    Args:
        checkpoints: with a `path` and a `filesystem`, as `ray.train.Checkpoint`s.
    """

    def step(one) -> int | None:
        try:
            return read_state_of(one).step
        except DamagedCheckpointError:
            return None

    found = {one.path.rstrip("/"): one for one in checkpoints}
    return by_step(found.values(), lambda one: posixpath.basename(one.path.rstrip("/")), step)


def by_step(found: Iterable, name: Callable[[Any], str], step: Callable[[Any], int | None]) -> list:
    """Checkpoints of one run, newest first.

    Args:
        found: whatever stands for them.
        name: name(one) of its folder, by which those of one step are ordered.
        step: step(one), made in all before it; one that tells None stands just before the next older one by name.
    """
    placed, last = [], -1
    for one in sorted(found, key=name):
        known = step(one)
        last = last if known is None else known
        placed.append((last, one))
    placed.reverse()
    placed.sort(key=lambda pair: -pair[0])
    return [one for _, one in placed]
