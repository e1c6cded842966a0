"""Figures of a training: noted at the ends of epochs, for TensorBoard and for reports."""

from __future__ import annotations

import json
import os

import keras
import numpy as np
import pyarrow.fs
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from raytf import activity
from raytf.worker import figures
from raytf.worker.callbacks import Events
from raytf.worker.stop import StopTraining
from tests.logged import lines_logged

LOCAL = pyarrow.fs.LocalFileSystem()
DATA = np.ones((8, 2)), np.ones((8, 1))


class Position(keras.callbacks.Callback):
    step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1


def trained(tmp_path, events=None, epochs=2, rank=0, filesystem=LOCAL, waited=None, users=()):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.25])
    model.compile(keras.optimizers.SGD(schedule), "mse")
    position = Position()
    write = [figures.FiguresFile(filesystem, str(tmp_path), rank)]
    users = [*users] if events is None else [*users, events]
    write += [found] if (found := figures.events_writer(users)) else []
    noted = figures.FiguresCallback(position, 4, rank, 2, waited, write)
    callbacks = [position, *users, noted]
    with noted.running():
        model.fit(*DATA, batch_size=4, epochs=epochs, validation_data=DATA, callbacks=callbacks, verbose=0)
    return noted


def lines(tmp_path, rank=0):
    text = (tmp_path / figures.FOLDER / f"worker_{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_an_epoch_has_a_line_of_each_worker_and_another_start_adds_its_own(tmp_path):
    for rank in (0, 1):
        trained(tmp_path, rank=rank)
    trained(tmp_path, epochs=1)
    found = lines(tmp_path)
    assert [(one["epoch"], one["step"], one["steps"]) for one in found] == [(1, 2, 2), (2, 4, 2), (1, 2, 2)]
    assert [one["learning_rate"] for one in found[:2]] == [0.5, 0.25], "that of a schedule, as it is then"
    for one in found:
        assert one["examples_per_second"] == pytest.approx(8 / one["seconds"])
        assert one["memory_bytes"] > 1e6 and one["pid"] == os.getpid() and one["rank"] == 0 and one["workers"] == 2
    assert [one["rank"] for one in lines(tmp_path, 1)] == [1, 1]


def test_what_a_checkpoint_takes_is_that_of_the_training_since_the_last_line(tmp_path):
    noted = trained(tmp_path, epochs=1)
    activity.tracker.enter(activity.CALLBACKS)
    before = noted._now()
    with activity.tracker.in_phase(activity.CHECKPOINT):
        pass
    assert noted._now()["checkpoint"] > before["checkpoint"]
    assert (
        activity.tracker.seconds_by_phase()[activity.CHECKPOINT]
        == activity.tracker.snapshot()["spent"][activity.CHECKPOINT]
    )


moments = st.fixed_dictionaries(
    {name: st.floats(0, 1e6) for name in ("clock", "input", "communication")} | {"step": st.integers(0, 10**6)}
)


@given(moments, moments, st.integers(1, 10**6))
def test_shares_are_shares(began, ended, batch):
    found = figures.epoch_figures(began, ended, batch)
    assert 0 <= found["input_wait"] <= 1 and 0 <= found["communication"] <= 1
    assert found["examples_per_second"] * found["seconds"] == pytest.approx(found["steps"] * batch)


def test_what_a_coordinator_of_parameter_servers_cannot_know_is_none(tmp_path):
    trained(tmp_path, epochs=1)  # waited=None
    (line,) = lines(tmp_path)
    assert line["input_wait"] is None and line["communication"] is None and line["examples_per_second"] > 0


def test_tensorboard_shows_them_next_to_losses(tmp_path):
    trained(tmp_path, Events(str(tmp_path / "events"), write_graph=False), waited=lambda: 0.0)
    tags = {}
    for file in (tmp_path / "events").rglob("events*"):
        for record in tf.data.TFRecordDataset(os.fspath(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                tags.setdefault(file.parent.name, {}).setdefault(value.tag, []).append(event.step)
    assert tags.keys() == {"train", "validation", "system"} and "epoch_loss" in tags["train"]
    assert set(figures._SHOWN) <= tags["system"].keys()
    assert tags["system"]["examples_per_second"] == tags["train"]["epoch_loss"] == [0, 1]


def test_a_storage_that_takes_no_more_ends_them_and_not_the_training(tmp_path):
    (tmp_path / figures.FOLDER).touch()
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "system").touch()
    with lines_logged() as lines_seen:
        trained(tmp_path, Events(str(tmp_path / "events"), write_graph=False))
    messages = [line for line in lines_seen if line.startswith("Figures")]
    assert len(messages) == 2 and "raytf report" in messages[0] and "TensorBoard" in messages[1], messages


@pytest.mark.slow
def test_where_nothing_is_appended_the_file_is_written_again_now_and_then(tmp_path):
    (tmp_path / figures.FOLDER).mkdir()
    store = pyarrow.fs.SubTreeFileSystem("/", LOCAL)  # to raytf no file system of this machine
    for _ in range(2):
        trained(tmp_path, epochs=3, filesystem=store)
    assert [one["epoch"] for one in lines(tmp_path)] == [1, 2, 3, 1, 2, 3]


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise StopTraining("resize", 4)


def test_where_nothing_is_appended_a_stop_loses_no_figures(tmp_path):
    (tmp_path / figures.FOLDER).mkdir()
    for _ in range(2):
        with pytest.raises(StopTraining):
            trained(tmp_path, epochs=3, filesystem=pyarrow.fs.SubTreeFileSystem("/", LOCAL), users=[Stop()])
    assert [one["epoch"] for one in lines(tmp_path)] == [1, 2, 1, 2]
