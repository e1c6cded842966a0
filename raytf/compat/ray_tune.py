"""Private parts of Ray Tune."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ray.train._internal.storage import get_fs_and_path  # file system and path of a storage_path, as Tune reads it
from ray.tune.logger.logger import LoggerCallback
from ray.tune.result_grid import ResultGrid
from ray.tune.trainable.trainable import _DICT_CHECKPOINT_FILE_NAME  # a pickle that Tune would read and run

from raytf.compat.patching import patched
from raytf.compat.versions import uses_private

__all__ = ["DICT_CHECKPOINT", "get_fs_and_path"]

DICT_CHECKPOINT = _DICT_CHECKPOINT_FILE_NAME


@uses_private("ray.tune.impl.tuner_internal:TunerInternal._run_config", "ray.tune.tuner:Tuner._local_tuner")
def restored_run_config(tuner):
    """Returns the RunConfig of a restored Tuner; `Tuner.restore` accepts no other callbacks or stopper."""
    return tuner._local_tuner._run_config


@uses_private("ray.tune.trainable.trainable:Trainable._storage")
def storage_of(trainable):
    """Returns the storage of a trial's files; a Trainable has no public API for it."""
    return trainable._storage


@uses_private("ray.tune.trainable.trainable:Trainable._time_total")
def seconds_of(trainable) -> float:
    """Returns the seconds that a trial has trained, restores included; public only in results."""
    return trainable._time_total


@uses_private("ray.tune.schedulers.hyperband:HyperBandScheduler._hyperbands")
def brackets_of(scheduler) -> list:
    """Returns the open brackets of a HyperBandScheduler; no public API shows them."""
    return [bracket for band in scheduler._hyperbands for bracket in band if bracket is not None]


@uses_private("ray.tune.result_grid:ResultGrid._experiment_analysis")
def in_order_of_trials(grid: ResultGrid) -> ResultGrid:
    """Returns the results in the order in which the trials were made; a restored sweep has another one."""
    analysis = grid._experiment_analysis
    analysis.trials.sort(key=lambda trial: trial.trial_id)
    return ResultGrid(analysis)


@contextlib.contextmanager
@uses_private("ray.tune.logger.logger:LoggerCallback._restore_from_remote")
def rows_of_resumed_trials(read_rows: Callable[[str, str, object], bytes | None]) -> Iterator[None]:
    """Keeps the earlier rows of trials that resume without a checkpoint of Tune, until the context ends.

    Tune begins the files of such a trial again.

    Args:
        read_rows: read_rows(folder of the trial, name of the file, file system) returns the rows so far, or None.
    """

    def restore(self, name, trial):
        local_file = os.path.join(trial.local_path, name)
        if trial.checkpoint or os.path.exists(local_file):  # restarted by this process, which has all rows
            return original(self, name, trial)
        rows = read_rows(trial.storage.trial_fs_path, name, trial.storage.storage_filesystem)
        if rows is not None:
            with open(local_file, "wb") as file:
                file.write(rows)

    with patched(LoggerCallback, "_restore_from_remote", restore) as original:
        yield
