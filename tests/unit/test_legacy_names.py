"""An error that comes of a name that only Keras 2 has contains that, and the fix; other errors are left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raytf.compat import legacy_keras, legacy_names

OLD = {
    "tf.keras.losses.mean_absolute_error": "tf.keras.losses.mean_absolute_error is Keras 2's",
    "tf.keras.experimental.CosineDecay": "tf.keras.experimental is Keras 2's",
    "tf.keras.layers.experimental.preprocessing": "tf.keras.layers.experimental is Keras 2's",
    "keras.preprocessing.text.Tokenizer": "import tf_keras instead of keras",
    "__import__('keras.preprocessing.text')": "keras.preprocessing.text is Keras 2's",
    "keras.backend.mean": "keras.backend.mean is Keras 2's",
    "exec('from tensorflow.keras.losses import mean_absolute_error')": "losses.mean_absolute_error is Keras 2's",
    "tf.keras.optimizers.legacy.Adam()": "that is Keras 2's",
    "tf.keras.optimizers.Adam(lr=0.1)": "the argument lr= is Keras 2's",
    "tf.keras.optimizers.SGD(0.1).lr": "SGD.lr is Keras 2's",
    "keras.layers.Dense(3, weights=[1])": "the argument weights= is Keras 2's",
    "keras.Sequential().fit_generator": "Sequential.fit_generator is Keras 2's",
    "keras.Sequential().fit([1], workers=2)": "the argument workers= of fit is Keras 2's",
    "keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save('folder')": "that is Keras 2's",
}
OTHERS = [
    "keras.layers.Densee",
    "keras.optimizers.Adam(leaning_rate=0.1)",
    "keras.Sequential().fti",
    "__import__('keras.prepocessing')",
    "tf.maths",
    "[].lr",
    "{}['lr']",
    "keras.Sequential().fit([1], wokers=2)",
]


def error_of(expression):
    import keras
    import tensorflow as tf

    with pytest.raises(Exception) as caught:
        eval(expression, {"keras": keras, "tf": tf})
    return caught.value


@pytest.mark.parametrize("expression", OLD)
def test_a_name_of_keras_2(expression):
    error = error_of(expression)
    with pytest.raises(legacy_names.Keras2Error) as caught:
        legacy_names.explain(error)
    text = str(caught.value)
    assert OLD[expression] in text and "TensorflowConfig(legacy_keras=True)" in text and caught.value.__cause__ is error
    assert str(error).splitlines()[0].rstrip(".") in text and len(text.splitlines()) == 1, text


@pytest.mark.parametrize("expression", OTHERS)
def test_other_errors(expression):
    error = error_of(expression)
    assert legacy_names.hint(error) is None
    legacy_names.explain(error)


def test_where_keras_2_is_asked_for(monkeypatch):
    monkeypatch.delenv(legacy_keras.VARIABLE, raising=False)
    assert (
        legacy_keras.requesting_option(True) == "legacy_keras=True"
        and legacy_keras.requesting_option(False, {}, {}) is None
    )
    assert legacy_keras.requesting_option(False, {}, {legacy_keras.VARIABLE: "True"}) == "TF_USE_LEGACY_KERAS=True"
    monkeypatch.setenv(legacy_keras.VARIABLE, "1")
    assert legacy_keras.requesting_option(False) == "TF_USE_LEGACY_KERAS=1"
    assert legacy_keras.requesting_option(False, {legacy_keras.VARIABLE: "0"}) is None, (
        "an environment of the workers goes first"
    )


@pytest.mark.slow
def test_missing_keras_2_is_reported_first(tmp_path):
    """Before Ray has started; the package is hidden in a process of its own."""
    code = (
        "import sys; sys.modules['tf_keras'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'tf_keras' else found(name, *rest)\n"
        "import raytf\n"
        "raytf.TensorflowTrainer(lambda: None, tensorflow_config=raytf.TensorflowConfig(legacy_keras=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    message = "Keras 2 is the package tf_keras; received: legacy_keras=True, and no tf_keras. Install it"
    assert done.stderr.splitlines()[-1].startswith(f"raytf.errors.ConfigError: {message}"), done.stderr
