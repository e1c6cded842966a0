"""Which of a run's checkpoints a model is loaded from: the last, the best, that of a step. Needs no Ray or TensorFlow.

A run's folder holds Ray's `checkpoint_<time>`, written at the ends of epochs, and maybe `step_<steps made in all>`,
written within them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import posixpath
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pyarrow.fs import FileSelector, FileType

from raytf import validation
from raytf.errors import ConfigError
from raytf.storage import checkpoint_files, step_folders
from raytf.storage.checkpoint_files import AT_ENDS, MODEL, CheckpointState, DamagedCheckpointError, read_state_of

# What "best" goes by, unless it is told: the first that a run has.
_METRICS = ("val_loss", "loss")
# In the logs of each epoch, and no measure of a model.
_NO_METRICS = {"epoch", "learning_rate"}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A checkpoint that a run has kept.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        path: of its folder there.
        metrics: that Ray lists with it.
    """

    filesystem: Any
    path: str
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return posixpath.basename(self.path.rstrip("/"))

    @property
    def within_epoch(self) -> bool:
        return step_folders.step_of(self.name) is not None

    def state(self) -> CheckpointState | None:
        """What its `state.json` says; None where it has none that can be read."""
        try:
            return read_state_of(self)
        except DamagedCheckpointError:
            return None

    def values(self) -> dict[str, Any]:
        """Metrics of the epoch at whose end it was written."""
        state = self.state()
        return {**(state.history[-1] if state and state.history else {}), **self.metrics}


def kept_in(filesystem, run: str, others: bool = True) -> list[Kept]:
    """The checkpoints that lie in a run's folder, newest first; those of ends of epochs before those within.

    One within an epoch that has no manifest was not finished, and is passed over.

    Args:
        filesystem: a `pyarrow.fs.FileSystem`.
        run: path of the folder there; it may be missing.
        others: also those of ends of epochs.
    """
    within = [Kept(filesystem, posixpath.join(run, name)) for _, name in step_folders.listed(filesystem, run)]
    if not others:
        return within
    found = filesystem.get_file_info(FileSelector(run, allow_not_found=True))
    folders = [Kept(filesystem, info.path) for info in found if info.type == FileType.Directory]
    ends = [kept for kept in folders if not kept.within_epoch]
    ends = [kept for kept in ends if kept.name.startswith(AT_ENDS) or _holds(kept, MODEL)]
    return checkpoint_files.newest_first(ends) + within


def _holds(kept: Kept, part: str) -> bool:
    return kept.filesystem.get_file_info(posixpath.join(kept.path, part)).type == FileType.File


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Which of a run's checkpoints is to be loaded; arguments of `raytf.load_model`, see there.

    Raises:
        ConfigError: a value that it cannot have, or values that do not go together.
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
        if self.metric is not None and (doubt := validation.doubt_of_mode(self.metric, self.mode)):
            warnings.warn(doubt, stacklevel=5)

    @property
    def of_a_run(self) -> bool:
        """Whether it says more than a source with a single checkpoint can answer."""
        return self.which != "last" or self.average > 1

    def ordered(self, kept: Sequence[Kept], run: str) -> list[Kept]:
        """The checkpoints to load from: the first that is whole, or so many as the mean is of.

        Args:
            kept: at least one, as `kept_in` orders them.
            run: its path, for errors.

        Raises:
            ConfigError: there is no such checkpoint, or there are not as many.
        """
        if self.which == "best":
            return self._best(kept, run)
        if self.which != "last":
            return self._of_step(kept, run)
        if self.average == 1 and not any(one.within_epoch for one in kept):
            return list(kept)
        placed = _by_step(kept)
        if self.average == 1:
            return [one for _, one in placed]
        # the end of an epoch may have been written as a step, too
        single = {one.path if state is None else state.step: one for state, one in reversed(placed)}
        if len(single) < self.average:
            raise ConfigError(
                "A mean is that of checkpoints that a run has kept",
                f"average={self.average} with {len(single)} in {run!r}",
                "Take fewer, or keep more of them: CheckpointConfig(num_to_keep=...)",
            )
        return list(reversed(single.values()))

    def _of_step(self, kept: Sequence[Kept], run: str) -> list[Kept]:
        states = [(one, one.state()) for one in kept]
        found = [one for one, state in states if state is not None and state.step == self.which]
        if not found:
            steps = sorted({state.step for _, state in states if state is not None})
            raise ConfigError(
                "which names the step of a checkpoint that the run has kept",
                f"which={self.which} for {run!r}",
                f"Choose one of {', '.join(map(str, steps))}" if steps else 'Its checkpoints name none: use "last"',
            )
        return found

    def _best(self, kept: Sequence[Kept], run: str) -> list[Kept]:
        values = [(one, one.values()) for one in kept if not one.within_epoch]
        known = sorted(
            {name for _, found in values for name, value in found.items() if _is_number(value)} - _NO_METRICS
        )
        metric = self.metric or next((name for name in _METRICS if name in known), None)
        if metric not in known:
            raise ConfigError(
                'which="best" goes by a metric of the run\'s epochs',
                f"metric={self.metric!r} for {run!r}",
                f"Choose one of {', '.join(known)}" if known else 'Its checkpoints bear none: use "last" or a step',
            )
        sign = 1 if self.mode == "min" else -1
        scored = [(sign * found[metric], one) for one, found in values if _is_number(found.get(metric))]
        return [one for _, one in sorted(scored, key=lambda pair: pair[0])]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def _by_step(kept: Sequence[Kept]) -> list[tuple[CheckpointState | None, Kept]]:
    """(state, checkpoint), newest first; one that does not tell its step stands just before the next older one.

    Args:
        kept: as `kept_in` orders them.
    """
    placed: list[tuple[int, CheckpointState | None, Kept]] = []
    for _, group in itertools.groupby(kept, lambda one: one.within_epoch):
        step, found = -1, []
        for one in reversed(list(group)):
            state = one.state()
            step = step if state is None else state.step
            found.append((step, state, one))
        placed += reversed(found)
    return [(state, one) for _, state, one in sorted(placed, key=lambda place: -place[0])]
