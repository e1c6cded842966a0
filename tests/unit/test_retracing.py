"""TensorFlow counts traces by code, and warns of retracing where raytf makes one function after another of the same."""

from __future__ import annotations

import ast
import logging
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import raytf
from raytf.compat.tensorflow import separate_function
from raytf.worker import clearing

FOLDER = pathlib.Path(raytf.__file__).parent
# Whose functions are traced once in a process, by `get_concrete_function`, or are the user's own.
MAY = {
    "train/dry_run.py",
    "worker/export.py",
    "fitting/tensorflow_objects.py",
    "fitting/call.py",
    "compat/tensorflow.py",
    "parallel/model_optimizers.py",
}


@pytest.mark.parametrize(("make", "warned"), [(tf.function, True), (separate_function, False)])
def test_functions_of_the_same_code_are_different_functions(make, warned, caplog):
    def fresh(number):
        return make(lambda: tf.constant(number))

    with caplog.at_level(logging.WARNING, "tensorflow"):
        assert [int(fresh(number)()) for number in range(8)] == list(range(8))
    assert ("retracing" in caplog.text) == warned, caplog.text


@pytest.mark.slow
def test_one_model_after_another_is_no_retracing(caplog):
    """As in a sweep's warm workers, which train one after another."""
    with caplog.at_level(logging.WARNING, "tensorflow"):
        for _ in range(7):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
            model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
            clearing.clear_training()
    assert "retracing" not in caplog.text, caplog.text


@pytest.mark.slow
def test_raytf_traces_apart():
    for path in FOLDER.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        found = [node for node in calls if node.attr == "function" and ast.unparse(node.value) == "tf"]
        name = str(path.relative_to(FOLDER))
        assert not found or name in MAY or name.startswith("doctor/"), f"{name}: use traced_apart"
