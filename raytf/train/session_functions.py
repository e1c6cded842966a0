"""Implements Ray Train's functions in a sweep's trial, where no Ray Train runs: `ray.train.report`, `get_context` etc.

Unsupported calls raise an error; nothing is dropped. On a worker.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow.fs
import ray
import ray.train
from ray.train import CheckpointUploadMode, DataConfig

from raytf.compat import ray_core
from raytf.compat.ray_train import LocalTrainContext, PreemptionInfo, StorageContext, TrainFnUtils
from raytf.errors import ConfigError
from raytf.storage import folder_contents
from raytf.worker.session import ReportedFiles
from raytf.worker.trial_session import TrialSession

# Seconds between two checks for drained nodes.
_CHECK_INTERVAL = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """Data for a trial's workers in addition to their loop.

    Args:
        nodes: Node id of each worker, by rank.
        filesystem, folder: File system and folder of the trial, in the sweep's storage.
        datasets: `ray.data.Dataset` by name, for `ray.train.get_dataset_shard`.
        dataset_config: How datasets are split.
    """

    nodes: tuple[str, ...]
    filesystem: pyarrow.fs.FileSystem | None = None
    folder: str = ""
    datasets: dict[str, Any] = dataclasses.field(default_factory=dict)
    dataset_config: DataConfig = dataclasses.field(default_factory=DataConfig)


def ranks_of_worker(rank: int, nodes: Sequence[str]) -> dict[str, int]:
    """Returns a worker's ranks as Ray Train counts them: among all workers, on its node, and of its node.

    Args:
        rank: Rank of the worker.
        nodes: Node id of each worker, by rank.
    """
    local = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
    return {
        "world_rank": rank,
        "world_size": len(nodes),
        "local_rank": local.index(rank),
        "local_world_size": len(local),
        "node_rank": list(dict.fromkeys(nodes)).index(nodes[rank]),
    }


class TrialContext(LocalTrainContext):
    """Context of a worker of a trial, or of a run with `storage`, for `ray.train.get_context()`."""

    def __init__(self, name: str, rank: int, trial_setup: TrialSetup, storage: StorageContext | None = None):
        super().__init__(experiment_name=name, **ranks_of_worker(rank, trial_setup.nodes))
        self._trial_setup, self._storage = trial_setup, storage

    def get_storage(self) -> StorageContext:
        """Returns the run's storage; in a sweep the trial's own folder is the `experiment_fs_path`."""
        if self._storage is not None:
            return self._storage
        parent, name = posixpath.split(self._trial_setup.folder)
        return StorageContext(parent, name, storage_filesystem=self._trial_setup.filesystem)


class TrialTrainFnUtils(TrainFnUtils):
    """Ray Train's functions for a train loop in a trial.

    Args:
        session: Session of the trial.
        trial_setup: `TrialSetup` of the trial.
        broadcast: Returns the value of rank 0 on every worker.
        folder: Folder in which a reported checkpoint is stored until the next one.
    """

    def __init__(self, session: TrialSession, trial_setup: TrialSetup, broadcast: Callable[[Any], Any], folder: str):
        self._session, self._trial_setup, self._broadcast, self._folder = session, trial_setup, broadcast, folder
        self._context = TrialContext(session.name, session.rank, trial_setup)
        self._shards: dict[str, Any] = {}
        self._last_check, self._drained = -_CHECK_INTERVAL, None

    def report(
        self,
        metrics,
        checkpoint=None,
        checkpoint_dir_name=None,
        checkpoint_upload_mode=CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload=None,
        checkpoint_upload_fn=None,
        validation=False,
    ):
        """Reports metrics; copies a checkpoint at once, which is stored when Tune requests it.

        Raises:
            ConfigError: An argument sets how Ray Train stores or validates checkpoints.
        """
        _check_report(checkpoint_dir_name, checkpoint_upload_mode, checkpoint_upload_fn, validation)
        files = None
        if checkpoint is not None:
            reported_folder = os.path.join(self._folder, "reported")
            shutil.rmtree(reported_folder, ignore_errors=True)
            folder_contents.copy(checkpoint, reported_folder)
            if delete_local_checkpoint_after_upload:
                checkpoint.filesystem.delete_dir(checkpoint.path)
            files = ReportedFiles(reported_folder)
        self._session.report(metrics, files)

    def get_checkpoint(self):
        folder = self._session.folder  # the loop's own files
        return None if folder is None else ray.train.Checkpoint.from_directory(folder)

    def get_all_reported_checkpoints(self, *args, **kwargs):
        raise _refused(
            "ray.train.get_all_reported_checkpoints()",
            "Use ray.train.get_checkpoint() for the one to resume from, and Result.best_checkpoints after the sweep",
        )

    def get_dataset_shard(self, dataset_info):
        name, trial_setup = dataset_info.dataset_name, self._trial_setup
        if name not in trial_setup.datasets:
            known = ", ".join(map(repr, trial_setup.datasets)) or "none"
            raise KeyError(f"A dataset must be one that the trainer was given ({known}); received: {name!r}")
        if name not in self._shards:
            shards = None
            if self._session.rank == 0:
                given = {name: trial_setup.datasets[name]}
                parts = trial_setup.dataset_config.configure(given, self._session.size, None, list(trial_setup.nodes))
                shards = [part[name] for part in parts]
            self._shards[name] = self._broadcast(shards)[self._session.rank]
        return self._shards[name]

    def get_context(self):
        return self._context

    def get_preemption_info(self) -> PreemptionInfo | None:
        """Returns which of the trial's nodes are drained; all workers must call it, as under Ray Train."""
        info = None
        if self._session.rank == 0:
            if time.monotonic() - self._last_check >= _CHECK_INTERVAL:
                self._drained = preemption(self._trial_setup.nodes, ray_core.draining())
                self._last_check = time.monotonic()
            info = self._drained
        return self._broadcast(info)

    def is_distributed(self):
        return self._session.size > 1

    def barrier(self):
        self._broadcast(None)

    def broadcast_from_rank_zero(self, data):
        return self._broadcast(data)


def preemption(nodes: Sequence[str], draining: dict[str, int]) -> PreemptionInfo | None:
    """Returns Ray Train's PreemptionInfo for workers on these nodes, or None if none of them is drained; pure.

    Args:
        nodes: Node id of each worker, by rank.
        draining: Deadline of each drained node of the cluster, in milliseconds of UNIX time; 0 if it is unknown.
    """
    ranks = {node: [r for r, item in enumerate(nodes) if item == node] for node in dict.fromkeys(nodes)}
    drained = {node: item for node, item in ranks.items() if node in draining}
    if not drained:
        return None
    return PreemptionInfo(min((draining[node] for node in drained if draining[node]), default=None), drained)


def _check_report(dir_name, mode, upload, validation) -> None:
    if dir_name is not None:
        raise _refused(f"report(checkpoint_dir_name={dir_name!r})", "Leave it out: Tune names a trial's checkpoints")
    if mode is CheckpointUploadMode.NO_UPLOAD:
        raise _refused(
            "report(checkpoint_upload_mode=NO_UPLOAD)",
            "Report a folder with the files, or with the address of where they are",
        )
    if upload is not None:
        raise _refused(
            "report(checkpoint_upload_fn=...)",
            "Leave it out, and name the storage in RunConfig(storage_path=..., storage_filesystem=...)",
        )
    if validation:
        raise _refused("report(validation=...)", "Validate in the train loop, and report what it gives as metrics")


def _refused(received: str, fix: str) -> ConfigError:
    return ConfigError("Ray Tune keeps the checkpoints of a sweep's trials, not Ray Train", received, fix)
