"""`raytf train`, `plan`, `sweep`, `evaluate` and `predict` on CSV files and on folders of images, as they are typed."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import raytf
from tests.cluster.test_formats import image, pictures, write_csv
from tests.jobs.test_jobs import RAYTF, run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow, pytest.mark.timeout(900)]
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
    "table": f"train models:table {TABLE} --features b,a --labels y --unreadable refuse --name table",
    "plan": f"plan models:table {TABLE}",
    "plan of images": f"plan models:classes {IMAGES}",
    "sweep": f"sweep models:classes epochs=1 {IMAGES} --num-samples 1",
    "sweep of a table": f"sweep models:table epochs=1 {TABLE} --num-samples 1",
    "evaluate images": "evaluate runs/images --data images --format images --image-size 6x6 --unreadable skip --json",
    "evaluate one class": "evaluate runs/images --data dogs --json",
    "predict images": "predict runs/images --data new --image-size 6x6 --unreadable skip -o images.out",
    "evaluate table": "evaluate runs/table --data table --format csv --types a=float32,b=float32 --json",
    "predict table": "predict runs/table --data table --format csv --types a=float32,b=float32 -o table.out",
    "predict rows without labels": "predict runs/table --data new.csv -o new.out",
    "missing values": f"train models:table {TABLE.replace('table', 'holes')} --fill a=0,b=-1.5 --labels y --name holes",
    "plan of missing values": f"plan models:table {TABLE.replace('table', 'holes')} --fill a=0,b=-1.5 --labels y",
    "sweep of missing values": f"sweep models:table epochs=1 {TABLE.replace('table', 'holes')} --fill a=0,b=-1.5 "
    "--num-samples 1",
    "evaluate missing values": "evaluate runs/holes --data holes --types a=float32,b=float32 --json",
    "evaluate other missing values": "evaluate runs/table --data holes --types a=float32,b=float32 --fill a=0,b=-1.5 "
    "--json",
    "predict missing values": "predict runs/holes --data holes --types a=float32,b=float32 --fill a=0 -o holes.out",
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
    return err + out


def loss_of(name, folder):
    """What a command prints to stdout is its result alone."""
    out, _ = run(*COMMANDS[name].split(), cwd=folder, program=RAYTF)
    return json.loads(out)["loss"]


def test_images_train(folder):
    out = command("images", folder)
    assert "train: 5 images; label is the number, from 0, of one of cats, dogs" in out
    assert "no --features are given: --features image --labels label are used" in out
    assert "1 image(s) cannot be decoded and are left out" in out and "images/cats/4.jpg" in out
    assert "train: 4 rows" in out and "epoch 1/1" in out and "val_loss" in out
    trained = float(re.search(r"val_loss ([\d.e-]+)", out)[1])
    (folder / "new").mkdir()  # without folders for classes
    for i in range(3):
        (folder / "new" / f"{i}.png").write_bytes(image((9, 7), i))
    assert loss_of("evaluate images", folder) == pytest.approx(trained, abs=1e-3)
    model = raytf.load_model(folder / "runs" / "images")
    pictures(folder / "more")
    (folder / "dogs").mkdir()
    (folder / "more" / "dogs").rename(folder / "dogs" / "dogs")
    black = model.predict(np.zeros((1, 6, 6, 3)), verbose=0)  # the one picture of a dog
    assert loss_of("evaluate one class", folder) == pytest.approx(-np.log(black[0, 1]), rel=1e-3)
    (folder / "new" / "1b.png").write_bytes(b"no image")
    command("predict images", folder)
    found = pq.read_table(folder / "images.out")
    assert found["path"].to_pylist() == [str(folder / "new" / f"{i}.png") for i in range(3)]
    expected = model.predict(np.stack([np.full((6, 6, 3), i, "float32") for i in range(3)]), verbose=0)
    np.testing.assert_allclose(np.stack(found["predictions"].to_pylist()).reshape(3, 2), expected, atol=1e-5)
    assert found["class"].to_pylist() == [["cats", "dogs"][number] for number in expected.argmax(axis=1)]


def test_a_table_is_shown_and_trains(folder):
    shown = command("plan", folder)
    assert "CSV file(s) with the columns a float, b float, y int64; --types" in shown
    assert "no --features are given: --features a,b --labels y are used" in shown
    assert shown.count("\nrow  ") == 3 and "steps" in shown
    assert "train: 20 rows" in command("table", folder)
    loss = loss_of("evaluate table", folder)
    command("predict table", folder)
    found = np.ravel(pq.read_table(folder / "table.out")["predictions"].to_pylist())
    sums = np.loadtxt(folder / "table" / "a.csv", delimiter=",", skiprows=1)[:, 2]
    assert np.mean((found - sums) ** 2) == pytest.approx(loss, rel=1e-4)
    rows = np.loadtxt(folder / "table" / "a.csv", delimiter=",", skiprows=1)[:, :2]
    write_csv(folder / "new.csv", ["a", "b"], rows)
    command("predict rows without labels", folder)
    expected = raytf.load_model(folder / "runs" / "table").predict(rows[:, ::-1], verbose=0)
    for name in ("table.out", "new.out"):
        found = np.ravel(pq.read_table(folder / name)["predictions"].to_pylist())
        np.testing.assert_allclose(found, expected.ravel(), rtol=1e-4)
    words = COMMANDS["predict rows without labels"].replace("new.out", "other.out").split()
    _, err = run(*words, "--features", "a", cwd=folder, code=2, program=RAYTF)
    assert "--features a: the run was trained with b,a" in err and "The model must fit the data" in err


def test_missing_values_are_filled(folder):
    rows = [[i, i + 1, 2 * i + 1] for i in range(20)]
    rows[3][0], rows[7][1] = "", ""
    write_csv(folder / "holes" / "a.csv", ["a", "b", "y"], rows)
    assert "loss" in command("missing values", folder) and "steps" in command("plan of missing values", folder)
    assert "1 trials" in command("sweep of missing values", folder)
    loss = loss_of("evaluate missing values", folder)
    command("predict missing values", folder)
    whole = [[a if a != "" else 0.0, b if b != "" else -1.5] for a, b, _ in rows]
    expected = raytf.load_model(folder / "runs" / "holes").predict(np.array(whole, "float32"), verbose=0).ravel()
    found = np.ravel(pq.read_table(folder / "holes.out")["predictions"].to_pylist())
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.mean((expected - np.array([y for _, _, y in rows])) ** 2) == pytest.approx(loss, rel=1e-4)
    command("table", folder)
    assert loss_of("evaluate other missing values", folder) > 0
    words = COMMANDS["missing values"].replace("--fill a=0,b=-1.5", "--fill a=0").split()
    _, err = run(*words, cwd=folder, code=2, program=RAYTF)
    assert "1 null(s) of 'b', float" in err and "--fill b=VALUE" in err and "Traceback" not in err, err


@pytest.mark.parametrize("size", ["", "--image-size 6x6 "])
def test_a_broken_image_is_one_error(folder, size):
    """Ray's tracebacks, and lines of TensorFlow in Ray's tasks, would hide it."""
    words = f"train models:classes --data images {size}--batch-size 2 --storage runs".split()
    out, err = run(*words, cwd=folder, code=2, program=RAYTF)
    assert err.count("4.jpg") == err.count("--unreadable skip") == 1, err
    assert not re.search("Traceback|Exception|Dataset execution|rendezvous", out + err), out + err


def test_images_are_swept(folder):
    assert "cats, dogs" in command("sweep", folder)
