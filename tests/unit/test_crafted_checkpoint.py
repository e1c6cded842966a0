"""A crafted checkpoint runs nothing: whatever is in it, and however it is read. No Ray."""

import io
import json
import os
import pickle
import sys
import zipfile

import keras
import numpy as np
import pytest
from keras.src.saving import serialization_lib
from ray.train import Checkpoint

from raytf.errors import ConfigError
from raytf.storage import checkpoint_files
from raytf.train.evaluator import EvaluationResults, Evaluator
from raytf.worker import checkpoint, model_loading
from raytf.worker.callback_state import CallbackStates
from tests.logged import warnings_logged
from tests.unit.test_checkpoint import Bomb, functional, saved
from tests.unit.test_evaluator import Memory


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint, and (rows, the predictions of its model)."""
    folder = tmp_path_factory.mktemp("whole")
    states = CallbackStates([keras.callbacks.EarlyStopping("loss")])
    model, x = saved(folder, functional, states, rate=0.1)
    return folder, x, np.asarray(model(x))


@pytest.fixture
def crafted(whole, tmp_path):
    """(a copy of it to change, where a bomb makes a folder)."""
    folder = tmp_path / "checkpoint_1"
    folder.mkdir()
    for name in os.listdir(whole[0]):
        (folder / name).write_bytes((whole[0] / name).read_bytes())
    exploded = tmp_path / "exploded"
    yield folder, exploded
    assert not exploded.exists()
    assert serialization_lib.in_safe_mode() is None


def ways(folder):
    """All ways in which a checkpoint is read: of each what it raised, or None."""
    model = functional({"units": 4})
    evaluator = object.__new__(Evaluator)  # without Ray, which would start it
    evaluator._model, evaluator._dataset, evaluator._record = model, np.zeros((2, 3)), EvaluationResults(Memory())
    evaluator._warned = None
    model.evaluate = lambda *a, **k: {}
    states = CallbackStates([keras.callbacks.EarlyStopping("loss")])

    def resume():
        checkpoint_files.check_folder(str(folder))
        checkpoint.read_state(str(folder))
        checkpoint.restore(str(folder), model, {"learning_rate": 0.2})
        checkpoint.restore_callbacks(str(folder), states)

    calls = {
        "load_model": lambda: model_loading.load_model(folder),
        "load_model of a Checkpoint": lambda: model_loading.load_model(Checkpoint.from_directory(str(folder))),
        "load_model of the file": lambda: model_loading.load_model(folder / "model.keras"),
        "load_model with build_model": lambda: model_loading.load_model(folder, build_model=lambda c: functional(c)),
        "fit that goes on": resume,
        "restore": lambda: checkpoint.restore(str(folder), model, {"learning_rate": 0.2}),
        "restore_callbacks": lambda: checkpoint.restore_callbacks(str(folder), states),
        "history": lambda: checkpoint_files.read_state_of(Checkpoint.from_directory(str(folder))),
        "evaluator": lambda: evaluator.evaluate(Checkpoint.from_directory(str(folder)), "asked"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = None
        except Exception as error:
            found[name] = error
    return found


def test_the_bombs_of_these_tests_go_off(tmp_path):
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    assert (tmp_path / "exploded").exists()
    np.savez(tmp_path / "a.npz", np.array([Bomb(str(tmp_path / "too"))], object))
    np.load(tmp_path / "a.npz", allow_pickle=True)["arr_0"]
    assert (tmp_path / "too").exists()


@pytest.mark.slow
def test_pickles_in_the_same_folder_are_never_read(crafted, whole):
    folder, exploded = crafted
    bomb = pickle.dumps(Bomb(str(exploded)))
    for name in ("build.pkl", "callbacks.pkl", "error.pkl", "state.pkl", "model.pkl", ".metadata.json", "x.npy"):
        (folder / name).write_bytes(bomb)
    assert set(ways(folder).values()) == {None}
    predicted = model_loading.load_model(folder)(whole[1])
    np.testing.assert_array_equal(predicted, whole[2])


PARTS = ["model.keras", "state.json", "seeds.npz", "callbacks.json", "callbacks.npz", "build.json", "manifest.json"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fits", [True, False], ids=["manifest fits", "manifest does not"])
def test_pickle_instead_of_a_part_is_refused(crafted, part, fits):
    folder, exploded = crafted
    (folder / part).write_bytes(pickle.dumps(Bomb(str(exploded))))
    if fits and part != "manifest.json":
        fit_manifest(folder)
    found = ways(folder)
    assert all(error is None or isinstance(error, ConfigError) for error in found.values()), found
    assert any(found.values())


def fit_manifest(folder):
    (folder / "manifest.json").unlink()
    checkpoint_files.write_manifest(str(folder))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["seeds.npz", "callbacks.npz"])
def test_arrays_of_objects_are_refused(crafted, part):
    folder, exploded = crafted
    np.savez(folder / part, np.array([Bomb(str(exploded))], object))
    fit_manifest(folder)
    found = ways(folder)
    assert part in str(found["fit that goes on"]) and isinstance(found["fit that goes on"], ConfigError)


def test_packed_arrays_are_refused(crafted):
    folder, _ = crafted
    np.savez_compressed(folder / "seeds.npz", np.zeros(10**6))
    fit_manifest(folder)
    assert "it is compressed" in str(ways(folder)["fit that goes on"])


def test_the_import_path_of_build_model_is_not_imported(crafted, tmp_path, monkeypatch):
    folder, exploded = crafted
    (tmp_path / "raytf_bomb.py").write_text(f"import os\nos.mkdir({str(exploded)!r})\ndef build(config): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = json.loads((folder / "build.json").read_text()) | {"build_model": "raytf_bomb:build"}
    (folder / "build.json").write_text(json.dumps(record))
    with_config(folder, {"class_name": "build", "module": "raytf_bomb", "config": {}})
    fit_manifest(folder)
    found = ways(folder)
    assert "raytf_bomb:build" in str(found["load_model"]) and isinstance(found["load_model"], ConfigError)
    assert found["load_model with build_model"] is None, "of the model's file the weights alone are read"
    assert "raytf_bomb" not in sys.modules


def test_state_cannot_point_callbacks_elsewhere(crafted, tmp_path):
    """Neither arguments nor paths nor Keras' own attributes come from a checkpoint."""
    folder, _ = crafted
    entry = {"class": "ModelCheckpoint", "arguments": {}, "attributes": {}}
    for name, value in {"filepath": "x.keras", "_place": "/etc/x", "_up": "a/../../x", "_uri": "s3://x"}.items():
        entry["attributes"][name] = {"value": value, "derived": False}
    entry["attributes"]["params"] = {"value": {}, "derived": False}
    (folder / "callbacks.json").write_text(json.dumps({"callbacks": [entry]}))
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "mine.keras"), "loss")
    before = dict(vars(saver))
    checkpoint.restore_callbacks(str(folder), CallbackStates([saver]))
    assert vars(saver) == before


def with_config(folder, config, **members):
    """Gives `model.keras` another config, and more members."""
    with zipfile.ZipFile(folder / "model.keras") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        for name, content in (files | members).items():
            archive.writestr(name, content)


def sequential(*layers):
    return {"class_name": "Sequential", "module": "keras", "config": {"name": "m", "layers": list(layers)}}


def dense(**config):
    layer = {"class_name": "Dense", "module": "keras.layers", "config": {"units": 1, **config}, "build_config": None}
    return sequential({**layer, "build_config": {"input_shape": [None, 3]}})


def function(module, name):
    return {"class_name": "function", "module": module, "config": name, "registered_name": name}


def by_lambda(path):
    """A layer of Python's own code, as Keras saves it."""
    layer = keras.layers.Lambda(eval(f"lambda x: (__import__('os').mkdir({path!r}), x)[1]"), output_shape=(3,))
    model = keras.Sequential([keras.Input((3,))])
    config = keras.saving.serialize_keras_object(model)
    config["config"]["layers"].append(keras.saving.serialize_keras_object(layer))
    return config


CONFIGS = {
    "os.mkdir as a class": lambda path: {"class_name": "mkdir", "module": "os", "config": {"path": path}},
    "os.system as an activation": lambda path: dense(activation=function("os", "system")),
    "eval as an activation": lambda path: dense(activation=function("builtins", "eval")),
    "a class of subprocess": lambda path: sequential(
        {"class_name": "Popen", "module": "subprocess", "config": {"args": ["mkdir", path]}}
    ),
    "Keras' loader of marshalled code": lambda path: dense(
        activation=function("keras.src.utils.python_utils", "func_load")
    ),
    "the switch of safe mode": lambda path: dense(activation=function("keras.config", "enable_unsafe_deserialization")),
    "Keras' loader of files": lambda path: dense(activation=function("keras.utils", "get_file")),
    "a lambda": by_lambda,
    "a lambda as an initializer": lambda path: dense(
        kernel_initializer={"class_name": "__lambda__", "config": {"value": ["4wAAAA==", None, None]}}
    ),
    "a SavedModel": lambda path: sequential(
        {"class_name": "TFSMLayer", "module": "keras.layers", "config": {"filepath": path}}
    ),
    "a module of torch": lambda path: sequential(
        {"class_name": "TorchModuleWrapper", "module": "keras.layers", "config": {"module": "gASV"}}
    ),
    "no object": lambda path: [1, 2],
    "nested too deeply": lambda path: json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_names_code_is_refused(crafted, name):
    folder, exploded = crafted
    with_config(folder, CONFIGS[name](str(exploded)))
    fit_manifest(folder)
    found = ways(folder)
    assert isinstance(found["load_model"], ConfigError) and "Pass build_model=" in str(found["load_model"])
    assert found["load_model with build_model"] is None and found["fit that goes on"] is None


def test_archives_cannot_write_elsewhere(crafted, tmp_path):
    folder, exploded = crafted
    with zipfile.ZipFile(folder / "model.keras") as archive:
        config = json.loads(archive.read("config.json"))
    outside = os.path.relpath(exploded, "/")
    with_config(folder, config, **{f"../../../../../../{outside}": b"x", f"/{outside}": b"x", "assets/a": b"x"})
    fit_manifest(folder)
    with pytest.warns(UserWarning, match="Skipping invalid path"):
        model_loading.load_model(folder)


def test_weights_cannot_be_those_of_another_file(crafted, tmp_path):
    """HDF5 has links to other files of this machine."""
    import h5py

    folder, _ = crafted
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["vars/0"] = np.zeros((3, 4), "float32")
    with zipfile.ZipFile(folder / "model.keras") as archive:
        config, weights = json.loads(archive.read("config.json")), io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(weights, "a") as file:
        del file["layers/dense/vars"]
        file["layers/dense/vars"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/vars")
    with_config(folder, config, **{"model.weights.h5": weights.getvalue()})
    fit_manifest(folder)
    found = ways(folder)
    for way in ("load_model", "load_model with build_model", "fit that goes on", "evaluator"):
        assert isinstance(found[way], ConfigError), way


@pytest.mark.timeout(60)
def test_pipes_are_no_parts(crafted, tmp_path):
    """They would be waited for without an end."""
    folder, _ = crafted
    for part in ("state.json", "model.keras", "manifest.json"):
        content = (folder / part).read_bytes()
        (folder / part).unlink()
        os.mkfifo(folder / part)
        assert "is not a file" in str(ways(folder)["fit that goes on"])
        (folder / part).unlink()
        (folder / part).write_bytes(content)


WRONG_JSON = {"no UTF-8": b'{"optimizer": "\xff\x80"}', "deep": b"[" * 100_000, "a number": b'{"optimizer": 3}'}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WRONG_JSON)
@pytest.mark.parametrize("part", ["optimizers.json", "callbacks.json", "build.json", "state.json"])
def test_json_that_cannot_be_read_is_refused(crafted, part, name):
    folder, _ = crafted
    (folder / part).write_bytes(WRONG_JSON[name])
    fit_manifest(folder)
    found = ways(folder)
    assert all(error is None or isinstance(error, ConfigError) for error in found.values()), found
    assert any(isinstance(error, checkpoint_files.DamagedCheckpointError) for error in found.values()), found


def test_what_unpacks_to_absurd_sizes_is_not_unpacked(crafted):
    folder, _ = crafted
    with zipfile.ZipFile(folder / "model.keras") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(folder / "model.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        with archive.open("assets/blanks", "w") as part:
            for _ in range(80):
                part.write(b" " * (1 << 20))
    fit_manifest(folder)
    found = ways(folder)
    for way in ("load_model", "load_model with build_model", "load_model of the file", "fit that goes on", "evaluator"):
        assert "would unpack to" in str(found[way]), way
        assert isinstance(found[way], checkpoint_files.DamagedCheckpointError), way


def test_a_run_whose_list_is_lost_is_loaded_by_its_newest_whole_checkpoint(crafted, whole, tmp_path):
    crafted[0].rename(tmp_path / "run_checkpoint")
    for i in range(2):
        (tmp_path / "run" / f"checkpoint_{i}").mkdir(parents=True)
        for part in (tmp_path / "run_checkpoint").iterdir():
            (tmp_path / "run" / f"checkpoint_{i}" / part.name).write_bytes(part.read_bytes())
    (tmp_path / "run" / "checkpoint_1" / "model.keras").write_bytes(b"x")
    for text in (None, "", "[" * 100_000, "{}"):
        if text is not None:
            (tmp_path / "run" / "checkpoint_manager_snapshot.json").write_text(text)
        with warnings_logged("Ray's list of the checkpoints|Instead checkpoint_0"):
            model = model_loading.load_model(tmp_path / "run")
        np.testing.assert_array_equal(model.predict(whole[1], verbose=0), whole[2])
