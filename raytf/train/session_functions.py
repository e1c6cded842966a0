"""Ray Train's functions inside a sweep's trial, where no Ray Train runs: `ray.train.report`, `get_context` and others.

What a trial cannot do is refused with a sentence; nothing is dropped. On a worker.
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
from raytf.worker.session import TrialSession

# Between two looks at which nodes are drained.
_LOOK_INTERVAL = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a trial's workers are told beside their loop.

    Args:
        nodes: id of the node of each worker, by rank.
        filesystem, folder: of the trial, on the sweep's storage.
        datasets: `ray.data.Dataset` by name, for `ray.train.get_dataset_shard`.
        dataset_config: how they are cut.
    """

    nodes: tuple[str, ...]
    filesystem: pyarrow.fs.FileSystem | None = None
    folder: str = ""
    datasets: dict[str, Any] = dataclasses.field(default_factory=dict)
    dataset_config: DataConfig = dataclasses.field(default_factory=DataConfig)


def place_of(rank: int, nodes: Sequence[str]) -> dict[str, int]:
    """Where a worker stands among all, as Ray Train counts: on its node, and its node among the nodes.

    Args:
        rank: of the worker.
        nodes: id of the node of each worker, by rank.
    """
    mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return {
        "world_rank": rank,
        "world_size": len(nodes),
        "local_rank": mine.index(rank),
        "local_world_size": len(mine),
        "node_rank": list(dict.fromkeys(nodes)).index(nodes[rank]),
    }


class TrialContext(LocalTrainContext):
    """`ray.train.get_context()` of a worker of a trial."""

    def __init__(self, name: str, rank: int, around: Surroundings):
        super().__init__(experiment_name=name, **place_of(rank, around.nodes))
        self._around = around

    def get_storage(self) -> StorageContext:
        """The trial's own folder in the sweep's storage, as `experiment_fs_path`."""
        where, name = posixpath.split(self._around.folder)
        return StorageContext(where, name, storage_filesystem=self._around.filesystem)


class TrialTrainFnUtils(TrainFnUtils):
    """Ray Train's functions for a train loop in a trial.

    Args:
        session: of the trial.
        around: see `Surroundings`.
        broadcast: gives every worker what rank 0 passes.
        folder: where checkpoints that the loop reports are kept until the next.
    """

    def __init__(self, session: TrialSession, around: Surroundings, broadcast: Callable[[Any], Any], folder: str):
        self._session, self._around, self._broadcast, self._folder = session, around, broadcast, folder
        self._context = TrialContext(session.name, session.rank, around)
        self._shards: dict[str, Any] = {}
        self._looked, self._drained = -_LOOK_INTERVAL, None

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
        """Reports; a checkpoint is copied at once, and stored when Tune asks for it.

        Raises:
            ConfigError: an argument that says how Ray Train should store or validate checkpoints.
        """
        _check_report(checkpoint_dir_name, checkpoint_upload_mode, checkpoint_upload_fn, validation)
        write = None
        if checkpoint is not None:
            kept = os.path.join(self._folder, "reported")
            shutil.rmtree(kept, ignore_errors=True)
            checkpoint.to_directory(kept)
            if delete_local_checkpoint_after_upload:
                checkpoint.filesystem.delete_dir(checkpoint.path)

            def write(folder):
                shutil.copytree(kept, folder, dirs_exist_ok=True)

        self._session.report(metrics, write, everyone=True)

    def get_checkpoint(self):
        folder = self._session.folder  # the loop's own files
        return None if folder is None else ray.train.Checkpoint.from_directory(folder)

    def get_all_reported_checkpoints(self, *args, **kwargs):
        raise _refused(
            "ray.train.get_all_reported_checkpoints()",
            "Use ray.train.get_checkpoint() for the one to resume from, and Result.best_checkpoints after the sweep",
        )

    def get_dataset_shard(self, dataset_info):
        name, around = dataset_info.dataset_name, self._around
        if name not in around.datasets:
            known = ", ".join(map(repr, around.datasets)) or "none"
            raise KeyError(f"A dataset must be one that the trainer was given ({known}); received: {name!r}")
        if name not in self._shards:
            shards = None
            if self._session.rank == 0:
                given = {name: around.datasets[name]}
                parts = around.dataset_config.configure(given, self._session.size, None, list(around.nodes))
                shards = [part[name] for part in parts]
            self._shards[name] = self._broadcast(shards)[self._session.rank]
        return self._shards[name]

    def get_context(self):
        return self._context

    def get_preemption_info(self) -> PreemptionInfo | None:
        """Which of the trial's nodes are drained; all workers must ask, as under Ray Train."""
        found = None
        if self._session.rank == 0:
            if time.monotonic() - self._looked >= _LOOK_INTERVAL:
                self._drained = preemption(self._around.nodes, ray_core.draining())
                self._looked = time.monotonic()
            found = self._drained
        return self._broadcast(found)

    def is_distributed(self):
        return self._session.size > 1

    def barrier(self):
        self._broadcast(None)

    def broadcast_from_rank_zero(self, data):
        return self._broadcast(data)


def preemption(nodes: Sequence[str], draining: dict[str, int]) -> PreemptionInfo | None:
    """What Ray Train would tell workers on these nodes, or None where none of them is drained; pure.

    Args:
        nodes: id of the node of each worker, by rank.
        draining: when each drained node of the cluster goes, in milliseconds of UNIX time; 0 where that is not known.
    """
    ranks = {node: [r for r, its in enumerate(nodes) if its == node] for node in dict.fromkeys(nodes)}
    mine = {node: its for node, its in ranks.items() if node in draining}
    if not mine:
        return None
    return PreemptionInfo(min((draining[node] for node in mine if draining[node]), default=None), mine)


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
