"""What a run writes besides its checkpoints, and goes on without: Ray's list of them, events for TensorBoard."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ray.train import CheckpointConfig

from raytf.compat import ray_train
from raytf.worker.callbacks import Events


def test_a_list_of_checkpoints_that_cannot_be_written_is_tried_again(tmp_path):
    manager = ray_train.CheckpointManager(CheckpointConfig(), ray_train.StorageContext(tmp_path, "run"))
    again = ray_train.outlive_full_storage(manager)
    file = tmp_path / "run" / ray_train.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    file.mkdir(parents=True)
    for write in (manager._save_state_and_delete_old_checkpoints, again):
        with pytest.warns(UserWarning, match=f"{file.name}, .* could not be written"):
            write()
    file.rmdir()
    again()
    written = file.stat().st_mtime_ns
    again()
    assert file.stat().st_mtime_ns == written


def test_events_that_cannot_be_written_end_without_the_training(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (tmp_path / "tensorboard").touch()
    with pytest.warns(UserWarning, match="Events for TensorBoard end here") as seen:
        events = Events(str(tmp_path / "tensorboard"), write_graph=False)
        data = np.ones((4, 2)), np.ones((4, 1))
        model.fit(*data, epochs=2, verbose=0, validation_data=data, callbacks=[events])
    assert len(seen) == 1
    events = Events(str(tmp_path / "here"), write_graph=False)
    model.fit(*data, epochs=2, verbose=0, validation_data=data, callbacks=[events])
    assert {path.parent.name for path in (tmp_path / "here").rglob("events*")} == {"train", "validation"}
