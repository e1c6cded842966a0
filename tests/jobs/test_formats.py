"""`raytf train`, `plan` and `sweep` on CSV files and on folders of images, as they are typed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cluster.test_formats import image, pictures, write_csv
from tests.jobs.test_jobs import RAYTF, run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
MODULE = """
def table(config):
    import keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def classes(config):
    import keras
    layers = [keras.Input((6, 6, 3)), keras.layers.Flatten(), keras.layers.Dense(2, "softmax")]
    model = keras.Sequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""
IMAGES = "--data images --format images --image-size 6x6 --unreadable skip --batch-size 2 --storage runs"
TABLE = "--data table --format csv --types a=float32,b=float32 --batch-size 4 --storage runs"
COMMANDS = {
    "images": f"train models:classes {IMAGES} --validation images --name images",
    "table": f"train models:table {TABLE} --unreadable refuse --name table",
    "plan": f"plan models:table {TABLE}",
    "plan of images": f"plan models:classes {IMAGES}",
    "sweep": f"sweep models:classes epochs=1 {IMAGES} --num-samples 1",
    "sweep of a table": f"sweep models:table epochs=1 {TABLE} --num-samples 1",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(MODULE)
    pictures(tmp_path / "images")
    (tmp_path / "images" / "cats" / "4.jpg").write_bytes(b"no image")
    (tmp_path / "images" / "cats" / "5.png").write_bytes(image((9, 7), 5))
    rows = np.random.default_rng(0).integers(0, 9, (20, 2))
    write_csv(tmp_path / "table" / "a.csv", ["a", "b", "y"], [[a, b, a + b] for a, b in rows])
    return tmp_path


def command(name, folder):
    out, err = run(*COMMANDS[name].split(), cwd=folder, program=RAYTF)
    return out + err


def test_images_train(folder):
    out = command("images", folder)
    assert "train: 5 images; label is the number, from 0, of one of cats, dogs" in out
    assert "--features image --labels label, as no features are given" in out
    assert "1 image(s) cannot be decoded and are left out" in out and "images/cats/4.jpg" in out
    assert "train: 4 rows" in out and "epoch 1/1" in out and "val_loss" in out


def test_a_table_is_shown_and_trains(folder):
    shown = command("plan", folder)
    assert "CSV file(s) with the columns a float, b float, y int64; --types" in shown
    assert "--features a,b --labels y, as no features are given" in shown
    assert shown.count("\nrow  ") == 3 and "steps" in shown
    assert "train: 20 rows" in command("table", folder)


def test_images_are_swept(folder):
    assert "cats, dogs" in command("sweep", folder)
