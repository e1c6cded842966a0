"""Selects the checkpoints of a run to load a model from: last, best, or of a step. Needs no Ray or TensorFlow.

A run's folder contains Ray's `checkpoint_<time>` from ends of epochs, and maybe `step_<steps>` from within epochs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from pyarrow.fs import FileSelector, FileType

from raytf import validation
from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.storage import checkpoint_files, step_folders
from raytf.storage.checkpoint_files import AT_ENDS, MODEL, CheckpointState, DamagedCheckpointError, read_state_of

# Default metrics for "best"; the first one that a run has is used.
_METRICS = ("val_loss", "loss")
# In the logs of each epoch, but no measure of a model.
_NO_METRICS = {"epoch", "learning_rate"}


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in a run's folder.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        path: Path of the checkpoint's folder in the file system.
        metrics: Metrics that Ray lists with the checkpoint.
    """

    filesystem: Any
    path: str
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path.rstrip("/"))

    @property
    def is_within_epoch(self) -> bool:
        return step_folders.step_of_folder(self.name) is not None

    def state(self) -> CheckpointState | None:
        """Returns the content of `state.json`, or None if it is missing or damaged."""
        try:
            return read_state_of(self)
        except DamagedCheckpointError:
            return None

    def values(self) -> dict[str, Any]:
        """Returns the metrics of the epoch at whose end the checkpoint was written."""
        state = self.state()
        return {**(state.history[-1] if state and state.history else {}), **self.metrics}


def list_checkpoints(filesystem, run: str, others: bool = True) -> list[StoredCheckpoint]:
    """Lists the checkpoints in a run's folder, newest first; those of ends of epochs before those within epochs.

    Skips incomplete checkpoints within an epoch: those without a manifest.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        run: Path of the run's folder, which may be missing.
        others: Whether to list those of ends of epochs, too.
    """
    mid_epoch = [
        StoredCheckpoint(filesystem, posixpath.join(run, name))
        for _, name in step_folders.finished_folders(filesystem, run)
    ]
    if not others:
        return mid_epoch
    entries = filesystem.get_file_info(FileSelector(run, allow_not_found=True))
    folders = [StoredCheckpoint(filesystem, info.path) for info in entries if info.type == FileType.Directory]
    ends = [checkpoint for checkpoint in folders if not checkpoint.is_within_epoch]
    ends = [checkpoint for checkpoint in ends if checkpoint.name.startswith(AT_ENDS) or _has_part(checkpoint, MODEL)]
    return checkpoint_files.newest_first(ends) + mid_epoch


def _has_part(checkpoint: StoredCheckpoint, part: str) -> bool:
    return checkpoint.filesystem.get_file_info(posixpath.join(checkpoint.path, part)).type == FileType.File


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSelector:
    """Selection of a run's checkpoints, with arguments of `raytf.load_model`.

    Raises:
        ConfigError: A value is invalid, or values contradict each other.
    """

    which: str | int = "last"
    average: int = 1
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self):
        step = isinstance(self.which, numbers.Integral) and not isinstance(self.which, bool) and self.which >= 0
        if not step and self.which not in ("last", "best"):
            raise ConfigError(
                'which must be "last", "best" or the step of a checkpoint', repr(self.which), "Choose one of these"
            )
        validation.check_whole("average", self.average, 1)
        validation.check_word("mode", self.mode, validation.MODES)
        validation.check_kind("metric", self.metric, str, "the name of a metric", 'For example "val_loss"')
        if self.average > 1 and self.which != "last":
            raise ConfigError(
                "A mean is that of a run's last checkpoints",
                f"average={self.average} with which={self.which!r}",
                "Leave one of them out",
            )
        if self.which != "best" and (self.metric, self.mode) != (None, "min"):
            raise ConfigError(
                "metric and mode say which checkpoint is the best",
                f"metric={self.metric!r}, mode={self.mode!r} with which={self.which!r}",
                'Use which="best", or leave them out',
            )
        if self.metric is not None and (doubt := validation.mode_warning(self.metric, self.mode)):
            warn_user(doubt)

    @property
    def needs_run(self) -> bool:
        """Returns whether the choice needs a run, and not only a single checkpoint."""
        return self.which != "last" or self.average > 1

    def ordered(self, checkpoints: Sequence[StoredCheckpoint], run: str) -> list[StoredCheckpoint]:
        """Returns the checkpoints to load from: candidates for the first one that is whole, or `average` of them.

        Args:
            checkpoints: At least one checkpoint, ordered as by `list_checkpoints`.
            run: Path of the run, for errors.

        Raises:
            ConfigError: There is no such checkpoint, or there are fewer than `average`.
        """
        if self.which == "best":
            return self._best(checkpoints, run)
        if self.which != "last":
            return self._of_step(checkpoints, run)
        if self.average == 1 and not any(checkpoint.is_within_epoch for checkpoint in checkpoints):
            return list(checkpoints)
        dated = _by_step(checkpoints)
        if self.average == 1:
            return [checkpoint for _, checkpoint in dated]
        # an epoch's end may also be stored as a step
        single = {checkpoint.path if state is None else state.step: checkpoint for state, checkpoint in reversed(dated)}
        if len(single) < self.average:
            raise ConfigError(
                "A mean is that of checkpoints that a run has kept",
                f"average={self.average} with {len(single)} in {run!r}",
                "Take fewer, or keep more of them: CheckpointConfig(num_to_keep=...)",
            )
        return list(reversed(single.values()))

    def _of_step(self, checkpoints: Sequence[StoredCheckpoint], run: str) -> list[StoredCheckpoint]:
        states = [(checkpoint, checkpoint.state()) for checkpoint in checkpoints]
        matching = [checkpoint for checkpoint, state in states if state is not None and state.step == self.which]
        if not matching:
            steps = sorted({state.step for _, state in states if state is not None})
            raise ConfigError(
                "which names the step of a checkpoint that the run has kept",
                f"which={self.which} for {run!r}",
                f"Choose one of {', '.join(map(str, steps))}" if steps else 'Its checkpoints name none: use "last"',
            )
        return matching

    def _best(self, checkpoints: Sequence[StoredCheckpoint], run: str) -> list[StoredCheckpoint]:
        values = [(checkpoint, checkpoint.values()) for checkpoint in checkpoints if not checkpoint.is_within_epoch]
        known = sorted(
            {name for _, metrics in values for name, value in metrics.items() if _is_number(value)} - _NO_METRICS
        )
        metric = self.metric or next((name for name in _METRICS if name in known), None)
        if metric not in known:
            raise ConfigError(
                'which="best" goes by a metric of the run\'s epochs',
                f"metric={self.metric!r} for {run!r}",
                f"Choose one of {', '.join(known)}"
                if known
                else 'Its checkpoints have no metric that is a number and not NaN: use "last" or a step',
            )
        sign = 1 if self.mode == "min" else -1
        scored = [
            (sign * metrics[metric], checkpoint) for checkpoint, metrics in values if _is_number(metrics.get(metric))
        ]
        return [checkpoint for _, checkpoint in sorted(scored, key=lambda pair: pair[0])]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _by_step(checkpoints: Sequence[StoredCheckpoint]) -> list[tuple[CheckpointState | None, StoredCheckpoint]]:
    """Returns (state, checkpoint) pairs, newest first; one without a state has the step of the next older one.

    Args:
        checkpoints: Checkpoints, ordered as by `list_checkpoints`.
    """
    dated: list[tuple[int, CheckpointState | None, StoredCheckpoint]] = []
    for _, group in itertools.groupby(checkpoints, lambda checkpoint: checkpoint.is_within_epoch):
        step, newest_last = -1, []
        for checkpoint in reversed(list(group)):
            state = checkpoint.state()
            step = step if state is None else state.step
            newest_last.append((step, state, checkpoint))
        dated += reversed(newest_last)
    return [(state, checkpoint) for _, state, checkpoint in sorted(dated, key=lambda entry: -entry[0])]
