"""Any Keras model travels, whatever its depth, nesting or class, with equal weights and predictions."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import raytf
from raytf.fitting import transport

# Each of the architectures of `keras.applications`, by a (small) input that it takes.
APPLICATIONS = {
    "ConvNeXtBase": 32,
    "ConvNeXtLarge": 32,
    "ConvNeXtSmall": 32,
    "ConvNeXtTiny": 32,
    "ConvNeXtXLarge": 32,
    "DenseNet121": 32,
    "DenseNet169": 32,
    "DenseNet201": 32,
    "EfficientNetB0": 32,
    "EfficientNetB1": 32,
    "EfficientNetB2": 32,
    "EfficientNetB3": 32,
    "EfficientNetB4": 32,
    "EfficientNetB5": 32,
    "EfficientNetB6": 32,
    "EfficientNetB7": 32,
    "EfficientNetV2B0": 32,
    "EfficientNetV2B1": 32,
    "EfficientNetV2B2": 32,
    "EfficientNetV2B3": 32,
    "EfficientNetV2L": 32,
    "EfficientNetV2M": 32,
    "EfficientNetV2S": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Large": 32,
    "MobileNetV3Small": 32,
    "NASNetLarge": 32,
    "NASNetMobile": 32,
    "ResNet101": 32,
    "ResNet101V2": 32,
    "ResNet152": 32,
    "ResNet152V2": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}


@pytest.fixture(autouse=True)
def gone():
    """The largest of these have 1.4 GB of weights."""
    yield
    import keras

    keras.backend.clear_session()
    gc.collect()


@contextlib.contextmanager
def deep_calls():
    """Keras itself descends from layer to layer where it makes a model of a long chain."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def round_trip(model):
    """The copy of a model, which has the same weights."""
    data, sent = transport.serialize(model)
    copy, came = transport.deserialize(data, sent.values())
    assert type(copy) is type(model) and len(copy.weights) == len(model.weights)
    for left, right in zip(model.weights, copy.weights, strict=True):
        assert left.path == right.path
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert not {id(v) for v in copy.variables} - came.numbers.keys(), "each variable finds the one it left from"
    return copy


def assert_same(left, right):
    import keras

    for a, b in zip(keras.tree.flatten(left), keras.tree.flatten(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_all_applications_are_covered():
    import keras

    assert {k for k, v in vars(keras.applications).items() if callable(v)} == APPLICATIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APPLICATIONS))
def test_an_architecture_within_a_sequential(name):
    import keras

    size = APPLICATIONS[name]
    base = getattr(keras.applications, name)(include_top=False, weights=None, input_shape=(size, size, 3))
    model = keras.Sequential([keras.Input((size, size, 3)), base, keras.layers.GlobalAveragePooling2D()])
    model.compile("adam", "mse")
    copy = round_trip(model)
    assert copy.get_config() == model.get_config()
    x = np.random.default_rng(0).uniform(size=(1, size, size, 3)).astype("float32")
    assert_same(model(x, training=False), copy(x, training=False))


def _chain(keras, layers):
    x = inputs = keras.Input((2,))
    for i in range(layers):
        x = keras.layers.Dense(2)(x) if i % 50 == 0 else keras.layers.Activation("tanh")(x)
    return keras.Model(inputs, x)


def _nested(keras, depth):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    for _ in range(depth):
        model = keras.Sequential([keras.Input((2,)), model, keras.layers.Activation("tanh")])
    return model


def _recurrent(keras, times):
    """A layer that is called again and again."""
    x = inputs = keras.Input((2,))
    shared = keras.layers.Dense(2, "tanh")
    for _ in range(times):
        x = keras.layers.Add()([shared(x), inputs])
    return keras.Model(inputs, x)


def _lists(keras, layers):
    """A model that holds its layers in lists and dicts, and no graph."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [{"a": [keras.layers.Dense(2, "tanh")], "b": (keras.layers.Dropout(0.1),)}] * 1
            self.blocks += [{"a": [keras.layers.Dense(2)], "b": ()} for _ in range(layers)]
            self.first = self.blocks[0]["a"][0]

        def call(self, x):
            for block in self.blocks:
                x = block["a"][0](x)
            return x

        def build(self, shape):
            for block in self.blocks:
                block["a"][0].build(shape)

    model = Net()
    model(np.ones((1, 2), "float32"))
    return model


def _wrapped(keras, depth):
    """Layers that hold the next one, and each its predecessor: circles."""

    class Wrapper(keras.layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            vars(inner)["outer"] = self  # untracked: Keras would descend for ever

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x) + 1.0

    layer = keras.layers.Dense(2)
    for _ in range(depth):
        layer = Wrapper(layer)
    return keras.Sequential([keras.Input((2,)), layer])


def _linked(keras, length):
    """A layer with a list of plain objects, each of which holds the next."""

    class Link:
        def __init__(self, following):
            self.following = following

    class Holder(keras.layers.Layer):
        def call(self, x):
            length, link = 0.0, self.link
            while link is not None:
                length, link = length + 1.0, link.following
            return x * length

    layer = Holder()
    link = None
    for _ in range(length):
        link = Link(link)
    layer.link = link
    return keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, size",
    [(_chain, 1000), (_nested, 40), (_recurrent, 300), (_lists, 150), (_wrapped, 20), (_linked, 5000)],
)
def test_a_shape_that_recursion_hates(make, size):
    import keras

    limit = sys.getrecursionlimit()  # others may have set it, as celpy does
    with deep_calls():
        model = make(keras, size)
        model.compile("adam", "mse")
    assert sys.getrecursionlimit() == limit <= 3000
    copy = round_trip(model)
    with deep_calls():
        x = np.random.default_rng(0).uniform(size=(3, 2)).astype("float32")
        assert_same(model(x, training=False), copy(x, training=False))
    if make is _recurrent:
        assert len(copy.layers) == len(model.layers)


@pytest.mark.slow
def test_a_chain_of_5000_layers():
    import keras

    with deep_calls():
        model = _chain(keras, 5000)
        model.compile("adam", "mse")
    copy = round_trip(model)
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]


# ------------------------------------------------------------------------------------------ another process

READER = """
import pickle, sys
import numpy as np
from raytf.fitting import transport

settings, models = pickle.loads(open(sys.argv[1], "rb").read())
transport.apply_settings(settings)
results = []
for data, values, x in models:
    model, _ = transport.deserialize(data, values)
    results.append(np.asarray(model(x, training=False)))
np.savez(sys.argv[2], *results)
"""


@pytest.mark.slow
def test_models_travel_to_a_process_that_has_made_none(tmp_path):
    """It has neither their classes nor Keras' names and settings of this one."""
    import keras

    images = np.random.default_rng(0).uniform(size=(2, 32, 32, 3)).astype("float32")
    numbers = images[:, :2, 0, 0]
    with deep_calls():
        models = []
        for name in ("ConvNeXtTiny", "EfficientNetV2B0", "MobileNetV2"):
            base = getattr(keras.applications, name)(include_top=False, weights=None, input_shape=(32, 32, 3))
            models.append((keras.Sequential([base, keras.layers.GlobalAveragePooling2D()]), images))
        models += [(make(keras, size), numbers) for make, size in ((_chain, 1000), (_nested, 40), (_wrapped, 20))]
        settings, sent, expected = transport.global_settings(), [], []
        for model, x in models:
            expected.append(np.asarray(model(x, training=False)))
            model.compile("adam", "mse")
            data, objects = transport.serialize(model)
            sent.append((data, objects.values(), x))
    (tmp_path / "sent").write_bytes(pickle.dumps((settings, sent)))
    path = os.pathsep.join([os.path.dirname(os.path.dirname(raytf.__file__)), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "sent"), str(tmp_path / "found.npz")],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    with np.load(tmp_path / "found.npz") as found:
        for i, values in enumerate(expected):
            np.testing.assert_allclose(found[f"arr_{i}"], values, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ classes of packages

MODULE = """
import keras

MADE, WIDTH, NAMES = [], None, {}
NAMES_TOO = NAMES


def width():
    return WIDTH


class Base(keras.Model):
    count = 0

    @classmethod
    def counted(cls):
        cls.count += 1


class Net(Base):
    registry = {}

    def __init__(self, units=3, **kwargs):
        global WIDTH
        WIDTH = units
        inputs = keras.Input((2,))
        super().__init__(inputs=inputs, outputs=keras.layers.Dense(units)(inputs), **kwargs)
        self.counted()
        type(self).registry[self.name] = units
        type(self).newest = self
        MADE.append(self.name)
        NAMES["units"] = units

    def known(self):
        return width(), list(MADE), dict(NAMES_TOO), type(self).count, dict(self.registry), NAMES is NAMES_TOO


class Layer(keras.layers.Layer):
    calls = None

    def __init__(self):
        super().__init__()
        type(self).call = _call


def _call(self, x):
    return x * 2.0
"""


@pytest.fixture
def forgotten(tmp_path, monkeypatch):
    """Imports a module of a text; without one, forgets it, so that it is imported again as by another process."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("")

    def imported(text=None):
        for name in ("a_package", "a_package.nets"):
            sys.modules.pop(name, None)
        if text is not None:
            (tmp_path / "a_package" / "nets.py").write_text(text)
            importlib.invalidate_caches()
        return importlib.import_module("a_package.nets") if text is not None else None

    yield imported
    imported()


def test_a_class_of_a_package_is_what_its_constructor_made_of_it(forgotten):
    """In a process that only imports it; Keras, too, changes the bases of such a class."""
    import keras

    nets = forgotten(MODULE)
    net, plain = nets.Net(4), keras.Sequential([keras.Input((2,)), nets.Layer()])
    net.compile("sgd", "mse")
    x = np.arange(6.0, dtype="float32").reshape(3, 2)
    wanted = net.known(), np.asarray(net(x)), net.get_config()
    data, sent = transport.serialize([net, plain])
    forgotten()
    (copy, doubles), _ = transport.deserialize(data, sent.values())
    module = sys.modules["a_package.nets"]
    assert type(copy) is module.Net is not nets.Net and module.Net.newest is copy
    assert copy.known() == wanted[0] and copy.get_config() == wanted[2]
    np.testing.assert_array_equal(np.asarray(copy(x)), wanted[1])
    np.testing.assert_array_equal(np.asarray(doubles(x)), x * 2)


LOCKED = """
import keras, threading

LOCKS = {"a": threading.Lock()}
DATA = {"rows": bytes(20_000_000)}


class Locked(keras.layers.Layer):
    lock = threading.Lock()

    def call(self, x):
        with self.lock, LOCKS["a"]:
            return x if DATA["rows"] else None
"""


def test_what_does_not_pickle_of_a_class_or_is_data_is_as_imported(forgotten):
    import keras

    model = keras.Sequential([keras.Input((2,)), forgotten(LOCKED).Locked()])
    data, sent = transport.serialize(model)
    assert len(data) < 100_000
    forgotten()
    copy, _ = transport.deserialize(data, sent.values())
    x = np.ones((1, 2), "float32")
    np.testing.assert_array_equal(np.asarray(copy(x)), x)


# ------------------------------------------------------------------------------------------ kinds of layers

X = np.random.default_rng(0).uniform(size=(2, 4)).astype("float32")
SERIES = X[:, :, None] * np.ones(3, "float32")
IMAGES = np.random.default_rng(0).uniform(size=(2, 8, 8, 3)).astype("float32")


def _cells(keras):
    layers = keras.layers
    cells = layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)], return_sequences=True)
    return [cells, layers.Bidirectional(layers.LSTM(2, return_sequences=True)), layers.TimeDistributed(layers.Dense(1))]


def _adapted(keras):
    normal, buckets = keras.layers.Normalization(), keras.layers.Discretization(num_bins=3)
    normal.adapt(X), buckets.adapt(X)
    return [normal, buckets]


def _quantized(keras):
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(2)])
    model(X)
    model.quantize("int8")
    return [model]


def _low_rank(keras):
    layer = keras.layers.Dense(8)
    layer.build((None, 4))
    layer.enable_lora(2)
    return [layer, keras.layers.SpectralNormalization(keras.layers.Dense(3))]


def _functions(keras):
    return [
        keras.layers.Lambda(lambda x: x * 2),
        keras.layers.Dense(3, activation=lambda x: x + 1, kernel_regularizer=lambda w: keras.ops.sum(w**2)),
    ]


def _augmented(keras):
    layers = keras.layers
    return [layers.Pipeline([layers.Rescaling(2.0), layers.RandomFlip()]), layers.RandAugment(), layers.Flatten()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("make", "x"),
    [(_cells, SERIES), (_adapted, X), (_quantized, X), (_low_rank, X), (_functions, X), (_augmented, IMAGES)],
)
def test_a_kind_of_layer(make, x):
    import keras

    model = keras.Sequential([keras.Input(x.shape[1:]), *make(keras)])
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model.compile(keras.optimizers.Lion(rate, use_ema=True, gradient_accumulation_steps=2), "mse")
    copy = round_trip(model)
    assert_same(model(x, training=False), copy(x, training=False))


def test_words_and_columns_of_a_feature_space():
    import keras
    import tensorflow as tf

    space = keras.utils.FeatureSpace({"a": "float_normalized", "b": "string_categorical"})
    space.adapt(tf.data.Dataset.from_tensor_slices({"a": [1.0, 2.0, 3.0], "b": ["x", "y", "x"]}).batch(3))
    encoded = space.get_encoded_features()
    words = keras.layers.TextVectorization(output_sequence_length=3)
    words.adapt(["a b", "b c"])
    text = keras.Input((), dtype="string")
    for model, x in (
        (keras.Model(encoded, keras.layers.Dense(1)(encoded)), np.ones((2, encoded.shape[1]), "float32")),
        (keras.Model(text, keras.layers.Embedding(9, 2)(words(text))), tf.constant(["b a", "d"])),
    ):
        assert_same(model(x), round_trip(model)(x))


def test_a_variable_with_a_part_on_each_worker_is_warned_of():
    import keras
    import tensorflow as tf

    class Counts(keras.layers.Layer):
        def build(self, shape):
            how = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
            self.seen = tf.Variable(0.0, trainable=False, name="seen", **how)

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((2,)), Counts(), keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match=r"seen:0' .* part of the first worker"):
        transport.serialize(model)
