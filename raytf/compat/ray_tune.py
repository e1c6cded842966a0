"""Private parts of Ray Tune."""

from __future__ import annotations

from ray.train._internal.storage import get_fs_and_path  # file system and path of a storage_path, as Tune reads it
from ray.tune.trainable.trainable import _DICT_CHECKPOINT_FILE_NAME  # a pickle that Tune would read and run

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
