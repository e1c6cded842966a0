"""Which of a run's checkpoints is loaded, the mean of several, and exports that compute what the model does. No Ray."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pyarrow.fs
import pytest
from ray.train import Checkpoint

import raytf
from raytf.errors import ConfigError
from raytf.worker import checkpoint
from raytf.worker import export as export_module
from raytf.worker.export import export
from tests.logged import warnings_logged, without_status
from tests.unit import object_store
from tests.unit.object_store import BUCKET

ROOT = pathlib.Path(raytf.__file__).parents[1]
WITHOUT_ONNX = any(importlib.util.find_spec(name) is None for name in ("tf2onnx", "onnxruntime"))
# name of the folder, step, validation loss of the last epoch that had ended
KEPT = [
    ("checkpoint_2026-01-01_00-00-01", 5, 0.3),
    ("checkpoint_2026-01-01_00-00-02", 10, 0.1),
    ("checkpoint_2026-01-01_00-00-03", 15, 0.2),
    ("step_000000000012", 12, 0.1),
    ("step_000000000015", 15, 0.1),
    ("step_000000000017", 17, 0.2),
]


def build(config):
    import keras

    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    model.compile("adam", "mse")
    return model


def text(config):
    """Several inputs, one of any length, and outputs by name."""
    import keras

    words, number = keras.Input((None,), dtype="int32", name="words"), keras.Input((2,), name="number")
    read = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(5, 4)(words))
    both = keras.layers.Concatenate()([read, number])
    outputs = {"a": keras.layers.Dense(3, "softmax", name="a")(both), "b": keras.layers.Dense(1, name="b")(both)}
    model = keras.Model({"words": words, "number": number}, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    return model


def subclassed(config):
    import keras

    class Unregistered(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(2)

        def call(self, x):
            return self.head(keras.ops.cast(x, "float32"))

    model = Unregistered()
    model.compile("sgd", "mse")
    return model


def save(folder, model, step, loss, inputs=None, build=build):
    folder.mkdir(parents=True)
    state = checkpoint.CheckpointState(
        step // 5, step, 7, False, [{"epoch": 1, "val_loss": loss, "accuracy": step / 20}]
    )
    checkpoint.save(str(folder), model, state, build=(build, {}, inputs))


def values(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the folder of a run whose weights are the step of each checkpoint, everywhere)."""
    folder, model = tmp_path_factory.mktemp("runs") / "first", build({})
    model.optimizer.build(model.trainable_variables)
    for name, step, loss in KEPT:
        model.set_weights([np.full(w.shape, step, w.dtype) for w in model.get_weights()])
        save(folder / name, model, step, loss)
    (folder / "step_000000000019").mkdir()  # its writer was ended: there is no manifest
    (folder / "step_000000000019" / "model.keras").write_bytes(b"")
    return folder


@pytest.fixture
def own_list_is_lost():
    """The folder is not one that Ray has written."""
    with warnings_logged("Ray's list of the checkpoints .* cannot be used"):
        yield


@pytest.mark.usefixtures("own_list_is_lost")
@pytest.mark.parametrize(
    ("choice", "value"),
    [
        ({}, 17),
        ({"which": "last"}, 17),
        ({"which": "best"}, 10),
        ({"which": "best", "metric": "accuracy", "mode": "max"}, 15),
        ({"which": 12}, 12),
        ({"which": np.int64(15)}, 15),
        ({"average": 1}, 17),
        ({"average": 3}, (17 + 15 + 12) / 3),
    ],
)
def test_the_checkpoint_that_is_chosen(run, choice, value):
    loaded = raytf.load_model(run, **choice)
    np.testing.assert_allclose(values(loaded), value, rtol=1e-7)
    assert loaded.optimizer is not None


def test_damaged_checkpoint_is_skipped_with_a_warning(run, tmp_path):
    import shutil

    shutil.copytree(run, tmp_path / "run")
    for name in ("step_000000000017", "checkpoint_2026-01-01_00-00-02"):
        part = tmp_path / "run" / name / "seeds.npz"
        part.write_bytes(part.read_bytes()[:-1])
    for choice, value, warning in [
        ({}, 15, "Damaged: step_000000000017 .* Using the checkpoint checkpoint_2026-01-01_00-00-03 instead"),
        (
            {"which": "best"},
            15,
            "Damaged: checkpoint_2026-01-01_00-00-02 .* Using the checkpoint checkpoint_2026-01-01_00-00-",
        ),
        ({"average": 2}, 13.5, "Damaged: step_000000000017"),
    ]:
        with warnings_logged(warning), warnings_logged("cannot be used"):
            np.testing.assert_allclose(values(raytf.load_model(tmp_path / "run", **choice)), value)
    with pytest.raises(ConfigError, match="whole; received: average=5 with 3 in"), warnings_logged(""):
        raytf.load_model(tmp_path / "run", average=5)
    with pytest.raises(ConfigError, match=r"step_000000000017 \(seeds.npz is"), warnings_logged(""):
        raytf.load_model(tmp_path / "run", which=17)


@pytest.mark.parametrize("source", [None, 5, ["run"]])
def test_what_is_no_source_is_refused(tmp_path, source):
    for way in (lambda: raytf.load_model(source), lambda: export(source, tmp_path / "out")):
        with pytest.raises(ConfigError, match="a Result, a Checkpoint or a path; received: a "):
            way()


@pytest.mark.slow
def test_a_uri_is_one_of_a_run_a_checkpoint_or_a_file(run, tmp_path):
    with object_store.serving() as storage:
        filesystem = storage.filesystem()
        pyarrow.fs.copy_files(str(run), f"{BUCKET}/team/run", destination_filesystem=filesystem)
        uri = lambda path: storage.uri(f"{BUCKET}/{path}")
        for path, choice, value in [
            ("team/run", {}, 17),
            ("team/run", {"which": "best"}, 10),
            ("team/run", {"average": 2}, 16),
            (f"team/run/{KEPT[0][0]}", {}, 5),
            (f"team/run/{KEPT[0][0]}/model.keras", {}, 5),
        ]:
            np.testing.assert_allclose(values(raytf.load_model(uri(path), **choice)), value)
        path = export(uri("team/run"), tmp_path / "best.keras", "keras", which="best")
        np.testing.assert_allclose(values(raytf.load_model(path)), 10)
        for wrong, message in [
            ("team/runs", "A model is loaded from a place that exists; received: 's3://runs/team/runs\\?scheme=http"),
            ("team", "A (model is loaded from a run's folder|run's folder needs a checkpoint)"),
            (f"team/run/{KEPT[0][0]}/state.json", "A model's file is a .keras file"),
        ]:
            with pytest.raises(ConfigError, match=message):
                raytf.load_model(uri(wrong))
        with pytest.raises(ConfigError, match="needs a checkpoint to load a model from; received: 's3://"):
            export(uri("team"), tmp_path / "out")
        storage.fault = lambda environ: "403 No"
        with pytest.raises(ConfigError, match="URI of a storage that can be read; received: 's3://.* there is .*Error"):
            raytf.load_model(uri("team/run"))
    with pytest.raises(ConfigError, match="URI of a storage that can be read; received: 'nothing://run'"):
        raytf.load_model("nothing://run")


def test_what_is_no_path_to_write_to_is_refused(run):
    with pytest.raises(ConfigError, match="An export is written to a path; received: a NoneType"):
        export(run, None)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"which": "newest"}, 'which must be "last", "best" or the step of a checkpoint; received: \'newest\''),
        ({"which": True}, "received: True"),
        ({"which": -1}, "received: -1"),
        ({"which": 11}, r"which=11 for .*first'. Choose one of 5, 10, 12, 15, 17\."),
        ({"which": "best", "metric": "auc"}, "metric='auc' for .* Choose one of accuracy, val_loss"),
        ({"which": "best", "mode": "least"}, "mode must be one of min, max"),
        ({"metric": "accuracy"}, "metric and mode say which checkpoint is the best"),
        ({"average": 0}, "average must be an integer of at least 1"),
        ({"average": 6}, "average=6 with 5 in"),
        ({"average": 2, "which": "best"}, "average=2 with which='best'. Leave one of them out"),
    ],
)
def test_wrong_choices(run, tmp_path, choice, message):
    for way in (lambda: raytf.load_model(run, **choice), lambda: export(run, tmp_path / "out", **choice)):
        with pytest.raises(ConfigError, match=message):
            way()
    assert not list(tmp_path.iterdir())


def test_a_single_checkpoint_leaves_no_choice(run):
    one = run / KEPT[0][0]
    for source in (one, Checkpoint.from_directory(str(one)), one / "model.keras"):
        with pytest.raises(ConfigError, match="which and average choose among the checkpoints of a run"):
            raytf.load_model(source, which="best")
        assert values(raytf.load_model(source)).max() == 5


READER = """
import io, sys, zipfile
import h5py, keras, numpy as np, tensorflow as tf
rows_of = {"build": np.ones((4, 3), "f"), "text": {"words": np.ones((4, 9), "int32"), "number": np.ones((4, 2), "f")}}
for name, rows in rows_of.items():
    served, loaded = tf.saved_model.load(name), keras.saving.load_model(name + ".keras")
    for kind, compute in {"served": served.serve, "loaded": loaded}.items():
        np.save(name + kind, np.concatenate([np.ravel(one) for one in tf.nest.flatten(compute(rows))]))
np.savez("keras", *keras.saving.load_model("run/build/model.keras").get_weights())
with zipfile.ZipFile("run/build/model.keras") as archive:
    file = h5py.File(io.BytesIO(archive.read("model.weights.h5")))
np.savez("h5py", *[file[f"layers/{layer}/vars/{i}"][()] for layer, count in [
    ("dense", 2), ("batch_normalization", 4), ("dense_1", 2)] for i in range(count)])
reader = tf.train.load_checkpoint("build/variables/variables")
names = [name for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name]
np.savez("tf_train", *[reader.get_tensor(name) for name in names])
assert not {"raytf", "ray"} & set(sys.modules)
"""


@pytest.mark.slow
def test_checkpoints_and_exports_are_read_without_raytf_and_compute_the_same(tmp_path):
    """A checkpoint's weights by Keras and by h5py; an export's by `tf.train` and as a SavedModel."""
    import keras

    models = {"build": build({}), "text": text({})}
    weights = models["build"].get_weights()
    models["build"].set_weights([w + np.float32(i + 1) / 8 for i, w in enumerate(weights)])  # no two are alike
    for kind, model in models.items():
        save(tmp_path / "run" / kind, model, 5, 0.1)
        path = raytf.export(tmp_path / "run" / kind, tmp_path / kind)
        assert path == str(tmp_path / kind)
        raytf.export(Checkpoint.from_directory(str(tmp_path / "run" / kind)), f"{path}.keras", "keras")
    assert sorted(os.listdir(tmp_path)) == ["build", "build.keras", "run", "text", "text.keras"]
    done = subprocess.run([sys.executable, "-c", READER], timeout=200, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {"build": np.ones((4, 3), "f"), "text": {"words": np.ones((4, 9), "int32"), "number": np.ones((4, 2), "f")}}
    for kind, model in models.items():
        wanted = np.concatenate([np.ravel(one) for one in keras.tree.flatten(model(rows[kind]))])
        for way in ("served", "loaded"):
            np.testing.assert_allclose(np.load(tmp_path / f"{kind}{way}.npy"), wanted, rtol=1e-6, atol=1e-6)
    for way in ("keras", "h5py", "tf_train"):
        with np.load(tmp_path / f"{way}.npz") as found:
            read = [found[name] for name in found.files]
        for i, weight in enumerate(models["build"].get_weights()):
            its = read if way == "tf_train" else read[i : i + 1]  # whose order is TensorFlow's
            assert any(np.array_equal(weight, one) for one in its), (way, i)


def test_a_model_of_ones_own_classes_is_exported_by_its_inputs(tmp_path):
    import tensorflow as tf

    model = subclassed({})
    model(np.ones((1, 3), "int64"))
    save(tmp_path / "checkpoint", model, 5, 0.1, inputs=((3,), "int64"), build=subclassed)
    with pytest.raises(ConfigError, match="Pass build_model="):
        export(tmp_path / "checkpoint", tmp_path / "model")
    export(tmp_path / "checkpoint", tmp_path / "model", build_model=subclassed)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(np.ones((2, 3), "int64")), model(np.ones((2, 3), "int64")), rtol=1e-6)
    with pytest.raises(ConfigError, match="Keras can load without build_model"):
        export(tmp_path / "checkpoint", tmp_path / "model.keras", "keras", build_model=subclassed)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "model"]


@pytest.mark.parametrize(
    ("left", "right", "far"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0),
        ([0.5, 0.0], [0.5, 1e-3], 1e-3),
        ([0.0, 1e3], [1e-3, 1e3], 1e-6),
        ([np.nan, np.inf, 1], [np.nan, np.inf, 1], 0),
        ([1.0, 2.0], [np.nan, 2.0], np.nan),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([b"a", b"b"], [b"a", b"c"], 1),
        ([1, 5], [1, 4], 0.2),
        ([], [], 0),
    ],
)
def test_how_far_outputs_are(left, right, far):
    np.testing.assert_allclose(export_module._distance(np.array(left), np.array(right)), far)


def noisy(config):
    import keras

    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.uniform(keras.ops.shape(x))

    model = keras.Sequential([keras.Input((3,)), Noisy()])
    model.compile("sgd", "mse")
    return model


def of_two_rows(config):
    import keras

    class Grows(keras.layers.Layer):
        """Another value each time that its graph is made."""

        made = 0

        def call(self, x):
            Grows.made += 1
            return x * (1.0 + 1e-4 * Grows.made)

    model = keras.Sequential([keras.Input((3,)), Grows()])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [(noisy, "gives others each time"), (of_two_rows, "What is exported computes what the model does, to 1e-06; rec")],
)
def test_an_export_that_is_not_the_model_leaves_nothing(tmp_path, kind, message):
    save(tmp_path / "checkpoint", kind({}), 5, 0.1, build=kind)
    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "checkpoint", tmp_path / "model", build_model=kind)
    assert os.listdir(tmp_path) == ["checkpoint"]


def typed(folder, *arguments):
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "raytf.cli", "export", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )


WRONG = {
    "nowhere --output out": "A model is loaded from a path that exists; received: 'nowhere' in ",
    "empty --output out": "needs a checkpoint to load a model from; received: 'empty'",
    "first --output out --format h5": "Invalid value for '--format': 'h5' is not one of 'saved_model', 'keras', 'onnx'",
    "first --output empty": "An export is written to a path that does not exist; received: 'empty'",
    "first --output no/out": "An export is written into a folder that exists",
    "first --output s3://b/out": "An export is written on this machine",
    "first --output out --format keras": "The name of a file of Keras ends in .keras; received: 'out'",
    "first --output out --which 11": "Choose one of 5, 10, 12, 15, 17",
    "first --output out --which newest": "'newest' is not one of 'last', 'best' and the steps",
    "first --output out --average 6": "average=6 with 5",
    "first --output out --which best --average 2": "Leave one of them out",
    "first/checkpoint_2026-01-01_00-00-01 --output out --which 5": "which and average choose among",
    "first --output out --model json": "A model is named as MODULE:FUNCTION",
}
if WITHOUT_ONNX:
    WRONG["first --output out --format onnx"] = (
        "format='onnx' without tf2onnx and onnxruntime. Install them (pip install"
    )


@pytest.mark.sampled(7)
@pytest.mark.parametrize("command", WRONG)
def test_errors_are_raised_before_ray_and_tensorflow_are_imported(run, tmp_path, command):
    for name in ("ray", "tensorflow", "keras"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
    (tmp_path / "empty").mkdir()
    (tmp_path / "first").symlink_to(run)
    done = typed(tmp_path, *command.split())
    usage, *_, sentence = without_status(done.stderr)
    assert done.returncode == 2 and sentence.startswith("Error: ") and WRONG[command] in sentence, done.stderr
    assert usage.startswith("Usage: ") and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_as_it_is_typed(run, tmp_path):
    done = typed(tmp_path, str(run), "-o", "served", "--which", "best", "--metric", "accuracy", "--mode", "max")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'served'}\n" and (tmp_path / "served" / "saved_model.pb").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(WITHOUT_ONNX, reason="its converter is not installed")
def test_onnx_where_its_converter_is_installed(tmp_path):
    save(tmp_path / "checkpoint", text({}), 5, 0.1)
    done = typed(tmp_path, "checkpoint", "-o", "model.onnx", "--format", "onnx")
    assert done.returncode == 0, done.stderr
    assert os.path.getsize(tmp_path / "model.onnx") > 1000
