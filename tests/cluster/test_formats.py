"""Data of a command by its path: what formats are found, what columns they have, and the errors for bad files."""

from __future__ import annotations

import csv
import logging
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import tensorflow as tf

import raytf
from raytf.data import class_names, file_source, formats, records
from raytf.data.columns import Column
from tests.unit.test_tfrecords import example, write

pytestmark = pytest.mark.usefixtures("ray_cluster")
NOTHING = {"features": None, "labels": None, "sample_weights": None}


@pytest.fixture
def log(caplog):
    logging.getLogger("raytf").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("raytf").removeHandler(caplog.handler)


def write_csv(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def image(size, value):
    return tf.io.encode_png(np.full((*size, 3), value, np.uint8)).numpy()


def pictures(folder):
    for i, name in enumerate(["dogs/1.png", "cats/3.png", "cats/2.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image((4, 5), i))
    return folder


def test_csv(tmp_path, log, monkeypatch):
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 200)
    write_csv(tmp_path / "a.csv", ["a", "b", "y", "w"], [[i, i, i % 2, "x"] for i in range(100)])
    write_csv(tmp_path / "b.csv", ["y", "b", "w", "a"], [[1, 0.5, "z", 7]])
    found = formats.read("train", str(tmp_path))
    assert found.format == "csv" and "2 CSV file(s) with the columns a int64, b double, y int64, w string" in log.text
    rows = found.dataset.take_all()
    assert rows[99] == {"a": 99, "b": 99.0, "y": 1, "w": "x"} and rows[100] == {"a": 7, "b": 0.5, "y": 1, "w": "z"}
    assert formats.preview(found.dataset)[1] == "a=1  b=1.0  y=1  w='x'"
    with pytest.raises(raytf.ConfigError, match="may be left out if.*w string"):
        formats.roles(found, NOTHING, None)
    typed = formats.read("train", str(tmp_path), types={"a": "float32", "w": "string"})
    assert typed.dataset.schema().base_schema.field("a").type == pa.float32()
    assert formats.read("validation", str(tmp_path / "b.csv"), reference=typed).schema == typed.schema


def test_features_and_labels_that_can_be_known(tmp_path, log):
    write_csv(tmp_path / "a.csv", ["a", "b", "label"], [[1, 2.0, 0]])
    found = formats.read("train", str(tmp_path))
    assert formats.roles(found, NOTHING, None) == NOTHING | {"features": ["a", "b"], "labels": "label"}
    assert "no --features are given: --features a,b --labels label are used" in log.text
    given = NOTHING | {"labels": "a"}
    assert formats.roles(found, given, None) == given | {"features": ["b", "label"]}
    given = NOTHING | {"features": "a"}
    assert formats.roles(found, given, None) == given
    sized = formats.roles(found, NOTHING | {"features": "a"}, (2, 3, 1))
    assert sized["features"] == Column("a", image=(2, 3, 1))
    pq.write_table(pa.table({"x": ["a"], "y": [1.0]}), tmp_path / "a.parquet")
    found = formats.read("train", str(tmp_path / "a.parquet"))
    assert formats.roles(found, NOTHING, None) == NOTHING | {"features": "x", "labels": "y"}
    write(tmp_path / "a.tfrecord", [example(x=1, target=1)])
    found = formats.read("train", str(tmp_path / "a.tfrecord"))
    assert formats.roles(found, NOTHING, None) == NOTHING | {"features": "x", "labels": "target"}


def test_images_of_classes(tmp_path, log, monkeypatch):
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    found = formats.read("train", str(pictures(tmp_path)))
    assert "3 images; label is the number, from 0, of one of cats, dogs" in log.text
    names = [(os.path.relpath(row["path"], tmp_path), row["label"]) for row in found.dataset.take_all()]
    assert names == [("cats/2.png", 0), ("cats/3.png", 0), ("dogs/1.png", 1)] and found.dataset.count() == 3
    given = formats.roles(found, NOTHING, None)
    assert given == NOTHING | {"features": Column("image", image=(4, 5, 3)), "labels": "label"}
    assert file_source.classes_of(found.dataset.select_columns(["label"])) == {"label": ["cats", "dogs"]}
    assert formats.preview(found.dataset)[0].startswith("image=<")
    (tmp_path / "more" / "dogs").mkdir(parents=True)
    (tmp_path / "cats" / "2.png").rename(tmp_path / "more" / "dogs" / "2.png")
    more = formats.read("validation", str(tmp_path / "more"), reference=found)
    assert [row["label"] for row in more.dataset.take_all()] == [1]
    more = formats.read("given", str(tmp_path / "more"), classes={"label": ["birds", "cats", "dogs"]})
    assert [row["label"] for row in more.dataset.take_all()] == [2]
    (tmp_path / "more" / "dogs").rename(tmp_path / "more" / "birds")
    with pytest.raises(raytf.ConfigError, match="Classes must be those of the training data; received: birds"):
        formats.read("validation", str(tmp_path / "more"), reference=found)


def test_images_with_a_table_of_labels(tmp_path):
    pictures(tmp_path)
    rows = [["dogs/1.png", "dog", 0.5], ["cats/3.png", "cat", 1.5], ["cats/2.png", "cat", 2.5]]
    write_csv(tmp_path / "labels.csv", ["file", "label", "age"], rows)
    found = formats.read("train", str(tmp_path))
    assert [(row["label"], row["age"]) for row in found.dataset.take_all()] == [(0, 2.5), (0, 1.5), (1, 0.5)]
    write_csv(tmp_path / "labels.csv", ["file", "label", "age"], rows[:2])
    with pytest.raises(raytf.ConfigError, match="name each image of its folder once; received: '.*cats/2.png'"):
        formats.read("train", str(tmp_path))
    write_csv(tmp_path / "labels-2023.csv", ["file", "label", "age"], rows)
    with pytest.raises(raytf.ConfigError, match="one CSV file, of their labels; received: '.*labels-2023.csv', "):
        formats.read("train", str(tmp_path), "images")


def test_an_image_that_cannot_be_decoded_is_refused_or_left_out(tmp_path):
    pictures(tmp_path)
    jpeg = tf.io.encode_jpeg(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).numpy()
    for content in (jpeg[: len(jpeg) // 2], b"text"):
        (tmp_path / "cats" / "broken.jpg").write_bytes(content)
        with pytest.raises(ray.exceptions.RayTaskError, match="can be decoded; received: '.*broken.jpg'"):
            formats.read("train", str(tmp_path)).dataset.materialize()
        assert formats.read("train", str(tmp_path), unreadable="skip").dataset.materialize().count() == 3
    (tmp_path / "none" / "cats").mkdir(parents=True)
    (tmp_path / "none" / "cats" / "broken.jpg").write_bytes(b"text")
    found = formats.read("train", str(tmp_path / "none"), unreadable="skip")
    with pytest.raises(raytf.ConfigError, match="must hold some; received: none that can be decoded"):
        formats.roles(found, NOTHING, None)
    with pytest.raises(raytf.ConfigError, match="must hold some; received: none that can be decoded"):
        class_names.with_names(None, found.dataset, None, None)
    shutil.rmtree(tmp_path / "none")
    (tmp_path / "cats" / "broken.jpg").write_bytes(jpeg)
    assert formats.read("train", str(tmp_path)).dataset.materialize().count() == 4


def test_files_that_do_not_fit_each_other(tmp_path):
    def refused(message, path="", **options):
        with pytest.raises(raytf.ConfigError, match=message):
            formats.read("train", str(tmp_path / path), **options)

    refused("There must be a file to read")
    write_csv(tmp_path / "a.csv", ["a", "b"], [[1, 2]])
    refused("--types must name columns; received: c", types={"c": "int64"})
    refused("must have one type, one of Arrow's; received: 'a': wide", types={"a": "wide"})
    write_csv(tmp_path / "b.csv", ["a", "c"], [[1, 2]])
    refused("must have the same columns; received: 'b', 'c' in some of '.*a.csv' and '.*b.csv'")
    write_csv(tmp_path / "b.csv", ["a", "b"], [["x", 2]])
    refused("one type, one of Arrow's; received: 'a': .*int64 vs string|one type.*'a': .*string")
    (tmp_path / "b.csv").unlink()
    write(tmp_path / "a.tfrecord", [example(x=1)])
    refused("files of one format.*with 1 csv, 1 tfrecord|files of one format.*with 1 tfrecord, 1 csv")
    refused("--types are for CSV files", types={"a": "int64"}, format="tfrecord")
    assert formats.read("train", str(tmp_path), format="csv").format == "csv"
    (tmp_path / "one.png").write_bytes(image((1, 1), 0))
    refused("a folder for each class", format="images", path="one.png")
    (tmp_path / "text.txt").write_text("x")
    refused("with none of these", path="text.txt")
    typed = formats.read("train", str(tmp_path / "a.csv"), types={"b": "bool"})
    with pytest.raises(ray.exceptions.RayTaskError, match="values of the types of its columns; received: '.*a.csv'"):
        typed.dataset.materialize()
