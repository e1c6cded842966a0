"""A run is the run that was asked for: named, resumed, refused, ended, or started again from scratch."""

from __future__ import annotations

import json
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import RunConfig

import raytf
from raytf.identity import fingerprint
from raytf.storage.run_lock import LOCK, RunLock
from tests.cluster import models
from tests.cluster.test_trainer import trainer, weights

pytestmark = pytest.mark.usefixtures("ray_cluster")


def mlp_of(activation="relu", optimizer="adam"):
    def build(config):
        import keras

        layers = [keras.Input((6,)), keras.layers.Dense(8, activation), keras.layers.Dense(4, "softmax")]
        model = keras.Sequential(layers)
        chosen = {"class_name": optimizer, "config": {"learning_rate": config.get("learning_rate", 0.01)}}
        model.compile(keras.optimizers.get(chosen), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build


def run(tmp_path, epochs=1, optimizer="adam", activation="relu", data=None, workers=0, **kwargs):
    """Returns a trainer, by default one that trains in this process: what a run is does not depend on it."""
    config = {"epochs": epochs} | kwargs.pop("config", {})
    datasets = {"train": data or models.dataset()}
    return trainer(tmp_path, workers, build=mlp_of(activation, optimizer), config=config, datasets=datasets, **kwargs)


@pytest.mark.slow
def test_each_fit_without_a_name_is_a_run(tmp_path):
    """Two trainers that share a RunConfig: what names them is the same object."""
    shared = RunConfig(storage_path=str(tmp_path))
    name = shared.name

    def of(rate):
        made = run(tmp_path, config={"learning_rate": rate})
        made.run_config = shared
        return made

    one, two = (made.fit() for made in [of(0.1), of(0.001)])
    assert one.path != two.path and shared.name == name
    pairs = zip(weights(one), weights(two), strict=True)
    assert any(np.abs(a - b).max() > 1e-3 for a, b in pairs), "the second has not been trained"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_name_that_exists(tmp_path, capsys, monkeypatch):
    """From its first run to its end, and a new beginning."""
    first = run(tmp_path).fit()
    folder = first.path
    assert not os.path.exists(os.path.join(folder, LOCK))

    # asked for again
    capsys.readouterr()
    with monkeypatch.context() as without_workers:
        without_workers.setattr("raytf.train.keras_trainer.Startup", None)
        again = run(tmp_path, workers=1).fit()
    assert "run: is complete after 1 epoch(s); finished, nothing to do" in capsys.readouterr().err
    assert again.metrics == first.metrics and again.path == folder
    assert again.checkpoint.path == first.checkpoint.path
    assert again.metrics_dataframe.equals(first.metrics_dataframe)

    # what differs is named, and nothing is touched
    before = sorted(os.listdir(folder))
    for changes, message in (
        ({"config": {"learning_rate": 0.1}}, r"'run' with learning_rate 0\.1, was 0\.01\. Use resume=True"),
        (
            {"optimizer": "sgd", "activation": "tanh", "resume": True},
            r"'run' with Dense \(layer 1\) activation tanh, was relu; optimizer SGD, was Adam. Use resume=False",
        ),
    ):
        with pytest.raises(raytf.ConfigError, match=message):
            run(tmp_path, 2, **changes).fit()
    assert sorted(os.listdir(folder)) == before

    # resumes with what is new
    with pytest.warns(UserWarning, match=r"run: resumes with learning_rate 1e-12, was 0\.01"):
        on = run(tmp_path, 2, config={"learning_rate": 1e-12}, resume=True, workers=1).fit()
    assert list(on.metrics_dataframe["epoch"]) == [1, 2] and on.path == folder
    for a, b in zip(weights(first), weights(on), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, err_msg="the new learning rate was not taken")
    with pytest.raises(raytf.ConfigError, match=r"learning_rate 0\.01, was 1e-12"):
        run(tmp_path, 3).fit()

    # starts from scratch, and the old run is kept
    capsys.readouterr()
    kept = weights(on)
    restarted = run(tmp_path, optimizer="sgd", resume=False).fit()
    aside = next(n for n in os.listdir(tmp_path) if n.startswith("run_until_"))
    assert f"run: starts from scratch; the previous run is archived as '{aside}'" in capsys.readouterr().err
    assert restarted.path == folder and restarted.metrics["epoch"] == 1 and len(restarted.metrics_dataframe) == 1
    assert type(raytf.load_model(folder).optimizer).__name__ == "SGD"
    old = raytf.load_model(str(tmp_path / aside))
    assert type(old.optimizer).__name__ == "Adam" and int(old.optimizer.iterations) == 8
    for a, b in zip(old.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_driver_has_the_folder(tmp_path):
    """Of a KerasTrainer, a TensorflowTrainer and a sweep."""
    named = {"name": "run", "storage_path": str(tmp_path)}
    loop = raytf.TensorflowTrainer(print, run_config=RunConfig(**named))
    keras = run(tmp_path, workers=1)
    with RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run")):
        for fit in (keras.fit, loop.fit, lambda: raytf.sweep(keras, {"learning_rate": 0.1}, progress=False)):
            with pytest.raises(raytf.ConfigError, match=f"takes one driver at a time; .*held by process {os.getpid()}"):
                fit()
    assert loop.run_config.name == "run" and os.listdir(tmp_path) == []


def test_what_a_dataset_holds(tmp_path):
    """Files by names, sizes and ends; memory by all of its rows, however divided; operations by their code."""

    def write(folder, value=0.0):
        folder.mkdir(exist_ok=True)
        table = pa.table({"x": np.arange(20) + value, "y": np.arange(20)})
        for i in range(3):
            pq.write_table(table.slice(7 * i, 7), folder / f"{i}.parquet")
            table.slice(7 * i, 7).to_pandas().to_csv(folder / f"{i}.csv")
        return str(folder)

    def describe(dataset):
        return json.loads(json.dumps(fingerprint.dataset_fingerprint(dataset, 20)))

    one, copied = write(tmp_path / "one"), write(tmp_path / "copied")
    os.utime(f"{copied}/0.parquet", (0, 0))
    other = write(tmp_path / "other", 1.0)
    for read in (lambda path: ray.data.read_parquet(path, file_extensions=["parquet"]), read_csv):
        assert describe(read(one)) == describe(read(copied)) != describe(read(other))
        assert describe(read(one))["sources"][0]["files"] >= 3

    frame = pd.DataFrame({"x": np.arange(20.0), "y": 1})
    memory = describe(ray.data.from_pandas([frame[:5], frame[5:]]))
    assert memory == describe(ray.data.from_pandas([frame[:5], frame[5:]]))
    assert memory == describe(ray.data.from_pandas([frame[:9], frame[9:12], frame[12:]]))
    assert memory != describe(ray.data.from_pandas([frame[:9], frame[9:12] + 1, frame[12:]]))
    assert describe(ray.data.range(20)) == describe(ray.data.range(20))

    base = ray.data.from_pandas(frame)
    twice = [describe(base.map_batches(lambda b: {"x": b["x"] * 2})) for _ in range(2)]
    assert twice[0] == twice[1] != describe(base.map_batches(lambda b: {"x": b["x"] * 3}))
    assert describe(base.limit(3)) != describe(base.limit(4))


def read_csv(path):
    return ray.data.read_csv(path, file_extensions=["csv"])


def test_resume_must_find_something(tmp_path):
    for changes in ({"name": "nowhere"}, {"name": None}):
        with pytest.raises(raytf.ConfigError, match="With resume=True a run resumes from a checkpoint; received: no"):
            run(tmp_path, resume=True, workers=1, **changes).fit()
    assert os.listdir(tmp_path) == []
    with pytest.raises(raytf.ConfigError, match="resume must be one of auto, True, False"):
        run(tmp_path, resume="yes")
    with pytest.raises(raytf.ConfigError, match="must name a folder below its storage path"):
        run(tmp_path, name="../run")


def test_unwritable_storage_is_reported_before_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(raytf.ConfigError, match="The storage of a run must be one that this process can write to"):
        run(tmp_path / "file", workers=1).fit()
