"""`raytf.Predictor` in actors and tasks of Ray Data, and `raytf.predict` over a Dataset, against `model.predict`."""

from __future__ import annotations

import os

import numpy as np
import pytest
import ray

import raytf
from raytf.fitting import warm
from raytf.worker import checkpoint, model_loading

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROWS = 60


@pytest.fixture(scope="module", autouse=True)
def no_workers_stay():
    yield
    warm.end_group()


@pytest.fixture(scope="module")
def images(ray_cluster):
    """Rows with a number and pixels, in several blocks."""
    pixels = np.random.default_rng(0).uniform(size=(ROWS, 8, 8, 1)).astype("float32")
    return ray.data.from_items([{"id": i, "image": one} for i, one in enumerate(pixels)], override_num_blocks=6), pixels


@pytest.fixture(scope="module")
def model():
    from jobs import digits

    return digits.build_model({"learning_rate": 0.01})


class Noting(raytf.Predictor):
    """Notes in each process how often a model is loaded, and how often it predicts."""

    def __init__(self, run, folder, **how):
        super().__init__(run, **how)
        self.folder = folder
        load = model_loading.load_model
        model_loading.load_model = lambda *args, **options: (self._note("loaded"), load(*args, **options))[1]

    def _note(self, event):
        with open(f"{self.folder}/{event}_{os.getpid()}", "a") as file:
            file.write("x")

    def __call__(self, batch):
        self._note("predicted")
        return super().__call__(batch)


def predicted(dataset):
    rows = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    return np.stack([row["predictions"] for row in rows])


def test_actors_load_a_run_once_each(images, model, tmp_path):
    rows, pixels = images
    folder, notes = tmp_path / "run" / "checkpoint_2026-01-01_00-00-01", tmp_path / "notes"
    folder.mkdir(parents=True), notes.mkdir()
    recorded = {"columns": {"features": "image"}}
    checkpoint.save(
        str(folder), model, checkpoint.CheckpointState(1, 3, 0, False, [{"epoch": 1, "val_loss": 0.5}], recorded)
    )
    found = rows.map_batches(
        Noting,
        fn_constructor_args=(str(folder), str(notes)),
        fn_constructor_kwargs={"keep": ["id"]},
        batch_size=16,
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    np.testing.assert_allclose(predicted(found), model.predict(pixels, verbose=0), rtol=1e-5, atol=1e-6)
    loaded, batches = ([path.read_text() for path in notes.glob(f"{event}_*")] for event in ("loaded", "predicted"))
    assert sum(map(len, batches)) >= 4 and len(loaded) == len(batches) <= 2
    assert all(text == "x" for text in loaded), "the run is loaded once in each actor, for all of its batches"


def test_tasks_take_a_model_as_it_is(images, model):
    rows, pixels = images
    found = rows.map_batches(raytf.Predictor(model, features="image", keep=["id"]), batch_size=16)
    np.testing.assert_allclose(predicted(found), model.predict(pixels, verbose=0), rtol=1e-5, atol=1e-6)


def test_predict_and_evaluate_over_a_dataset(images, model):
    rows, pixels = images
    expected = model.predict(pixels, verbose=0)
    found = raytf.predict(model, rows, features="image", batch_size=16, num_workers=2)
    assert isinstance(found, ray.data.Dataset)
    np.testing.assert_allclose(np.stack([r["predictions"] for r in found.take_all()]), expected, rtol=1e-5, atol=1e-6)
    labelled = rows.map(lambda row: {**row, "label": row["id"] % 10})
    metrics = raytf.evaluate(model, labelled, features="image", labels="label", batch_size=16, num_workers=2)
    its = model.evaluate(pixels, np.arange(ROWS) % 10, batch_size=16, verbose=0)
    np.testing.assert_allclose(metrics, its, rtol=1e-4)
