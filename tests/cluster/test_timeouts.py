"""The deadlines of the process that starts a run hold in every process of it."""

from __future__ import annotations

import functools
import os
import pathlib

import keras
import numpy as np
import pytest
import ray
import ray.train

import raytf
from raytf import timeouts
from raytf.fitting import warm
from tests.cluster import models
from tests.cluster.test_trainer import trainer

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]


def note(folder, role):
    pathlib.Path(folder, f"{role} {os.getpid()}").write_text(f"{timeouts.get().ring_join:g}")


def noted(folder) -> set:
    """Returns (role of a process, what it waits for) of all that have reported it."""
    return {(path.name.split()[0], path.read_text()) for path in pathlib.Path(folder).iterdir()}


class Note(keras.callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_begin(self, logs=None):
        note(self.folder, "worker")


class NoteOfTheController(ray.train.UserCallback):
    def __init__(self, folder):
        self.folder = folder

    def after_report(self, run_context, metrics, checkpoint):
        note(self.folder, "controller")


def building(folder, config):
    """It is called in the workers, in the process that tries the model, and where checkpoints are evaluated."""
    name = ray.get_runtime_context().get_actor_name() or ""
    note(folder, "evaluator" if "evaluator" in name else "builder")
    return models.mlp(config)


@pytest.fixture
def notes(tmp_path, set_timeouts):
    set_timeouts(ring_join=77.0)
    (tmp_path / "notes").mkdir()
    return str(tmp_path / "notes")


def test_of_a_trainer(tmp_path, notes):
    callbacks = lambda config: [Note(notes)]
    options = {"run_callbacks": [NoteOfTheController(notes)], "evaluator": True, "config": {"epochs": 1}}
    trainer(tmp_path, 2, build=functools.partial(building, notes), callbacks=callbacks, **options).fit()
    assert noted(notes) == {("builder", "77"), ("worker", "77"), ("evaluator", "77"), ("controller", "77")}


def test_of_a_coordinator_and_its_servers(tmp_path, notes):
    callbacks = lambda config: [Note(notes)]
    plan = {"strategy": "parameter_server", "num_ps": 1, "config": {"epochs": 1, "batch_size": 20}}
    trainer(tmp_path, 1, callbacks=callbacks, build=functools.partial(building, notes), **plan).fit()
    assert noted(notes) == {("builder", "77"), ("worker", "77")}


def test_of_a_sweep(tmp_path, notes):
    its = trainer(tmp_path, 1, build=functools.partial(building, notes), callbacks=lambda config: [Note(notes)])
    raytf.sweep(its, {"epochs": 1}, metric="val_loss", progress=False)
    assert noted(notes) == {("builder", "77"), ("worker", "77")}


def test_of_a_call_of_fit(notes):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    try:
        raytf.fit(model, np.ones((8, 2)), np.ones((8, 1)), num_workers=1, callbacks=[Note(notes)], verbose=0)
    finally:
        warm.end_group()
    assert noted(notes) == {("worker", "77")}
