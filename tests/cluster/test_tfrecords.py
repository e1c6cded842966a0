"""`raytf.read_tfrecords` on a real Ray: rows train as others do, stored or streamed, resume, and are refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import ray
import tensorflow as tf

import raytf
from raytf.data import records
from tests.cluster import models
from tests.cluster.test_trainer import assert_equal, trainer
from tests.unit.test_tfrecords import example, write

pytestmark = pytest.mark.usefixtures("ray_cluster")
IO = tf.io
SCHEMA = {name: IO.FixedLenFeature([], tf.float32) for name in models.FEATURES} | {
    "label": IO.FixedLenFeature([], tf.int64)
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(records, "PIECE_BYTES", 2000)


def written(folder, count=97, seed=0, files=3):
    """The rows of `models.dataset`, in files of which every other one is compressed."""
    folder.mkdir(exist_ok=True)
    columns = models.rows(count, seed)
    rows = [{name: values[i].item() for name, values in columns.items()} for i in range(count)]
    for part, some in enumerate(np.array_split(np.arange(count), files)):
        write(folder / f"{part}.tfrecord", [example(**rows[i]) for i in some], "GZIP" if part % 2 else "")
    return str(folder)


@pytest.fixture
def datasets(tmp_path):
    train, validation = written(tmp_path / "train"), written(tmp_path / "validation", 41, 1)
    return {
        "train": raytf.read_tfrecords(train, SCHEMA),
        "validation": raytf.read_tfrecords(f"{validation}/*.tfrecord"),
    }


def test_rows_train_as_others_do_stored_or_streamed_on_any_number_of_workers(datasets, tmp_path):
    expected = trainer(tmp_path, 1, name="arrow", shuffle="none").fit()
    stored = trainer(tmp_path, 2, name="stored", datasets=datasets, shuffle="none").fit()
    assert_equal(expected, stored)
    streams = {"datasets": datasets, "materialize": False, "shuffle": "window"}
    one = trainer(tmp_path, 1, name="one", **streams).fit()

    def kill(config):
        return [models.kill_once(str(tmp_path / "marker"), 1, 1, 2)]

    more = {"callbacks": kill, "failures": 1, "checkpoint_every": "1 steps"}
    assert_equal(one, trainer(tmp_path, 2, name="two", **streams, **more).fit())
    assert (tmp_path / "marker").exists()


def test_only_the_columns_that_are_used_are_parsed(tmp_path):
    """A record with a label that does not fit is found when labels are read."""
    rows = [example(x=float(i), label=i) for i in range(30)] + [example(x=30.0, label=[1, 2])]
    path = write(tmp_path / "rows.tfrecord", rows)
    schema = {"x": IO.FixedLenFeature([], tf.float32), "label": IO.FixedLenFeature([], tf.int64)}
    data = raytf.read_tfrecords(path, schema)
    assert data.count() == 31 and data.columns() == ["x", "label"]
    assert [row["x"] for row in data.select_columns(["x"]).take_all()] == list(range(31))
    for materialize in (True, False):
        options = {"features": "x", "labels": "label", "materialize": materialize}
        with pytest.raises(raytf.ConfigError, match="record 30 of '.*rows.tfrecord'"):
            trainer(tmp_path, 1, name=f"run{materialize}", datasets={"train": data}, build=linear, **options).fit()


def linear(config):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_fit_evaluate_predict_plan_and_sweep(tmp_path, caplog):
    logging.getLogger("raytf").addHandler(caplog.handler)
    path = write(tmp_path / "rows.tfrecord", [example(x=float(i), y=2.0 * i) for i in range(20)])
    data = raytf.read_tfrecords(path)
    logging.getLogger("raytf").removeHandler(caplog.handler)
    assert (
        "20 records in 1 TFRecord file(s), with the features of the first records: x float32; y float32" in caplog.text
    )
    model = linear({})
    columns = {"features": "x", "labels": "y"}
    raytf.fit(model, data, batch_size=5, num_workers=2, verbose=0, **columns)
    assert np.isfinite(raytf.evaluate(model, data, num_workers=2, verbose=0, **columns))
    expected = model.predict(np.arange(20.0)[:, None], verbose=0)
    found = raytf.predict(model, data, features="x", num_workers=2, verbose=0).take_all()
    np.testing.assert_allclose(np.ravel([row["predictions"] for row in found]), expected.ravel(), rtol=1e-5)
    run = trainer(tmp_path, 2, datasets={"train": data}, build=linear, **columns)
    assert raytf.plan(run).steps_per_epoch == 1
    grid = raytf.sweep(run, {"learning_rate": ray.tune.grid_search([0.1, 0.2])}, metric="loss", progress=False)
    assert len(grid) == 2 and not grid.errors
