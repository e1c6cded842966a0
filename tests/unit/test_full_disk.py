"""What a run writes besides its checkpoints, and continues without: Ray's list of them, events for TensorBoard."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import types

import keras
import numpy as np
import pyarrow.fs
import pytest
import tensorflow as tf
from ray.train import Checkpoint, CheckpointConfig

from raytf.compat import ray_train
from raytf.worker.callbacks import Events, continue_logs, tensorboard
from tests.logged import warnings_logged


def test_a_list_of_checkpoints_that_cannot_be_written_is_tried_again(tmp_path):
    manager = ray_train.CheckpointManager(CheckpointConfig(), ray_train.StorageContext(tmp_path, "run"))
    again = ray_train.tolerate_full_storage(manager)
    file = tmp_path / "run" / ray_train.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    file.mkdir(parents=True)
    with warnings_logged(f"{file.name}, .* could not be written") as seen:
        for write in (manager._save_state_and_delete_old_checkpoints, again):
            write()
    assert len(seen) == 1
    file.rmdir()
    again()
    written = file.stat().st_mtime_ns
    again()
    assert file.stat().st_mtime_ns == written


def test_metrics_of_numpy_are_listed_as_python_has_them(tmp_path):
    """A user's own loop reports them; pydantic knows none of them."""
    manager = ray_train.CheckpointManager(CheckpointConfig(), ray_train.StorageContext(tmp_path, "run"))
    ray_train.take_numpy(manager)
    (tmp_path / "run" / "one").mkdir(parents=True)
    metrics = {"loss": np.float32(0.5), "steps": np.int64(3), "each": np.ones(2), "name": "a"}
    checkpoint = Checkpoint(str(tmp_path / "run" / "one"), manager._storage_context.storage_filesystem)
    report = types.SimpleNamespace(checkpoint=checkpoint, metrics=metrics, validation=False)

    async def register():  # it needs a running event loop
        manager.register_checkpoint(report)

    asyncio.run(register())
    listed = (tmp_path / "run" / ray_train.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).read_text()
    (found,) = json.loads(listed)["checkpoint_results"]
    assert found["metrics"] == {"loss": 0.5, "steps": 3, "each": [1.0, 1.0], "name": "a"}


def test_events_that_cannot_be_written_end_without_the_training(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (tmp_path / "tensorboard").touch()
    with warnings_logged("Events for TensorBoard end here") as seen:
        events = Events(str(tmp_path / "tensorboard"), write_graph=False)
        data = np.ones((4, 2)), np.ones((4, 1))
        model.fit(*data, epochs=2, verbose=0, validation_data=data, callbacks=[events])
    assert len(seen) == 1
    events = Events(str(tmp_path / "here"), write_graph=False)
    model.fit(*data, epochs=2, verbose=0, validation_data=data, callbacks=[events])
    assert {path.parent.name for path in (tmp_path / "here").rglob("events*")} == {"train", "validation"}


def test_what_writes_events_is_imported_by_the_chief_before_the_first_step(tmp_path, monkeypatch):
    """It was imported in the chief's first hook, where all others waited for it: 9 s on a slow disk."""
    storage = types.SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(), experiment_fs_path=os.fspath(tmp_path)
    )
    for rank in (1, 0):
        monkeypatch.delitem(sys.modules, "tensorboard.summary.v2", raising=False)
        (events,) = tensorboard(storage, [], rank)
        assert ("tensorboard.summary.v2" in sys.modules) == (rank == 0)
        assert tensorboard(storage, [events], rank) == []
    assert tensorboard(None, [], 0) == []


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_of_a_csv_file_are_dropped_where_nothing_can_be_written(end, tmp_path):
    """A full disk may be why the run begins again: it must not take the rows of the epochs before."""
    rows = ["epoch,loss", "0,0.9", "1,0.8", "2,0.7", "epoch,loss", "0,0.5", "1,0.25", "2,0.125", "10,0.1"]
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    for epoch, kept in ((11, rows), (1, rows[:6]), (0, rows[:5])):
        (tmp_path / "log.csv").write_bytes(end.join([*rows, ""]).encode())
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            continue_logs([log], epoch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / "log.csv").read_bytes() == end.join([*kept, ""]).encode() and log.append


@pytest.mark.slow
def test_events_are_those_of_keras(tmp_path):
    """Which prepares events of batches, too, and drops them."""
    found = []
    for kind in (keras.callbacks.TensorBoard, Events):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        data = np.ones((4, 2)), np.ones((4, 1))
        folder = tmp_path / kind.__module__
        callbacks = [kind(str(folder), write_graph=False)]
        model.fit(*data, batch_size=2, epochs=2, verbose=0, validation_data=data, callbacks=callbacks)
        found.append(
            {
                (file.parent.name, event.step, value.tag): value.tensor.SerializeToString()
                for file in folder.rglob("events*")
                for record in tf.data.TFRecordDataset(os.fspath(file)).as_numpy_iterator()
                for event in [tf.compat.v1.Event.FromString(record)]
                for value in event.summary.value
            }
        )
    assert found[0] == found[1] and ("train", 1, "epoch_mae") in found[0]
