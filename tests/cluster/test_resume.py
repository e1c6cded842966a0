"""A run that resumes with what a user changed meanwhile, and with a checkpoint that is no longer whole."""

from __future__ import annotations

import csv
import json
import os
import pickle

import numpy as np
import pytest

import raytf
from tests.cluster import models
from tests.cluster.test_trainer import trainer, weights
from tests.logged import warnings_logged
from tests.unit.test_checkpoint import Bomb

pytestmark = pytest.mark.usefixtures("ray_cluster")


def watched(config):
    """A CSV file by a subclass, which workers other than the chief run too, and what each worker sees of it."""
    import keras

    class Logger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            with open(os.path.join(config["notes"], f"{models.rank()}.json"), "a") as file:
                file.write(json.dumps([epoch, self.filename, stop.patience, stop.wait]) + "\n")

    stop = keras.callbacks.EarlyStopping("loss", min_delta=100, patience=config["patience"])
    return [*(models.kill_once(**kill) for kill in config["kill"]), stop, Logger(config["csv"])]


def moved(config):
    """`models.mlp` in another place."""
    return models.mlp(config)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_resumes_from_the_last_whole_checkpoint_with_new_arguments(tmp_path):
    """Rank 1 dies in the second of three epochs. Then the last checkpoint is cut off, `build_model` is another one,
    an argument of a callback is another, and a stranger has added pickles: the third epoch is made once more."""
    kill = {"marker": str(tmp_path / "killed"), "rank_": 1, "epoch": 1, "batch": 2}
    notes, exploded = tmp_path / "notes", tmp_path / "exploded"
    notes.mkdir()
    config = {"kill": [kill], "csv": str(tmp_path / "log.csv"), "notes": str(notes), "patience": 5, "dropout": 0.2}
    first = trainer(tmp_path, config=config, callbacks=watched, failures=1).fit()
    assert (tmp_path / "killed").exists() and first.metrics["epoch"] == 3
    before = weights(first)
    run = tmp_path / "run"
    saved = sorted(run.glob("checkpoint_2*"))
    for folder in saved:
        for name in ("build.pkl", "callbacks.pkl", "error.pkl"):
            (folder / name).write_bytes(pickle.dumps(Bomb(str(exploded))))
    os.truncate(saved[-1] / "model.keras", 1000)
    with warnings_logged(rf"{saved[-1].name} \(model.keras .*{saved[-2].name} instead"):
        assert int(raytf.load_model(run).optimizer.iterations) == 8
    again = trainer(tmp_path, config=config | {"patience": 50}, callbacks=watched, build=moved).fit()
    assert list(again.metrics_dataframe["epoch"]) == [1, 2, 3]
    for left, right in zip(weights(again), before, strict=True):
        np.testing.assert_array_equal(left, right)
    for column in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(again.metrics_dataframe[column], first.metrics_dataframe[column], atol=1e-9)
    assert not exploded.exists()
    with open(config["csv"], newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    seen = {rank: [json.loads(line) for line in (notes / f"{rank}.json").read_text().splitlines()] for rank in (0, 1)}
    for rank, rows in seen.items():
        last = rows[-1]
        assert (last[0], last[2], last[3]) == (2, 50, 2), f"rank {rank}: {rows}"
    # a kill before the first epoch's report is known makes that epoch once more
    assert {row[1] for row in seen[0]} == {config["csv"]} and len(seen[0]) in (4, 5)
    assert config["csv"] not in {row[1] for row in seen[1]}, "the chief's file"
    listed = json.loads((run / "checkpoint_manager_snapshot.json").read_text())["checkpoint_results"]
    assert saved[-1].name not in {entry["checkpoint_dir_name"] for entry in listed}, "Ray takes it for none"
    for folder in run.glob("checkpoint_2*"):
        (folder / "state.json").unlink()
    with pytest.raises(raytf.ConfigError, match=r"state.json is missing\).*state.json is missing"):
        raytf.load_model(run)
