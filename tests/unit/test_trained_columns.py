"""The data of a run's model: columns, sizes of images and classes are those of the training unless others are given."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pytest

from raytf.data import class_names, columns, files, formats
from raytf.data.columns import Column
from raytf.errors import ConfigError
from raytf.identity import fingerprint
from raytf.storage.checkpoint_files import DamagedCheckpointError
from raytf.worker import checkpoint, model_loading
from tests.logged import lines_logged, warnings_logged

NOTHING = {"features": None, "labels": None, "sample_weights": None}
TRAINED = NOTHING | {"features": ["b", Column("a", fill=0)], "labels": "y"}
PHOTO = Column("photo", image=(8, 6, 3))


def opened(*names: str, format: str = "csv") -> formats.OpenedFiles:
    return formats.OpenedFiles(format, None, pa.schema([(name, pa.float32()) for name in names]))


def test_missing_values_are_filled_by_values_of_the_columns_types():
    files = formats.OpenedFiles("csv", None, pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float32()}))
    given = NOTHING | {"features": {"x": ["a", "c"], "text": "b"}}
    roles = formats.roles(files, given, None, fill={"a": "-1", "b": "none"})
    assert roles["features"] == {"x": [Column("a", fill=-1), "c"], "text": Column("b", fill="none")}
    trained = formats.roles(opened("a", "b", "y"), NOTHING, None, TRAINED, fill={"b": "0.5"})
    assert trained["features"] == [Column("b", fill=0.5), Column("a", fill=0)]
    for fill, message in (({"a": "few"}, "a=few for int64"), ({"d": "0"}, "'d'. Name one of a, b, c")):
        with pytest.raises(ConfigError, match=re.escape(message)):
            formats.roles(files, given, None, fill=fill)


def test_the_columns_of_the_training_are_the_default_in_their_order():
    with lines_logged() as lines:
        assert formats.roles(opened("a", "b", "y"), NOTHING, None, TRAINED) == TRAINED
        given = NOTHING | {"features": ["b", "a"], "labels": "y"}
        assert formats.roles(opened("a", "b", "y"), given, None, TRAINED) == TRAINED, "with the options of the run"
    assert not lines


def test_other_columns_than_those_of_the_training_are_warned_of():
    given = NOTHING | {"features": ["a", "b"]}
    with warnings_logged("--features a,b: the run was trained with b,a"):
        chosen = formats.roles(opened("a", "b", "y"), given, None, TRAINED)
    assert chosen["features"] == ["a", "b"] and chosen["labels"] == "y"


def test_sample_weights_of_the_training_are_used_where_the_data_has_them():
    weighted = TRAINED | {"sample_weights": "w"}
    assert formats.roles(opened("a", "b", "y", "w"), NOTHING, None, weighted) == weighted
    weighted = TRAINED | {"sample_weights": "weight, kg"}
    assert formats.roles(opened("a", "b", "y", "weight, kg"), NOTHING, None, weighted) == weighted
    with warnings_logged("the run has sample weights of weight, kg, and the data does not"):
        assert formats.roles(opened("a", "b", "y"), NOTHING, None, weighted) == TRAINED


def test_images_have_the_size_of_the_training():
    images, trained = opened("image", "path", format="images"), {"features": PHOTO}
    roles = lambda *arguments, **more: formats.roles(images, NOTHING, *arguments, labelled=False, **more)["features"]
    assert roles(None, trained) == Column("image", image=(8, 6, 3))
    with warnings_logged("--image-size 4x4x3: the run was trained with 8x6x3"):
        assert roles((4, 4, 3), trained) == Column("image", image=(4, 4, 3))
    assert roles(None, None, input_size=(2, 2, 1)) == Column("image", image=(2, 2, 1)), "the size that the model takes"
    assert roles((3, 3, 1), None, input_size=(2, 2, 1)) == Column("image", image=(3, 3, 1))


def test_rows_to_predict_need_no_label():
    unlabelled = lambda *names: formats.roles(opened(*names), NOTHING, None, labelled=False)["features"]
    assert unlabelled("a", "b") == ["a", "b"] and unlabelled("a") == "a" and unlabelled("a", "y") == "a"
    with pytest.raises(ConfigError, match="if the label is known"):
        formats.roles(opened("a", "b"), NOTHING, None)


def test_classes_are_numbered_as_in_the_training(tmp_path):
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "1.png").touch()
    found = files.listed(str(tmp_path))
    rows, classes = formats._labelled(found, {"label": ["bird", "cat", "dog"]})
    assert rows["label"].to_pylist() == [2] and classes == {"label": ["bird", "cat", "dog"]}
    with pytest.raises(ConfigError, match="Classes must be those of the training data; received: dog"):
        formats._labelled(found, {"label": ["bird", "cat"]})


@pytest.mark.parametrize(
    ("outputs", "classes", "threshold", "expected"),
    [
        ([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1]], 3, None, [1, 0]),
        ([[0.4], [0.6]], 2, 0.5, [0, 1]),
        ([0.4, 0.6], 2, 0.5, [0, 1]),
        ([[0.4], [0.6]], 2, None, None),
        ([[0.1, 0.9]], 3, None, None),
        ([[0.4]], 1, 0.5, None),
    ],
)
def test_the_class_of_a_row(outputs, classes, threshold, expected):
    numbers = class_names.numbers_of(np.array(outputs), classes, threshold)
    assert (numbers if numbers is None else numbers.tolist()) == expected


def test_a_prediction_has_its_path_and_the_name_of_its_class():
    paths = pa.chunked_array([["a.png", "b.png"]])
    values = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([[0.1, 0.9], [0.7, 0.3]]))
    table = class_names._named(pa.table({"predictions": values}), paths, ["cat", "dog"], None)
    assert table.column_names == ["path", "class", "predictions"] and table["class"].to_pylist() == ["dog", "cat"]
    assert table["path"].to_pylist() == ["a.png", "b.png"]
    outputs = {"class": pa.array([1.0, 2.0]), "more": pa.array([1.0, 2.0])}
    table = class_names._named(pa.table(outputs), paths, ["cat", "dog"], None)
    assert table["class"].to_pylist() == [1.0, 2.0], "an output of the model keeps its name"


@pytest.fixture
def stored(tmp_path):
    """A function that stores a checkpoint with an identity, and returns what its model's data was."""
    import keras

    def store(identity):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        folder = tmp_path / f"checkpoint_{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        identity = json.loads(json.dumps(identity))
        checkpoint.save(str(folder), model, checkpoint.CheckpointState(1, 3, 0, False, [{"epoch": 1}], identity))
        return model_loading.columns_of(model_loading.load_model(str(folder)))

    return store


def test_a_checkpoint_keeps_what_evaluation_needs_of_the_data(stored):
    given = {"features": PHOTO, "labels": "kind", "sample_weights": None}
    parsed = {role: columns.parse(spec, role) for role, spec in given.items()}
    described = {role: fingerprint.columns_fingerprint(spec) for role, spec in parsed.items()}
    identity = {"columns": described, "classes": {"kind": ["cat", "dog"]}}
    assert stored(identity) == given | {"map": None, "classes": {"kind": ["cat", "dog"]}}
    earlier = {"columns": {"features": "image"}}
    assert stored(earlier) == NOTHING | {"features": "image", "map": None, "classes": {}} and stored({}) is None
    for wrong in ([], {"kind": "cat"}, {"kind": [1]}):
        with pytest.raises(DamagedCheckpointError, match="its classes are no lists of names"):
            stored(identity | {"classes": wrong})
