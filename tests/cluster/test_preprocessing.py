"""`raytf.adapt` on blocks of different sizes comes to what Keras' `adapt` does on all rows at once."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import ray
import tensorflow as tf
from ray.train import FailureConfig, RunConfig, ScalingConfig

import raytf
from tests.cluster import models

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS = 1501
RNG = np.random.default_rng(0)
WORDS = np.array(["a", "b", "ä", "[UNK]", "", "zz", "zzz"])
DATA = {
    "number": RNG.normal(1000.0, 0.5, ROWS).astype("float32"),
    "other": RNG.exponential(size=ROWS),
    "pair": RNG.normal(size=(ROWS, 2)).astype("float32") * [1, 100] + [0, -5],
    "image": RNG.integers(0, 255, (ROWS, 2, 3), np.uint8),
    "word": WORDS[RNG.integers(0, len(WORDS), ROWS)],
    "id": RNG.integers(-3, 9, ROWS),
    "text": np.array([" ".join(WORDS[RNG.integers(0, 6, i % 5)]) for i in range(ROWS)]),
    "skewed": np.where(RNG.random(ROWS) < 0.4, 7.0, RNG.normal(size=ROWS) * 1e-3),
}


@pytest.fixture(scope="module")
def rows(ray_cluster):
    """Blocks of 1, 3, 1,000 and all other rows."""
    table = pa.table(
        {name: pa.FixedShapeTensorArray.from_numpy_ndarray(v) if v.ndim > 1 else v for name, v in DATA.items()}
    )
    edges = [0, 1, 4, 1004, ROWS]
    return ray.data.from_arrow([table.slice(a, b - a) for a, b in zip(edges, edges[1:], strict=False)])


def whole(column):
    data = DATA[column]
    return data[:, None] if data.ndim == 1 else data


@pytest.mark.parametrize(
    "column, axis", [("number", -1), ("number", None), ("pair", -1), ("image", (1, 2)), ("image", 2)]
)
def test_normalization(rows, column, axis):
    found, expected = raytf.adapt(keras.layers.Normalization(axis), rows, column), keras.layers.Normalization(axis)
    expected.adapt(whole(column).astype("float64"))
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-6)
    np.testing.assert_allclose(found(whole(column)), expected(whole(column)), rtol=1e-4, atol=1e-4)


def test_normalization_of_stacked_columns(rows):
    found, expected = raytf.adapt(keras.layers.Normalization(), rows, ["number", "other"]), keras.layers.Normalization()
    expected.adapt(np.stack([DATA["number"], DATA["other"]], 1))
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-5)


@pytest.mark.parametrize("column", ["number", "other", "pair", "skewed", "id"])
@pytest.mark.parametrize("bins, epsilon", [(4, 0.01), (30, 0.001), (7, 0.3)])
def test_discretization(rows, column, bins, epsilon):
    layers = [keras.layers.Discretization(num_bins=bins, epsilon=epsilon) for _ in range(2)]
    raytf.adapt(layers[0], rows, column)
    layers[1].adapt(whole(column))
    assert layers[0].bin_boundaries == layers[1].bin_boundaries


@pytest.mark.parametrize(
    "kind, column, options",
    [
        (keras.layers.StringLookup, "word", {}),
        (keras.layers.StringLookup, "word", {"max_tokens": 4, "mask_token": ""}),
        (keras.layers.StringLookup, "word", {"output_mode": "tf_idf"}),
        (keras.layers.IntegerLookup, "id", {"num_oov_indices": 2}),
        (keras.layers.TextVectorization, "text", {"ngrams": 2}),
        (keras.layers.TextVectorization, "text", {"output_mode": "tf_idf", "max_tokens": 5}),
    ],
)
def test_vocabularies(rows, kind, column, options):
    found, expected = raytf.adapt(kind(**options), rows, column), kind(**options)
    expected.adapt(whole(column))
    assert found.get_vocabulary() == expected.get_vocabulary()
    if options.get("output_mode") == "tf_idf":
        few = whole(column)[:50]
        np.testing.assert_allclose(found(few), expected(few), rtol=1e-6)


def test_a_feature_space(rows):
    def made():
        kinds = {"word": "string_categorical", "id": "integer_categorical", "number": "float_normalized"}
        return keras.utils.FeatureSpace(kinds, output_mode="concat")

    found, expected = raytf.adapt(made(), rows), made()
    data = {name: DATA[name] for name in ("word", "id", "number")}
    expected.adapt(tf.data.Dataset.from_tensor_slices(data).batch(ROWS))
    few = {name: tf.constant(values[:20]) for name, values in data.items()}
    np.testing.assert_allclose(found(few), expected(few), rtol=1e-3, atol=1e-3)


def test_what_is_refused(rows):
    for layer, column, message in (
        (keras.layers.Dense(1), "number", "preprocessing layers"),
        (keras.layers.Normalization(), None, "Name the column"),
        (keras.utils.FeatureSpace({"word": "string_categorical"}), "word", "Leave column out"),
        (keras.layers.Normalization(), "none", "must name columns of the dataset"),
        (keras.layers.Normalization(mean=1.0, variance=2.0), "number", "no mean yet"),
        (keras.layers.Normalization(axis=0), "pair", "must not be that of the rows"),
        (keras.layers.IntegerLookup(), raytf.Column("id", ragged=True), "not to lists"),
    ):
        with pytest.raises(raytf.ConfigError, match=message):
            raytf.adapt(layer, rows, column)
    with pytest.raises(raytf.ConfigError, match="without any"):
        raytf.adapt(keras.layers.Normalization(), rows.filter(lambda row: False), "number")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapted_layers_train_resume_load_and_are_exported(rows, tmp_path):
    """The model function uses the layers themselves; a run that loses a worker equals one that does not."""
    word = raytf.adapt(keras.layers.StringLookup(output_mode="multi_hot"), rows, "word")
    text = raytf.adapt(keras.layers.TextVectorization(output_sequence_length=3), rows, "text")
    number = raytf.adapt(keras.layers.Normalization(), rows, "number")
    bins = raytf.adapt(keras.layers.Discretization(num_bins=5, output_mode="one_hot"), rows, "other")
    layers = {"word": word, "text": text, "number": number, "other": bins}

    def build(config):
        import keras

        kinds = {"word": "string", "text": "string", "number": "float32", "other": "float32"}
        inputs = {name: keras.Input((1,), name=name, dtype=kind) for name, kind in kinds.items()}
        encoded = [keras.layers.Rescaling(1.0)(layers[name](value)) for name, value in inputs.items()]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(encoded)))
        model.compile("adam", "mse")
        return model

    def train(name, callbacks=None, failures=0):
        return raytf.KerasTrainer(
            build,
            datasets={"train": rows},
            features={name: name for name in layers},
            labels="id",
            config={"batch_size": 300, "epochs": 2},
            callbacks=callbacks,
            checkpoint_every="1 steps",
            verify=False,
            scaling_config=ScalingConfig(num_workers=2),
            tensorflow_config=raytf.TensorflowConfig(heal=False),
            run_config=RunConfig(
                name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=failures)
            ),
        ).fit()

    def kill(config):
        return [models.kill_once(str(tmp_path / "marker"), 1, 1, 2)]

    whole, killed = train("whole"), train("killed", kill, 1)
    few = {name: tf.constant(DATA[name][:20, None]) for name in layers}
    loaded = [raytf.load_model(result) for result in (whole, killed)]
    expected = loaded[0].predict(few, verbose=0)
    np.testing.assert_allclose(loaded[1].predict(few, verbose=0), expected, rtol=1e-5, atol=1e-6)
    names = [layer for layer in loaded[0].layers if isinstance(layer, keras.layers.StringLookup)]
    assert names[0].get_vocabulary() == word.get_vocabulary()
    served = tf.saved_model.load(raytf.export(killed, tmp_path / "served"))
    answer = served.serve({name: tf.cast(v, "float32") if v.dtype.is_floating else v for name, v in few.items()})
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)
    assert train("whole").metrics == whole.metrics, "the run has ended, and is known again"
