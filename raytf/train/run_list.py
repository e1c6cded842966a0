"""Lists the runs of a storage folder with their progress and best epoch. Driver side, without Ray."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from pyarrow.fs import FileSelector, FileSystem, FileType

from raytf import events, logs, validation
from raytf.errors import ConfigError, one_line
from raytf.storage import run_lock, stored_json
from raytf.storage.checkpoint_files import CheckpointState
from raytf.worker.checkpoint_selector import StoredCheckpoint, list_checkpoints

logger = logs.get_logger(__name__)

SWEEP = "sweep.json"
_BUILD = "build.json"
# Maximum number of slashes in the names of runs below a folder.
_DEPTH = 3
_METRICS = ("val_loss", "loss")
_ENDED, _FAILED = "TERMINATED", "ERROR"
_DAMAGED = (stored_json.UnreadableError, KeyError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run, or a sweep, in a folder.

    Args:
        name: Path below the listed folder.
        state: "running", "finished", "stopped" (by a callback), "interrupted", "ended", "empty" or "damaged". It ends
            with ", loss nan" if that is the loss of the last epoch. Of a sweep, it is how many of its trials have
            ended.
        epochs: Number of complete epochs, with "/" and the requested number if it is known.
        best: (metric, value, epoch) or None.
        modified: Time of the last checkpoint, in seconds since 1970, or None.
    """

    name: str
    state: str
    epochs: str
    best: tuple[str, float, int] | None
    modified: float | None

    def cells(self) -> tuple[str, str, str, str, str]:
        """Returns name, state, epochs, best and modified as texts."""
        best = "" if self.best is None else f"{self.best[0]} {self.best[1]:.4g}"
        if self.best is not None and self.best[2]:
            best += f" (epoch {self.best[2]})"
        modified = "" if self.modified is None else f"{datetime.datetime.fromtimestamp(self.modified):%Y-%m-%d %H:%M}"
        return self.name, self.state, self.epochs, best, modified


def located(folder: str | os.PathLike) -> tuple[FileSystem, str]:
    """Returns the file system and path of a folder, a path or URI.

    Raises:
        ConfigError: There is no such folder.
    """
    given = os.fspath(folder)
    try:
        filesystem, path = FileSystem.from_uri(given if "://" in given else os.path.abspath(os.path.expanduser(given)))
        kind = filesystem.get_file_info(path).type
    except (ValueError, OSError) as error:
        raise ConfigError(
            "Runs are in a folder, or a URI that pyarrow knows",
            f"{given!r} ({one_line(error)})",
            "Check the path or URI",
        ) from error
    if kind != FileType.Directory:
        raise ConfigError("Runs are in a folder that exists", repr(given), "Check the path")
    return filesystem, path.rstrip("/")


def listed(folder: str | os.PathLike, metric: str | None = None, mode: str = "min") -> list[ListedRun]:
    """Returns the runs and sweeps below a folder, the last changed one first.

    Args:
        folder: Path or URI, as of `RunConfig(storage_path=...)`, or the folder of a run.
        metric: Metric of the best epoch; by default val_loss, or loss without a validation.
        mode: "min" or "max" of the metric.

    Raises:
        ConfigError: There is no such folder.
    """
    validation.check_word("mode", mode, validation.MODES)
    if metric is not None and (doubt := validation.mode_warning(metric, mode)):
        logger.warning(doubt)
    filesystem, path = located(folder)
    runs = _below(filesystem, path, "", metric, mode, _DEPTH)
    return sorted(runs, key=lambda run: (-(run.modified or 0.0), run.name))


def _below(filesystem, path: str, name: str, metric: str | None, mode: str, depth: int) -> list[ListedRun]:
    infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    names = {info.base_name for info in infos}
    if SWEEP in names:
        return [_sweep(filesystem, path, name or posixpath.basename(path), metric, mode)]
    checkpoints = list_checkpoints(filesystem, path)
    if checkpoints or has_begun(filesystem, path):
        return [_run(filesystem, path, name or posixpath.basename(path), checkpoints, metric, mode)]
    folders = [info for info in infos if info.type == FileType.Directory] if depth else []
    inner = [(info.path, posixpath.join(name, info.base_name)) for info in folders]
    return [run for location, named in inner for run in _below(filesystem, location, named, metric, mode, depth - 1)]


def has_begun(filesystem, path: str) -> bool:
    """Returns whether a run is in a folder, with or without a checkpoint: it has a lock or events."""
    infos = filesystem.get_file_info([posixpath.join(path, run_lock.LOCK), posixpath.join(path, events.FOLDER)])
    return any(info.type != FileType.NotFound for info in infos)


def _run(
    filesystem, path: str, name: str, checkpoints: list[StoredCheckpoint], metric: str | None, mode: str
) -> ListedRun:
    last = _newest(checkpoints)
    holder = run_lock.describe_holder(filesystem, path)
    if last is None:
        return ListedRun(name=name, state="running" if holder else "empty", epochs="0", best=None, modified=None)
    state, checkpoint = last
    wanted = _epochs(checkpoint)
    finished = wanted is not None and state.epoch >= wanted
    ended = "stopped" if state.stopped else "finished" if finished else "interrupted" if wanted else "ended"
    return ListedRun(
        name=name,
        state=("running" if holder else ended) + _not_finite(state.history),
        epochs=f"{state.epoch}" + (f"/{wanted}" if wanted else ""),
        best=best_of(state.history, metric, mode),
        modified=_modified(filesystem, checkpoint.path),
    )


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns ", " with the first loss of the last epoch that is NaN or infinite, or "" without one."""
    last = rows[-1] if rows else {}
    losses = (name for name in ("loss", "val_loss") if name in last and not _is_finite(last[name]))
    return next((f", {name} {last[name]}" for name in losses), "")


def best_of(
    rows: Sequence[Mapping[str, Any]], metric: str | None = None, mode: str = "min"
) -> tuple[str, float, int] | None:
    """Returns (metric, value, epoch) of the best epoch, or None if no epoch has the metric.

    Args:
        rows: Metrics of each epoch, with its number as "epoch".
        metric: Name of the metric; by default val_loss, or loss if no epoch has that.
        mode: "min" or "max" of the metric.
    """
    name = metric or next((candidate for candidate in _METRICS if any(candidate in row for row in rows)), None)
    rows = [row for row in rows if _is_finite(row.get("epoch")) and _is_finite(row.get(name))]  # a loop's may lack it
    values = [(row[name], int(row["epoch"])) for row in rows]
    if not values:
        return None
    value, epoch = (min if mode == "min" else max)(values, key=lambda pair: pair[0])  # of equal ones the first
    return name, value, epoch


def newest(filesystem, path: str) -> CheckpointState | None:
    """Returns the state of a folder's last checkpoint, whether it is whole or not, or None without one."""
    last = _newest(list_checkpoints(filesystem, path))
    return None if last is None else last[0]


def _newest(checkpoints: Sequence[StoredCheckpoint]) -> tuple[CheckpointState, StoredCheckpoint] | None:
    """Returns the checkpoint with the most steps, from the newest readable one of each kind; None without one."""
    heads = []
    for mid_epoch in (False, True):
        of_kind = (
            (state, saved)
            for saved in checkpoints
            if saved.is_within_epoch == mid_epoch and (state := saved.state()) is not None
        )
        heads += [head] if (head := next(of_kind, None)) is not None else []
    return max(heads, key=lambda pair: pair[0].step, default=None)


def trials_ended(folder: str | os.PathLike) -> int | None:
    """Returns the number of trials of a sweep if all that have begun have ended well, else None."""
    filesystem, path = located(folder)
    try:
        _, trials = _trials(filesystem, path)
    except _DAMAGED:
        return None
    return len(trials) if all(trial.get("status") == _ENDED for trial in trials) else None


def _trials(filesystem, path: str) -> tuple[str | None, list[Mapping[str, Any]]]:
    """Returns (the file of the last state that Tune wrote, or None; the trials in it).

    Raises:
        UnreadableError, KeyError, TypeError, ValueError: The file is damaged.
    """
    files = filesystem.get_file_info(FileSelector(path))
    states = sorted(
        f.path for f in files if f.base_name.startswith("experiment_state-") and f.base_name.endswith(".json")
    )
    if not states:
        return None, []
    stored = stored_json.read_object(filesystem, states[-1])["trial_data"]
    return states[-1], [stored_json.parse_object(text) for text, _ in stored]


def _sweep(filesystem, path: str, name: str, metric: str | None, mode: str) -> ListedRun:
    """Returns a sweep, from the last state of its trials that Tune wrote."""
    settings: Mapping[str, Any] = {}
    try:
        settings = stored_json.read_object(filesystem, f"{path}/{SWEEP}")
        state_file, trials = _trials(filesystem, path)
    except _DAMAGED:
        return ListedRun(name=name, state="damaged", epochs="", best=None, modified=None)
    ended = sum(trial.get("status") == _ENDED for trial in trials)
    failed = sum(trial.get("status") == _FAILED for trial in trials)
    state = f"sweep, {ended} of {len(trials)} trials ended" + (f", {failed} failed" if failed else "")
    if run_lock.describe_holder(filesystem, path):
        state = f"running {state}"
    modified = None if state_file is None else _modified(filesystem, state_file)
    if metric is None:
        metric, mode = settings.get("metric", "loss"), settings.get("mode", "min")
    best = _best_trial(filesystem, path, trials, metric, mode)
    return ListedRun(name=name, state=state, epochs="", best=best, modified=modified)


def _best_trial(filesystem, path: str, trials, name: str, mode: str):
    """Returns (metric, value, 0) of the trial with the best last report, or None."""
    values = []
    for trial in trials:
        folder = posixpath.join(path, posixpath.basename(trial.get("relative_logdir") or "-"))
        try:
            lines = stored_json.read_bytes(filesystem, f"{folder}/result.json").splitlines()
            last = stored_json.parse_object(lines[-1]) if lines else {}
        except stored_json.UnreadableError:
            continue
        if _is_finite(last.get(name)):
            values.append(last[name])
    return (name, (min if mode == "min" else max)(values), 0) if values else None


def _epochs(checkpoint: StoredCheckpoint) -> int | None:
    """Returns the requested number of epochs if the config that is saved with the model has it, otherwise None."""
    try:
        build = stored_json.read_object(checkpoint.filesystem, f"{checkpoint.path}/{_BUILD}")
    except stored_json.UnreadableError:
        return None
    config = build.get("config")
    epochs = config.get("epochs") if isinstance(config, dict) else None
    return epochs if type(epochs) is int and epochs > 0 else None


def _modified(filesystem, path: str) -> float | None:
    names = [f"{path}/manifest.json", f"{path}/state.json", path]
    times = [info.mtime_ns for info in filesystem.get_file_info(names) if info.mtime_ns]
    return times[0] / 1e9 if times else None


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
