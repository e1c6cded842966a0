"""`raytf.fit`, `evaluate` and `predict` of models that are deep, that a package defines, or that only they can call."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest
from ray.train import RunConfig

import raytf
from raytf.errors import ConfigError
from raytf.fitting import warm
from tests.cluster.test_fit import assert_same, assert_same_history, in_float64, no_workers_stay  # noqa: F401

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROWS, BATCH = 13, 4
TWO = {"batch_size": BATCH, "num_workers": 2, "verbose": 0}
ONE = {"batch_size": BATCH, "verbose": 0}


def both(make, x, y=None, **more):
    """(the model of two workers, Keras' own) after two epochs, with equal weights and histories."""
    distributed, its = make(), make()
    history = raytf.fit(distributed, x, y, epochs=2, shuffle=False, **TWO, **more)
    expected = its.fit(x, y, epochs=2, shuffle=False, **ONE)
    assert_same(distributed, its)
    assert_same_history(history, expected)
    return distributed, its


def transferred():
    """A head on a network of 150 layers, as a whole in a Sequential, whose weights stay."""
    import keras

    keras.utils.set_random_seed(1)
    base = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, include_top=False, weights=None)
    base.trainable = False
    layers = [keras.Input((32, 32, 3)), base, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_mobilenet_in_a_sequential():
    numbers = np.random.default_rng(0)
    x, y = numbers.uniform(size=(ROWS, 32, 32, 3)), numbers.integers(0, 3, ROWS)
    distributed, its = both(transferred, x, y)
    found = raytf.evaluate(distributed, x, y, batch_size=BATCH, num_workers=2)
    np.testing.assert_allclose(found, its.evaluate(x, y, **ONE), atol=1e-9)
    found = raytf.predict(distributed, x, batch_size=BATCH, num_workers=2)
    np.testing.assert_allclose(found, its.predict(x, verbose=0), atol=1e-9)


NETS = """
import keras

UNITS = None


class Net(keras.Model):
    made = 0

    def __init__(self, units):
        global UNITS
        UNITS = units
        type(self).made += 1
        inputs = keras.Input((3,))
        super().__init__(inputs=inputs, outputs=keras.layers.Dense(units, "tanh")(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * (UNITS if type(self).made else 0.0)
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "of_a_package").mkdir()
    (tmp_path / "of_a_package" / "__init__.py").write_text("")
    (tmp_path / "of_a_package" / "nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("of_a_package.nets")
    for name in ("of_a_package.nets", "of_a_package"):
        sys.modules.pop(name, None)
    warm.end_group()


def test_a_functional_subclass_of_a_package(nets, tmp_path):
    """The workers import it, and what the constructor did to its class and module has happened there, too."""
    import keras

    def make():
        keras.utils.set_random_seed(1)
        model = nets.Net(2)
        model.compile("sgd", "mse")
        return model

    numbers = np.random.default_rng(0)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_config = RunConfig(worker_runtime_env={"env_vars": {"PYTHONPATH": path}})
    both(make, numbers.normal(size=(ROWS, 3)), numbers.normal(size=(ROWS, 2)), run_config=run_config)


def three_towers():
    """Three inputs as one batch; a call on one of them, or on none, is nothing that the model has."""
    import keras
    import tensorflow as tf

    class Triplets(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = keras.layers.Dense(2)
            self.mean = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.mean]

        def call(self, inputs):
            anchor, near, far = inputs
            return self.tower(anchor), self.tower(near), self.tower(far)

        def loss_of(self, batch):
            anchor, near, far = self(batch)
            return tf.reduce_mean((anchor - near) ** 2) - 0.1 * tf.reduce_mean((anchor - far) ** 2)

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = self.loss_of(batch)
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
            )
            self.mean.update_state(loss, sample_weight=tf.shape(batch[0])[0])
            return {"loss": self.mean.result()}

        def test_step(self, batch):
            self.mean.update_state(self.loss_of(batch), sample_weight=tf.shape(batch[0])[0])
            return {"loss": self.mean.result()}

        def predict_step(self, batch):
            return self(batch)[0]

    keras.utils.set_random_seed(1)
    model = Triplets()
    model.compile("sgd")
    return model


def test_three_inputs_that_only_a_step_takes():
    import tensorflow as tf

    numbers = np.random.default_rng(0)
    parts = tuple(numbers.normal(size=(ROWS, 3)) for _ in range(3))
    distributed, its = three_towers(), three_towers()
    batches = tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)
    raytf.fit(distributed, batches, epochs=2, num_workers=2, verbose=0)
    its.fit(batches, epochs=2, verbose=0)
    for a, b in zip(distributed.get_weights(), its.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-9)
    found = raytf.evaluate(distributed, batches, num_workers=2)
    np.testing.assert_allclose(found, its.evaluate(batches, verbose=0), atol=1e-9)


def with_a_preprocessor():
    """As KerasHub's tasks: the model takes numbers, and its own `fit`, `evaluate` and `predict` take texts."""
    import keras
    import tensorflow as tf

    class Task(keras.Model):
        def prepared(self, x):
            return x.map(lambda x, *rest: (tf.reshape(tf.strings.to_number(x, tf.float64), (-1, 1)), *rest))

        def fit(self, x=None, y=None, batch_size=None, validation_data=None, **kwargs):
            x = self.prepared(self.rows_of(x, y, batch_size))
            return super().fit(x, **kwargs)

        def evaluate(self, x=None, y=None, batch_size=None, **kwargs):
            return super().evaluate(self.prepared(self.rows_of(x, y, batch_size)), **kwargs)

        def predict(self, x, batch_size=None, **kwargs):
            return super().predict(self.prepared(self.rows_of(x, None, batch_size)), **kwargs)

        @staticmethod
        def rows_of(x, y, batch_size):
            if isinstance(x, tf.data.Dataset):
                return x
            return tf.data.Dataset.from_tensor_slices((x,) if y is None else (x, y)).batch(batch_size or 32)

    keras.utils.set_random_seed(1)
    inputs = keras.Input((1,))
    model = Task(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_a_model_whose_own_fit_prepares_its_rows():
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(ROWS, 1)).astype(str), numbers.normal(size=(ROWS, 1))
    distributed, its = with_a_preprocessor(), with_a_preprocessor()
    raytf.fit(distributed, x, y, epochs=2, shuffle=False, **TWO)
    its.fit(x, y, epochs=2, shuffle=False, **ONE)
    assert_same(distributed, its)
    found = raytf.evaluate(distributed, x, y, batch_size=BATCH, num_workers=2)
    np.testing.assert_allclose(found, its.evaluate(x, y, **ONE), atol=1e-9)
    found = raytf.predict(distributed, x, batch_size=BATCH, num_workers=2)
    np.testing.assert_allclose(found, its.predict(x, verbose=0), atol=1e-9)


def test_what_only_its_own_fit_could_build_is_refused():
    import keras

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x["of its own fit"])

        def fit(self, x=None, **kwargs):
            return super().fit(x.map(lambda x, y: ({"of its own fit": x}, y)), **kwargs)

    model = Late()
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"a fit of its own, and 'dense.*' not built"):
        raytf.fit(model, np.ones((4, 2)), np.ones((4, 1)))
