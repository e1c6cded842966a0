"""`raytf.Predictor` as a function of batches: columns in, predictions added, equal to `model.predict`. No Ray."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

import raytf
from raytf.data import columns
from raytf.data.columns import Column
from raytf.errors import ConfigError
from raytf.fitting import predictor
from raytf.identity import fingerprint
from raytf.worker import checkpoint, model_source
from tests.logged import warnings_logged

ROWS = 7
BATCH = {"id": np.arange(ROWS), "a": np.arange(ROWS * 3.0).reshape(ROWS, 3), "b": np.linspace(0, 1, ROWS)}
BATCH["c"] = np.linspace(1, 2, ROWS)


def build(config):
    import keras

    keras.utils.set_random_seed(config.get("seed", 0))
    first, second = keras.Input((3,), name="first"), keras.Input((2,), name="second")
    x = keras.layers.Concatenate()([first, second])
    outputs = {"p": keras.layers.Dense(2, name="p")(x), "q": keras.layers.Dense(1, "sigmoid", name="q")(x)}
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile("sgd", {"p": "mse", "q": "mse"})
    return model


FEATURES = {"first": "a", "second": ["b", "c"]}
INPUTS = {"first": BATCH["a"], "second": np.stack([BATCH["b"], BATCH["c"]], 1)}


def save(folder, model, features=None, loss=0.5, step=3, **more):
    folder.mkdir(parents=True)
    recorded = {} if features is None else {"columns": {"features": fingerprint.columns_fingerprint(features)}, **more}
    state = checkpoint.CheckpointState(1, step, 0, False, [{"epoch": 1, "val_loss": loss}], recorded)
    checkpoint.save(str(folder), model, state)
    return str(folder)


@pytest.mark.slow
def test_a_run_names_its_columns_and_its_best_is_chosen(tmp_path):
    features = columns.parse(FEATURES, "features")
    models = [build({"seed": seed}) for seed in (0, 1)]
    run = tmp_path / "run"
    save(run / "checkpoint_2026-01-01_00-00-01", models[0], features, 0.1, 3)
    save(run / "checkpoint_2026-01-01_00-00-02", models[1], features, 0.2, 6)
    for which, model in (("best", models[0]), ("last", models[1]), (3, models[0])):
        with warnings_logged("Ray's list of the checkpoints"):
            found = raytf.Predictor(run, which=which)(BATCH)
        assert found.keys() == {*BATCH, "p", "q"} and found["id"] is not None
        np.testing.assert_array_equal(found["id"], BATCH["id"])
        expected = model.predict(INPUTS, verbose=0)
        for name in ("p", "q"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("made", [dict, lambda b: pa.table({k: list(v) for k, v in b.items()}), pd.DataFrame])
def test_each_format_of_a_batch(made):
    batch = {"id": BATCH["id"], "x": BATCH["b"].astype("float32")}
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
    found = raytf.Predictor(model, features=["x"], keep=["id"])(made(batch))
    assert found.keys() == {"id", "predictions"}
    np.testing.assert_array_equal(found["id"], batch["id"])
    np.testing.assert_allclose(found["predictions"], model.predict(batch["x"][:, None], verbose=0), rtol=1e-5)


def test_images_are_decoded_as_for_training():
    import keras
    import tensorflow as tf

    pixels = np.random.default_rng(0).integers(0, 255, (4, 6, 6, 3), dtype="uint8")
    files = np.array([tf.io.encode_png(one).numpy() for one in pixels], object)
    model = keras.Sequential([keras.Input((6, 6, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()])
    found = raytf.Predictor(model, features=Column("file", image=(6, 6, 3)), keep=[])({"file": files})
    np.testing.assert_allclose(found["predictions"], pixels.reshape(4, -1) / 255, rtol=1e-5)


def test_lists_and_tuples_of_outputs_and_names_of_inputs():
    import keras

    a = keras.Input((3,), name="a")
    model = keras.Model(a, [keras.layers.Dense(1)(a), {"z": keras.layers.Dense(2)(a)}])
    found = raytf.Predictor(model, keep=())(BATCH)
    assert {name: value.shape for name, value in found.items()} == {
        "predictions_0": (ROWS, 1),
        "predictions_1_z": (ROWS, 2),
    }
    alone = keras.Sequential([keras.Input((3,), name="a"), keras.layers.Dense(1)])
    both = build({})
    batch = {"first": BATCH["a"], "second": INPUTS["second"], "a": BATCH["a"]}
    for model, inputs in ((alone, BATCH["a"]), (both, INPUTS)):
        found, expected = raytf.Predictor(model, keep=[])(batch), model.predict(inputs, verbose=0)
        expected = expected if isinstance(expected, dict) else {"predictions": expected}
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_a_model_of_a_notebook_is_sent_once_and_read_once():
    import keras

    class Doubles(keras.layers.Layer):
        def call(self, x):
            return x * 2.0

    model = keras.Sequential([keras.Input((3,)), Doubles()])
    sender = raytf.Predictor(model, features="a", keep=[])
    one, two = pickle.loads(cloudpickle.dumps(sender)), pickle.loads(cloudpickle.dumps(sender))
    found = [copy(BATCH)["predictions"] for copy in (one, two)]
    np.testing.assert_allclose(found[0], BATCH["a"] * 2.0)
    np.testing.assert_array_equal(*found)
    assert predictor._loaded(one._source) is predictor._loaded(two._source), "tasks of a process share it"


def test_two_predictors_in_turn_load_their_models_once(monkeypatch):
    """Ray Data runs the steps of a pipeline in one task, batch by batch."""
    loaded = []
    monkeypatch.setattr(predictor, "_Loaded", loaded.append)
    predictor._loaded.cache_clear()
    sources = [predictor._Source(lambda name=name: name) for name in ("one", "other")]
    for source in sources * 2:
        predictor._loaded(source)
    predictor._loaded.cache_clear()
    assert loaded == ["one", "other"]


def test_a_run_that_only_build_model_builds_is_known_where_it_was_made(tmp_path, monkeypatch):
    import keras

    class Unregistered(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(2)

        def call(self, x):
            return self.head(x)

    def built(config):
        model = Unregistered()
        model(np.zeros((1, 3)))
        model.compile("sgd", "mse")
        return model

    model = built({})
    folder = tmp_path / "made" / "checkpoint_2026-01-01_00-00-01"
    folder.mkdir(parents=True)
    state = checkpoint.CheckpointState(1, 3, 0, False, [{"epoch": 1}], {})
    checkpoint.save(str(folder), model, state, build=(built, {}, ((3,), "float32")))
    with pytest.raises(ConfigError, match="build_model"):
        raytf.Predictor(folder, features="a")(BATCH)
    monkeypatch.setattr(model_source, "_runs_of_process", {})
    given = raytf.Predictor(folder, features="a", build_model=built)
    model_source.remember_run(str(folder.parent), built, {})
    known = cloudpickle.dumps(raytf.Predictor(folder, features="a"))
    monkeypatch.setattr(model_source, "_runs_of_process", {})  # as in another process
    with pytest.warns(UserWarning, match="it is built with the trainer's build_model"):
        found = pickle.loads(known)(BATCH)["predictions"]
    np.testing.assert_array_equal(found, given(BATCH)["predictions"])
    np.testing.assert_allclose(found, model.predict(BATCH["a"], verbose=0), rtol=1e-5)


def test_copies_in_one_process_load_the_run_once(tmp_path, monkeypatch):
    """Ray Data pickles a function for each task."""
    folder = save(tmp_path / "checkpoint_2026-01-01_00-00-01", build({}))
    loads, load = [], predictor.model_loading.load_model
    monkeypatch.setattr(predictor.model_loading, "load_model", lambda *a, **k: (loads.append(a), load(*a, **k))[1])
    sent = cloudpickle.dumps(raytf.Predictor(folder, features=FEATURES))
    found = [cloudpickle.loads(sent)(BATCH)["p"] for _ in range(3)]
    assert len(loads) == 1 and all((one == found[0]).all() for one in found)


def test_wrong_arguments_raise(tmp_path):
    import keras

    model = keras.Sequential([keras.Input((3,), name="other"), keras.layers.Dense(1, name="d")])
    wrong = [
        (lambda: raytf.Predictor(model, keep="id"), "keep must be a list"),
        (lambda: raytf.Predictor(model, which="best"), "which with a model"),
        (lambda: raytf.Predictor(tmp_path / "nowhere"), "a path that exists"),
        (lambda: raytf.Predictor(tmp_path, which="newest"), "which must be"),
        (lambda: raytf.Predictor(model)(BATCH), "needs features"),
        (lambda: raytf.Predictor(model, features="x")(BATCH), "features must name columns"),
        (lambda: raytf.Predictor(model, features="a", keep=["x"])(BATCH), "keep must name columns"),
        (lambda: raytf.Predictor(model, features="a")({**BATCH, "predictions": BATCH["b"]}), "'predictions' in both"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()


def test_run_with_a_map_of_its_own_is_reported(tmp_path):
    folder = save(tmp_path / "mapped", build({}), columns.parse(FEATURES, "features"), map="a function")
    with pytest.warns(UserWarning, match="trained with map="):
        raytf.Predictor(folder)(BATCH)


def test_an_empty_batch_stays_empty():
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert raytf.Predictor(model, features="a", keep=["id"])({k: v[:0] for k, v in BATCH.items()}).keys() == {"id"}


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=5)
PARTS = NAMES | st.builds(
    lambda name, fill, dtype: Column(name, fill=fill, dtype=dtype),
    NAMES,
    st.integers(-9, 9),
    st.sampled_from(["float32", "int64"]),
)
SPECS = PARTS | st.lists(PARTS, min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(SPECS | st.dictionaries(NAMES.filter(lambda name: name not in ("name", "stacked")), SPECS, min_size=1))
def test_columns_are_read_as_they_were_written(spec):
    parsed = columns.parse(spec, "features")
    assert columns.parse(columns.read(fingerprint.columns_fingerprint(parsed)), "features") == parsed


@pytest.mark.parametrize("found", [None, 3, [], {}, {"a": 3}, {"stacked": [{"x": 1}]}])
def test_columns_that_nobody_wrote_are_refused(found):
    with pytest.raises(ConfigError, match="names the columns"):
        columns.read(found)


def test_it_pickles_by_path(tmp_path):
    file = io.BytesIO()
    folder = save(tmp_path / "plain", build({}), columns.parse(FEATURES, "features"))
    pickle.dump(raytf.Predictor(folder), file)
    assert len(file.getvalue()) < 10_000, "no weight goes with it"
    assert pickle.loads(file.getvalue())(BATCH)["p"].shape == (ROWS, 2)


@pytest.mark.parametrize(
    ("shape", "features", "fits"),
    [((24, 1), ["b", "c"], False), ((3,), ["b", "c"], False), ((None, 1), "a", True), ((1,), "b", True)],
)
def test_rows_of_another_shape_are_refused(shape, features, fits):
    """A recurrent layer, or one that averages, would make something of them."""
    import keras

    inputs = keras.Input(shape, name="series")
    x = keras.layers.GlobalAveragePooling1D()(inputs) if len(shape) > 1 else inputs
    predict = raytf.Predictor(keras.Model(inputs, keras.layers.Dense(1)(x)), features=features)
    if fits:
        assert predict(BATCH)["predictions"].shape == (ROWS, 1)
    else:
        with pytest.raises(ConfigError, match=r"the model's input; received: \(2,\) for 'series', which takes"):
            predict(BATCH)


def test_rows_without_an_input_or_of_another_type_are_refused():
    import keras

    with pytest.raises(ConfigError, match="a column for each input of the model; received: 'first', and no 'second'"):
        raytf.Predictor(build({}), features={"first": "a"})(BATCH)
    words = keras.Input((), dtype="string", name="words")
    lengths = keras.layers.StringLookup(vocabulary=["a"], output_mode="one_hot")(words)
    predict = raytf.Predictor(keras.Model(words, keras.layers.Dense(1)(lengths)), features="b")
    with pytest.raises(
        ConfigError,
        match="Features must have the type of the model's input; received: float.* for 'words', which takes string",
    ):
        predict(BATCH)
