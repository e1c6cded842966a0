"""A file that names Keras 2 as its writer runs nothing, and is loaded only where that is given. No Ray."""

import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raytf
from raytf.errors import ConfigError
from raytf.worker import legacy_models

tf_keras = pytest.importorskip("tf_keras")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(a file of Keras 2, its model)."""
    inputs = tf_keras.Input((3,))
    hidden = tf_keras.layers.Dense(4, "relu", kernel_regularizer="l2")(inputs)
    hidden = tf_keras.layers.BatchNormalization()(hidden)
    model = tf_keras.Model(inputs, tf_keras.layers.Dense(1, tf_keras.activations.tanh)(hidden))
    model.compile(tf_keras.optimizers.Adam(0.1), loss=tf_keras.losses.mean_squared_error, metrics=["mae"])
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    path = tmp_path_factory.mktemp("whole") / "model.keras"
    model.save(path)
    return path, model


def crafted(whole, path, change):
    """A copy of the file with another config."""
    with zipfile.ZipFile(whole[0]) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "config.json":
                config = json.loads(content)
                change(config)
                content = json.dumps(config).encode()
            target.writestr(name, content)
    return path


@pytest.mark.slow
def test_legacy_file_is_loaded_only_on_request(whole):
    path, model = whole
    with pytest.raises(ConfigError, match="legacy_keras=True"):
        raytf.load_model(path)
    loaded = raytf.load_model(path, legacy_keras=True)
    np.testing.assert_array_equal(loaded(np.ones((2, 3))), model(np.ones((2, 3))))
    assert isinstance(loaded.optimizer, tf_keras.optimizers.Adam)
    built = raytf.load_model(path, build_model=lambda config: tf_keras.models.clone_model(model))
    np.testing.assert_array_equal(built(np.ones((2, 3))), model(np.ones((2, 3))))


BOMB = {"class_name": "function", "module": "os", "config": "mkdir", "registered_name": "function"}
LAMBDAS = {
    "a name of os": {"class_name": "Lambda", "config": {"function": "mkdir", "function_type": "function"}},
    "as of before": {"class_name": "Lambda", "config": {"function": BOMB, "module": "os"}, "module": "keras.layers"},
    "an operation": {"class_name": "TFOpLambda", "config": {"function": "io.write_file"}, "module": "keras.layers"},
    "a node": {"class_name": "TensorFlowOpLayer", "config": {"node_def": ""}, "module": "keras.layers"},
    "a class": {"class_name": "Popen", "module": "subprocess", "config": {"args": "true"}, "registered_name": None},
    "a private module": {"class_name": "get_file", "module": "keras.utils", "config": {}},
}


@pytest.mark.parametrize("name", LAMBDAS)
def test_a_layer_that_could_run_code_is_refused(whole, tmp_path, name):
    def change(config):
        config["config"]["layers"][1] |= LAMBDAS[name]

    with pytest.raises(ConfigError, match="could run code"):
        raytf.load_model(crafted(whole, tmp_path / "model.keras", change), legacy_keras=True)


@pytest.mark.parametrize("place", ["activation", "kernel_initializer", "kernel_regularizer", "loss", "optimizer"])
@pytest.mark.parametrize("module", ["os", "builtins", "posix", "keras_others", "tf_keras.src.utils.io_utils", None])
def test_function_of_others_is_refused_anywhere_in_the_file(whole, tmp_path, place, module):
    def change(config):
        layer = config["config"]["layers"][1]["config"]
        (layer if place in layer else config["compile_config"])[place] = {**BOMB, "module": module}

    with pytest.raises(ConfigError, match="could run code"):
        raytf.load_model(crafted(whole, tmp_path / "model.keras", change), legacy_keras=True)


@settings(deadline=None)
@given(st.text(max_size=12), st.none() | st.text(max_size=12) | st.sampled_from(["keras", "keras.layers", "os"]))
def test_no_name_is_taken_but_those_of_keras_and_given_ones(name, module):
    found = {"class_name": name, "module": module, "config": {}}
    try:
        legacy_models.check(found, {"given": int})
    except ConfigError:
        return
    assert name == "given" or name in (*legacy_models._VALUES, *legacy_models._INNER) or name[:1].isupper()
