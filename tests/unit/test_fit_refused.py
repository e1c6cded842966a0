"""What `raytf.fit` refuses at once: a sentence each, before Ray is asked for anything."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from ray.train import RunConfig, ScalingConfig

import raytf
from raytf.errors import ConfigError

X, Y = np.zeros((20, 3)), np.zeros((20, 1))
# Sorted by class, as files of folders are; the last class is one too many.
MANY = np.zeros((1200, 3)), np.arange(1200) // 300
CLASSES = np.arange(20) % 3


def classifier():
    return model("sparse_categorical_crossentropy", 3)


def model(loss="mse", units=1, layer=None, **compiled):
    import keras

    made = keras.Sequential([keras.Input((3,)), *([layer] if layer else []), keras.layers.Dense(units)])
    made.compile("sgd", loss, **compiled)
    return made


def uncompiled():
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def in_a_scope():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        return model()


def for_gpus():
    import keras

    made = keras.Sequential([keras.Input((1, 3)), keras.layers.LSTM(2, use_cudnn=True), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def stateful():
    import keras

    layers = [keras.Input(batch_shape=(4, 1, 3)), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
    made = keras.Sequential(layers)
    made.compile("sgd", "mse")
    return made


def of_words():
    import keras

    inputs = keras.Input((1,), dtype="string", name="words")
    made = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Hashing(5, output_mode="one_hot")(inputs)))
    made.compile("sgd", "mse")
    return made


def holds_a_lock():
    import keras

    class Holds(keras.callbacks.Callback):
        lock = None

    made = Holds()
    made.lock = threading.Lock()
    return [keras.callbacks.History(), made]


CASES = {
    "class weights in a list": (model, {"class_weight": [1, 2]}, "class_weight must be a dict"),
    "never validated": (model, {"validation_data": (X, Y), "validation_freq": 0}, "validation_freq must be an integer"),
    "no model": (lambda: 3, {}, "takes a keras.Model"),
    "not compiled": (uncompiled, {}, "needs a compiled model"),
    "of another strategy": (in_a_scope, {}, "Make the model outside of the scope"),
    "x of another shape": (model, {"x": X[:, :2]}, "expected axis -1 of input shape to have value 3"),
    "x of numbers for words": (of_words, {"x": X[:, :1]}, "for 'words', which takes string"),
    "validated on numbers for words": (
        of_words,
        {"x": np.full((20, 1), "a"), "validation_data": (X[:, :1], Y)},
        "In the dataset 'validation' Features must have the type of the model's input",
    ),
    "y of another shape": (lambda: model("categorical_crossentropy", 4), {}, "must have the same shape"),
    "validation of another shape": (model, {"validation_data": (X[:, :2], Y)}, "expected axis -1"),
    "different lengths": (model, {"y": Y[:7]}, "x: 20 rows, y: 7 rows"),
    "a generator": (model, {"x": (part for part in [X])}, "a generator"),
    "a callback that does not pickle": (model, {"callbacks": holds_a_lock}, "callback 1, a Holds with its attribute"),
    "a class": (model, {"callbacks": [threading.Thread]}, "callbacks must be a list of Keras callbacks"),
    "cuDNN": (for_gpus, {"x": X[:, None]}, "cuDNN is not supported"),
    "stateful": (stateful, {"x": X[:, None], "batch_size": 4}, "LSTM(stateful=True). Use stateful=False"),
    "batch 0": (model, {"batch_size": 0}, "batch_size must be an integer of at least 1"),
    "a batch of too few": (model, {"batch_size": 2, "num_workers": 3}, "at least one row for each replica"),
    "no workers": (model, {"num_workers": 0}, "num_workers must be an integer of at least 1"),
    "two numbers": (
        model,
        {"num_workers": 2, "scaling_config": ScalingConfig(num_workers=3)},
        "num_workers is given once",
    ),
    "a stored run": (model, {"run_config": RunConfig(name="run")}, "RunConfig(name='run')"),
    "no epochs": (model, {"epochs": 0}, "epochs must be an integer of at least 1"),
    "some steps": (model, {"steps_per_epoch": 3, "batch_size": 5}, "steps_per_epoch=3 with 4 of them"),
    "a shuffle by name": (model, {"shuffle": "batch"}, "shuffle must be True or False"),
    "validated without y": (model, {"validation_data": X}, "validation_data: x (None, 3) float32 without y"),
    "validated by a tuple of x": (model, {"validation_data": (X,)}, "validation_data: x (None, 3) float32 without y"),
    "validated by a dict": (model, {"validation_data": {"x": X, "y": Y}}, "validation_data: x {'x': "),
    "validated by four": (model, {"validation_data": (X, Y, Y, Y)}, "validation_data must be (x, y) or"),
    "validated by words": (model, {"validation_data": (X, Y.astype(str))}, "Labels must be numbers"),
    "labels beyond the first rows": (
        classifier,
        {"x": MANY[0], "y": MANY[1]},
        "labels from 0 to 2, as the model has 3",
    ),
    "labels of a table": (
        classifier,
        {"x": {"a": MANY[1], "b": MANY[1]}, "y": None, "features": ["a", "b", "a"], "labels": "b"},
        "a label of 3",
    ),
    "labels of the validation": (
        classifier,
        {"y": CLASSES, "validation_data": (X, CLASSES + 1)},
        "In the dataset 'validation' sparse_categorical_crossentropy takes labels from 0 to 2",
    ),
    "split labels": (
        classifier,
        {"x": MANY[0], "y": MANY[1], "validation_split": 0.25},
        "In the dataset 'validation'",
    ),
    "numbers with two outputs": (lambda: model(units=2), {"y": Y[:, 0]}, "outputs of shape (rows, 2)"),
    "one-hot for numbered classes": (classifier, {"y": np.eye(3)[CLASSES]}, "Use categorical_crossentropy for one-hot"),
    "classes for one-hot": (
        lambda: model("categorical_crossentropy", 3),
        {"y": CLASSES},
        "Use sparse_categorical_crossentropy for labels that number the classes",
    ),
    "weights of another length": (model, {"sample_weight": np.ones(7)}, "sample_weight: 7 rows"),
    "weights in words": (model, {"sample_weight": np.array(["1"] * 20)}, "Sample weights must be numbers"),
    "class weights in words": (model, {"class_weight": {0: "high"}}, "received: {0: 'high'}"),
    "class weights of words": (model, {"class_weight": {"cat": 1.0}}, "received: {'cat': 1.0}"),
    "a part in words": (model, {"validation_split": "0.2"}, "validation_split must be a number"),
    "too large a part": (model, {"validation_split": 1.5}, "validation_split must be"),
    "a part of columns": (
        model,
        {"x": {"a": Y[:, 0]}, "y": None, "features": "a", "validation_split": 0.5},
        "for arrays",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    build, arguments, text = CASES[name]
    arguments = {k: v() if callable(v) else v for k, v in arguments.items()}
    with pytest.raises(ConfigError) as error:
        raytf.fit(build(), **{"x": X, "y": Y} | arguments)
    assert text in str(error.value)


@pytest.mark.parametrize("call, more", [(raytf.fit, {"epochs": 2}), (raytf.evaluate, {})])
def test_callbacks_may_be_a_function_of_the_config(call, more):
    """What it returns is checked as a list is."""
    configs = []
    make = lambda config: (configs.append(config), holds_a_lock())[1]
    with pytest.raises(ConfigError, match="callback 1, a Holds with its attribute"):
        call(model(), X, Y, batch_size=4, callbacks=make, **more)
    assert configs == [{"batch_size": 4} | more]


@pytest.mark.parametrize("call", [raytf.fit, raytf.evaluate])
def test_missing_y_is_reported(call):
    with pytest.raises(ConfigError, match=r"x \(None, 3\) \w+ without y \(.*a loss compares with y"):
        call(model(), X, num_workers=2)
