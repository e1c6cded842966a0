"""A checkpoint holds the complete state, and is loaded as a model with or without Keras' help. No Ray."""

import numpy as np
import pytest

from raytf import checkpoint
from raytf.errors import ConfigError


def functional(config):
    import keras

    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(config["units"]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse")
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


def trained(build, steps=3):
    import keras

    keras.utils.set_random_seed(3)
    model = build({"units": 4})
    x = np.random.default_rng(0).normal(size=(8, 3))
    model.fit(x, x[:, :1], epochs=steps, batch_size=8, shuffle=False, verbose=0)
    return model, x


def saved(folder, build, callbacks=()):
    model, x = trained(build)
    state = checkpoint.State(3, 3, 7, False, [{"epoch": 1, "loss": 0.5}])
    checkpoint.save(str(folder), model, state, callbacks, (build, {"units": 4}, ((3,), "float32")))
    return model, x


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    """Weights, optimizer and the seeds of Dropout: three steps more are the same in a restored model."""
    model, x = saved(tmp_path, functional)
    assert checkpoint.read_state(str(tmp_path)).step == 3
    other = functional({"units": 4})
    checkpoint.restore(str(tmp_path), other)
    for m in (model, other):
        m.fit(x, x[:, :1], epochs=3, batch_size=8, shuffle=False, verbose=0)
    for mine, its in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_model_that_keras_knows_is_loaded_with_its_optimizer(tmp_path):
    model, x = saved(tmp_path, functional)
    loaded = checkpoint.load_model(tmp_path)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert int(loaded.optimizer.iterations) == 3


def test_a_model_that_keras_does_not_know_is_built_anew(tmp_path):
    model, x = saved(tmp_path, subclassed)
    with pytest.warns(UserWarning, match="built with build_model"):
        loaded = checkpoint.load_model(str(tmp_path))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert int(loaded.optimizer.iterations) == 3


def test_callbacks_get_their_state_back(tmp_path):
    import keras

    def plateau():
        return keras.callbacks.ReduceLROnPlateau("loss", patience=2)

    before = plateau()
    before.set_model(functional({"units": 4}))
    before.on_train_begin()
    for epoch, loss in enumerate([1.0, 0.5, 0.6]):
        before.on_epoch_end(epoch, {"loss": loss})
    saved(tmp_path, functional, [before])
    after = plateau()
    checkpoint.restore_callbacks(str(tmp_path), [after])
    assert (after.wait, after.best, after.monitor_op, after.min_delta) == (1, 0.5, before.monitor_op, before.min_delta)
    with pytest.raises(ConfigError, match="needs the callbacks that it had"):
        checkpoint.restore_callbacks(str(tmp_path), [])


def test_another_model_is_refused(tmp_path):
    saved(tmp_path, functional)
    with pytest.raises(ConfigError, match="build_model must still build the same model"):
        checkpoint.restore(str(tmp_path), functional({"units": 5}))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="A model is loaded from"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(ConfigError, match=r"holds state.json"):
        checkpoint.read_state(str(tmp_path))
