"""Models whose data only their own `train_step` or `fit` takes: these decide whether it fits, and nothing runs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from raytf.compat import keras_objects
from raytf.data.batch_spec import BatchSpec
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.parallel import model_optimizers
from raytf.train import dry_run
from raytf.worker import checkpoint, model_loading

ROWS = 6
TABLE = pa.table(
    {name: pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 3.0)), 3) for name in ("a", "b", "c")}
    | {"text": [str(i) for i in range(ROWS)], "y": np.arange(ROWS * 1.0)}
)
BLOCK = StoredDataset([TABLE], [ROWS], TABLE.column_names)
THREE = BatchSpec.parsed("a", "b", "c")


def triplets(config):
    """Calls itself on three inputs, which a step takes as one batch; compiled with a loss that no step uses."""
    import keras
    import tensorflow as tf

    class Triplets(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = keras.layers.Dense(2)

        def call(self, inputs):
            a, b, c = inputs
            return self.tower(a), self.tower(b), self.tower(c)

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                a, b, c = self(batch)
                loss = tf.reduce_mean((a - b) ** 2) - tf.reduce_mean((a - c) ** 2)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    model = Triplets()
    model.compile("adam", loss="mse", run_eagerly=config.get("run_eagerly", False))
    return model


def task(config):
    """Its own `fit` makes numbers of texts."""
    import keras
    import tensorflow as tf

    class Task(keras.Model):
        def fit(self, x=None, **kwargs):
            return super().fit(x.map(lambda x, y: (tf.strings.to_number(x)[:, None], y)), **kwargs)

    inputs = keras.Input((1,))
    model = Task(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return model


def late(config):
    """As `task`, and not built."""
    import keras

    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(x["of its own fit"])

        def fit(self, x=None, **kwargs):
            return super().fit(x.map(lambda x, y: ({"of its own fit": x}, y)), **kwargs)

    model = Late()
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_a_step_that_takes_three_inputs_builds_the_model():
    model = dry_run.check(triplets, {}, BLOCK, THREE)
    assert model.built and model.optimizer.built and len(model.trainable_variables) == 2
    kernel = np.asarray(model.tower.kernel)
    dry_run.check(lambda config: model, {}, BLOCK, THREE)
    np.testing.assert_array_equal(kernel, np.asarray(model.tower.kernel))
    assert int(model.optimizer.iterations) == 0, "it is tried, and not trained"


def test_the_error_is_that_of_the_step():
    with pytest.raises(ConfigError, match="must fit the model's inputs and its loss") as refused:
        dry_run.check(triplets, {}, BLOCK, BatchSpec.parsed("a", "b"))
    assert "unpack" in str(refused.value)


def test_columns_without_labels_are_named_as_such():
    def plain(config):
        import keras

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ConfigError, match=r"and no labels, for which.*labels= names the column"):
        dry_run.check(plain, {}, BLOCK, BatchSpec.parsed("a"))


def test_a_fit_of_its_own_is_not_tried_on_what_it_prepares():
    model = dry_run.check(task, {}, BLOCK, BatchSpec.parsed("text", "y"))
    assert model.optimizer.built and model.built


@pytest.mark.parametrize(
    ("make", "config", "spec", "why"),
    [
        (late, {}, BatchSpec.parsed("text", "y"), "a fit of its own, and 'dense"),
        (triplets, {"run_eagerly": True}, THREE, "run_eagerly=True and a step of its own, and 'dense"),
    ],
)
def test_what_nobody_can_build_is_refused_by_name(make, config, spec, why):
    with pytest.raises(ConfigError, match=why):
        dry_run.check(make, config, BLOCK, spec)


def test_which_methods_decide():
    import keras

    found = {make.__name__: make({}) for make in (triplets, task)}
    for name, method, own in (
        ("triplets", "fit", True),
        ("triplets", "evaluate", False),
        ("triplets", "predict", False),
        ("task", "fit", True),
        ("task", "predict", False),
    ):
        assert model_optimizers.decides_itself(found[name], method) is own, (name, method)
    plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert not any(model_optimizers.decides_itself(plain, method) for method in ("fit", "evaluate", "predict"))


def test_under_a_strategy_keras_does_not_call_what_only_a_step_calls():
    import tensorflow as tf

    from raytf.parallel import trainer

    trainer.install()
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = triplets({})
    parts = tuple(np.ones((ROWS, 3), "float32") for _ in range(3))
    model.fit(tf.data.Dataset.from_tensor_slices(parts).batch(2), verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert keras_objects.compiled_parts(model)[0] is not None


def test_a_checkpoint_of_such_a_model_is_loaded_where_it_is_built(tmp_path):
    def built(config):
        model = triplets(config)
        model.tower.build((None, 3))
        return model

    model = dry_run.check(built, {}, BLOCK, THREE)
    state = checkpoint.CheckpointState(1, 3, 0, False, [{"epoch": 1}])
    checkpoint.save(str(tmp_path), model, state, build=(built, {}, ((3,), "float64")))
    loaded = model_loading.load_model(str(tmp_path), build_model=built)
    np.testing.assert_array_equal(np.asarray(loaded.tower.kernel), np.asarray(model.tower.kernel))


def test_building_for_labels_of_a_step_draws_nothing():
    """Metrics are built for one-hot labels, which a step makes; what it draws as it is traced does not count."""
    import keras
    import tensorflow as tf

    class OneHot(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(3)

        def call(self, x):
            return self.head(x)

        def train_step(self, data):
            x, y = data
            return super().train_step((x + np.random.normal(), tf.one_hot(y, 3)))

    model = OneHot()
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    model_optimizers.build(model, (tf.zeros([2, 4]), tf.zeros([2], tf.int32)))
    assert np.array_equal(np.random.get_state()[1], before)
    (metric,) = keras_objects.compiled_parts(model)[1].metrics
    assert metric._fn.__name__ == "categorical_accuracy"
