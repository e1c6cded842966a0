"""A checkpoint holds the complete state, and is loaded as a model with or without Keras' help. No Ray."""

import dataclasses
import json
import os
import pathlib
import pickle
import re
import warnings

import numpy as np
import pyarrow.fs
import pytest
from ray.train import Checkpoint

import raytf
from raytf.errors import ConfigError
from raytf.parallel import model_optimizers
from raytf.storage import checkpoint_files
from raytf.storage.checkpoint_files import DamagedCheckpointError
from raytf.worker import checkpoint, model_loading, model_source
from raytf.worker.callback_state import CallbackStates
from tests.logged import warnings_logged

WRITTEN = pathlib.Path(__file__).parent / "checkpoints"


def functional(config):
    import keras

    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(config["units"]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(config.get("learning_rate", 0.1)), "mse")
    return model


def subclassed(config):
    import keras

    class Unregistered(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = keras.layers.Dense(config["units"]), keras.layers.Dense(1)

        def call(self, x):
            return self.head(self.hidden(x))

    model = Unregistered()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def of_two_inputs(config):
    import keras

    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model([a, b], keras.layers.Dense(1)(keras.layers.Add()([a, b])))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def trained(build, steps=3):
    import keras

    keras.utils.set_random_seed(3)
    model = build({"units": 4})
    model.run_eagerly = True  # three steps of a small model take less time than to trace one
    x = np.random.default_rng(0).normal(size=(8, 3))
    model.fit(x, x[:, :1], epochs=steps, batch_size=8, shuffle=False, verbose=0)
    return model, x


def saved(folder, build, states=None, rate=None, **config):
    model, x = trained(build)
    state = checkpoint.CheckpointState(3, 3, 7, False, [{"epoch": 1, "loss": 0.5}], {}, rate)
    checkpoint.save(str(folder), model, state, states, (build, {"units": 4, **config}, ((3,), "float32")))
    return model, x


def of_format_1(folder):
    """The folder as raytf wrote it at first, with pickles that note it when they are read."""
    state = json.loads((folder / "state.json").read_text())
    for name in ("version", "learning_rate"):
        state.pop(name)
    (folder / "state.json").write_text(json.dumps(state))
    for name in ("manifest.json", "callbacks.json", "callbacks.npz", "build.json"):
        (folder / name).unlink()
    for name in ("callbacks.pkl", "build.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(str(folder / "exploded"))))


class Bomb:
    """Its pickle makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_training_resumes_as_if_nothing_had_happened(tmp_path):
    """Weights, optimizer and the seeds of Dropout: three steps more are the same in a restored model."""
    model, x = saved(tmp_path, functional)
    checkpoint_files.check_folder(str(tmp_path))
    assert checkpoint.read_state(str(tmp_path)).step == 3
    other = functional({"units": 4})
    checkpoint.restore(str(tmp_path), other)
    for m in (model, other):
        m.run_eagerly = True
        m.fit(x, x[:, :1], epochs=3, batch_size=8, shuffle=False, verbose=0)
    for left, right in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_rate_that_the_config_changed_holds_and_one_that_a_callback_changed_is_restored(tmp_path):
    saved(tmp_path, functional, rate=0.1)  # the rate of the model, not of this config
    model = functional({"units": 4, "learning_rate": 0.5})
    checkpoint.restore(str(tmp_path), model, {"learning_rate": 0.5})
    assert float(model.optimizer.learning_rate) == 0.5
    model = functional({"units": 4, "learning_rate": 0.5})
    checkpoint.restore(str(tmp_path), model, {"learning_rate": 0.1})
    assert float(model.optimizer.learning_rate) == np.float32(0.1)


def test_global_seed_is_resumed_whether_or_not_something_has_drawn_from_it_yet(tmp_path):
    """A callback draws at the end of an epoch, after which a process that resumes starts without such a draw."""
    import keras

    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    model, _ = saved(tmp_path / "without", functional)
    keras.random.normal((2,))
    checkpoint.save(str(tmp_path / "with"), model, checkpoint.CheckpointState(3, 3, 7, False, [], {}, None), None)
    drawn = np.asarray(keras.random.normal((2,)))
    checkpoint.restore(str(tmp_path / "without"), functional({"units": 4}))
    keras.utils.clear_session()
    checkpoint.restore(str(tmp_path / "with"), functional({"units": 4}))
    np.testing.assert_array_equal(keras.random.normal((2,)), drawn)


def test_a_model_that_keras_knows_is_loaded_with_its_optimizer(tmp_path):
    model, x = saved(tmp_path, functional)
    loaded = model_loading.load_model(tmp_path)
    np.testing.assert_array_equal(loaded(x), model(x))
    assert int(loaded.optimizer.iterations) == 3


def test_a_class_that_is_not_given_is_named(tmp_path):
    import keras

    class Scale(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    keras.Sequential([keras.Input((2,)), Scale()]).save(tmp_path / "own.keras")
    with pytest.raises(ConfigError, match=r"Could not locate class 'Scale'.*or custom_objects={name: class}"):
        model_loading.load_model(tmp_path / "own.keras")


@pytest.mark.slow
def test_a_model_that_keras_does_not_know_is_built_by_the_function_that_is_passed(tmp_path, monkeypatch):
    model, x = saved(tmp_path, subclassed, tokenizer=object(), sizes=(1, 2))
    with pytest.raises(ConfigError, match=r"Pass build_model=.*test_checkpoint:subclassed.* config=.*'tokenizer'"):
        model_loading.load_model(tmp_path)
    seen = []
    loaded = model_loading.load_model(tmp_path, build_model=lambda c: seen.append(c) or subclassed(c), config={"a": 1})
    assert seen == [{"units": 4, "sizes": (1, 2), "a": 1}]
    np.testing.assert_array_equal(loaded(x), model(x))
    assert int(loaded.optimizer.iterations) == 3
    with pytest.raises(ConfigError, match=r"'tokenizer' is missing.*Pass config="):
        model_loading.load_model(tmp_path, build_model=lambda config: config["tokenizer"])
    with pytest.raises(ConfigError, match="build_model must build the model that was saved.* but received"):
        model_loading.load_model(tmp_path, build_model=subclassed, config={"units": 5})
    with pytest.raises(ConfigError, match="build_model must build the model that was saved.*expects 2 named input"):
        model_loading.load_model(tmp_path, build_model=of_two_inputs)
    with pytest.raises(ConfigError, match="build_model must be a function; received: 'module:f'"):
        model_loading.load_model(tmp_path, build_model="module:f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras': the optimizer's variables, which nobody asked for, are not loaded
        model_loading.load_model(tmp_path, False, build_model=subclassed)
    monkeypatch.setattr(model_source, "_runs_of_process", {})
    model_source.remember_run(str(tmp_path.parent), subclassed, {"tokenizer": "here"})
    with pytest.warns(UserWarning, match="built with the trainer's build_model"):
        loaded = model_loading.load_model(tmp_path)
    np.testing.assert_array_equal(loaded(x), model(x))


def test_a_checkpoint_of_format_1_is_read_and_its_pickles_are_not(tmp_path):
    import keras

    model, x = saved(tmp_path, functional)
    of_format_1(tmp_path)
    checkpoint_files.check_folder(str(tmp_path))
    other, callback = functional({"units": 4}), keras.callbacks.EarlyStopping(patience=2)
    checkpoint.restore(str(tmp_path), other, {"learning_rate": 0.5})
    np.testing.assert_array_equal(model.get_weights()[0], other.get_weights()[0])
    with pytest.warns(UserWarning, match="callbacks start from scratch"):
        checkpoint.restore_callbacks(str(tmp_path), CallbackStates([callback]))
    for loaded in (model_loading.load_model(tmp_path), model_loading.load_model(tmp_path, build_model=lambda c: other)):
        np.testing.assert_array_equal(loaded(x), model(x))
    assert not (tmp_path / "exploded").exists()


def small(config):
    """Returns the model of the checkpoints in `checkpoints`."""
    import keras

    dense, dropout = keras.layers.Dense, keras.layers.Dropout
    layers = [keras.Input((3,), name="x"), dense(2, name="hidden"), dropout(0.5, seed=1, name="dropout")]
    model = keras.Sequential([*layers, dense(1, name="out")], name="small")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_checkpoint_that_an_older_raytf_wrote_is_still_read(version):
    """Format 2 was written by raytf of 2026-11-22, the others by that of 2026-11-24. Each weight holds its number
    from 1 on, and each momentum its own from 10 on; both are after two epochs, or one and a step."""
    import keras

    folder = str(WRITTEN / f"format_{version}")
    checkpoint_files.check_folder(folder)
    state = checkpoint.read_state(folder)
    assert (state.epoch, state.step, state.epoch_step) == ((1, 3, 1) if version == 3 else (2, 4, 0))
    assert (state.seed, state.learning_rate, state.history[0]) == (7, 0.1, {"epoch": 1, "loss": 0.5, "mae": 0.6})
    restored = small({})
    checkpoint.restore(folder, restored, {"learning_rate": 0.1})
    loaded, given = model_loading.load_model(folder), model_loading.load_model(folder, build_model=small)
    for model in (restored, loaded, given):
        assert [np.unique(w).tolist() for w in model.get_weights() if w.dtype.kind == "f"] == [[1], [2], [3], [4]]
        momenta = [np.unique(v).tolist() for v in model.optimizer.variables if len(v.shape)]
        assert momenta == [[12], [13], [14], [15]] and int(model.optimizer.iterations) == 4
    callback = keras.callbacks.EarlyStopping("loss", patience=3)
    callback.set_model(restored)
    callback.on_train_begin()
    checkpoint.restore_callbacks(folder, CallbackStates([callback]))
    assert callback.best < 1 and callback.wait == 1
    assert bool(state.metrics) == (version == 3) == bool(state.order)
    if version == 3:
        assert [len(one) for one in checkpoint.metrics_of(folder)] == [2, 2] and state.logs == {"loss": 0.3, "mae": 0.5}


def test_the_format_is_described_for_its_readers():
    """Every field of `state.json`, every file and every version is in its page, and nothing else."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-format.md").read_text()
    files, state, _, versions, _ = (
        re.findall(r"^\| `?([\w.]+)`? \|", part, re.MULTILINE)[1:] for part in text.split("\n## ")
    )
    assert state == ["version", *(field.name for field in dataclasses.fields(checkpoint.CheckpointState))]
    assert versions == [str(number + 1) for number in range(checkpoint_files.VERSION_OF_PARTS)]
    named = {value for name, value in vars(checkpoint_files).items() if name.isupper() and type(value) is str}
    assert set(files) == (named | {model_optimizers.FILE}) - {checkpoint_files.AT_ENDS}


def test_another_model_is_refused(tmp_path):
    saved(tmp_path, functional)
    with pytest.raises(ConfigError, match="build_model must still build the same model"):
        checkpoint.restore(str(tmp_path), functional({"units": 5}))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="A model is loaded from"):
        model_loading.load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"state.json is missing"):
        checkpoint.read_state(str(tmp_path))


def folder_of(path, **state):
    """A folder with all parts of a checkpoint, of which no model can be built."""
    path.mkdir()
    np.savez(path / "seeds.npz", np.arange(2))
    np.savez(path / "model.keras.npz", np.arange(100))
    (path / "model.keras.npz").rename(path / "model.keras")
    right = json.loads(checkpoint.CheckpointState(2, 8, 0, False, [{"epoch": 1}, {"epoch": 2}]).to_json())
    (path / "state.json").write_text(json.dumps(right | state))
    checkpoint_files.write_manifest(str(path))
    return path


@pytest.mark.parametrize("part", ["model.keras", "state.json", "seeds.npz", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut off", "changed"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_part_that_is_not_as_it_was_written_is_named(tmp_path, part, damage, version):
    folder = folder_of(tmp_path / "checkpoint_7")
    if version == 1:
        of_format_1_files(folder)
        if part == "manifest.json":
            return
    checkpoint_files.check_folder(str(folder))
    content = (folder / part).read_bytes()
    (folder / part).unlink()
    if damage != "missing":
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 128]) + content[middle + 1 :]
        (folder / part).write_bytes({"empty": b"", "cut off": content[:middle], "changed": changed}[damage])
    with pytest.raises(DamagedCheckpointError, match=rf"checkpoint_7 \(.*{part}"):
        checkpoint_files.check_folder(str(folder))


def of_format_1_files(folder):
    (folder / "manifest.json").unlink()
    state = json.loads((folder / "state.json").read_text())
    del state["version"]
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    "state",
    [
        *({"epoch": -1}, {"epoch": 1.5}, {"epoch": True}, {"step": "8"}, {"seed": None}, {"stopped": 0}),
        *({"history": {}}, {"history": [[]]}, {"identity": []}, {"learning_rate": "0.1"}, {"version": "2"}),
    ],
)
def test_a_state_of_wrong_types_is_refused(tmp_path, state):
    folder = folder_of(tmp_path / "checkpoint_7", **state)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint_7 \("):
        checkpoint_files.check_folder(str(folder))


def test_a_newer_format_is_refused_and_no_older_checkpoint_taken_in_its_place(tmp_path):
    newer = folder_of(tmp_path / "checkpoint_8", version=5)
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"version": 5}))
    older = folder_of(tmp_path / "checkpoint_7")
    with pytest.raises(ConfigError, match="checkpoint_8 of format 5. Use the raytf that wrote it") as caught:
        checkpoint_files.first_whole([Stored(newer), Stored(older)], lambda c: checkpoint_files.check_folder(c.path))
    assert not isinstance(caught.value, DamagedCheckpointError)


class Stored:
    """A checkpoint by its path."""

    filesystem = pyarrow.fs.LocalFileSystem()

    def __init__(self, path):
        self.path = str(path)


def test_the_first_whole_checkpoint_is_taken_and_the_others_are_named(tmp_path):
    folders = [folder_of(tmp_path / f"checkpoint_{i}") for i in (9, 8, 7)]
    (folders[0] / "seeds.npz").unlink()
    (folders[1] / "state.json").write_text("")
    stored = checkpoint_files.newest_first(map(Stored, reversed(folders)))
    with warnings_logged(r"checkpoint_9 \(seeds.npz.*checkpoint_8 \(state.json.*checkpoint_7 instead"):
        found, _ = checkpoint_files.first_whole(stored, lambda c: checkpoint_files.check_folder(c.path))
    assert found.path == str(folders[2])
    (folders[2] / "model.keras").write_bytes(b"")
    with pytest.raises(
        DamagedCheckpointError, match=r"checkpoint_9 \(.*checkpoint_8 \(.*checkpoint_7 \(model.keras is emp"
    ):
        checkpoint_files.first_whole(stored, lambda c: checkpoint_files.check_folder(c.path))


def test_a_checkpoint_of_a_loops_own_files_is_not_called_damaged(tmp_path):
    (tmp_path / "m.weights.h5").write_bytes(b"")
    with pytest.raises(ConfigError, match="reads checkpoints of raytf, in which is model.keras; .* with m.weights.h5"):
        raytf.load_model(Checkpoint(str(tmp_path)))
