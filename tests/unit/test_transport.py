"""A model that was written and read trains as it was, and what comes back finds the objects it left from."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from raytf.compat.versions import at_least
from raytf.errors import ConfigError
from raytf.fitting import transport


def _functional(keras):
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    x = keras.layers.Dense(8, "relu", kernel_regularizer="l2")(keras.layers.Concatenate()([a, b]))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(x))
    outputs = {"p": keras.layers.Dense(1, name="p")(x), "q": keras.layers.Dense(2, "softmax", name="q")(x * 2.0)}
    model = keras.Model({"a": a, "b": b}, outputs)
    power = 2
    losses = {"p": lambda true, predicted: (true - predicted) ** power, "q": "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.AdamW(0.01), losses, metrics={"q": ["accuracy"]})
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    x = {"a": np.ones((20, 4)), "b": np.arange(60.0).reshape(20, 3)}
    return model, x, {"p": np.arange(20.0)[:, None], "q": np.arange(20) % 2}


def _gan(keras):
    import tensorflow as tf

    class Gan(keras.Model):
        def __init__(self, critic, maker):
            super().__init__()
            self.critic, self.maker = critic, maker
            self.score, self.seeds = keras.metrics.Mean(name="score"), keras.random.SeedGenerator(3)

        def compile(self, first, second):
            super().compile()
            self.first, self.second = first, second

        @property
        def metrics(self):
            return [self.score]

        @tf.function
        def made(self, rows):
            return self.maker(keras.random.normal((rows, 4), seed=self.seeds))

        def train_step(self, x):
            for part, optimizer in ((self.maker, self.second), (self.critic, self.first)):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self.critic(self.made(tf.shape(x)[0])) - self.critic(x))
                gradients = tape.gradient(loss, part.trainable_weights)
                optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))
            self.score.update_state(loss)
            return {"score": self.score.result()}

    parts = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)]) for units in (1, 4)]
    model = Gan(*parts)
    model.compile(keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9))
    return model, np.arange(80.0, dtype="float32").reshape(20, 4) / 80, None


def _words(keras):
    import tensorflow as tf

    words = keras.Input((), dtype="string")
    x = keras.layers.Embedding(4, 3)(keras.layers.StringLookup(vocabulary=["a", "b"])(words))
    model = keras.Model(words, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model, tf.constant(list("abca" * 5)), np.arange(20.0)[:, None]


def _pictures(keras):
    normal = keras.layers.Normalization()
    normal.adapt(np.arange(9.0).reshape(3, 3))
    layers = [
        normal,
        keras.layers.RandomFlip(),
        keras.layers.Conv2D(4, 3),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
    model.compile(keras.optimizers.Adam(rate, clipnorm=1.0, use_ema=True), "mse")
    return model, np.arange(20 * 6 * 6 * 3.0).reshape(20, 6, 6, 3) % 7, np.arange(20.0)[:, None] / 20


@pytest.mark.slow
@pytest.mark.parametrize("make", [_functional, _gan, _words, _pictures])
def test_a_copy_trains_as_the_original(make):
    import keras

    keras.utils.set_random_seed(0)
    model, x, y = make(keras)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    data, sent = transport.serialize(model)
    assert data == transport.serialize(model)[0], "the same model gives the same bytes: workers that have it keep it"
    copy, came = transport.deserialize(data, sent.values())
    assert type(copy) is not keras.Model and copy is not model
    for one in (model, copy):
        one.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert model.history.history == copy.history.history
    values = came.values()
    for number, value in sent.values().items():
        np.testing.assert_array_equal(value, values[number])
    assert not {id(v) for v in copy.variables} - came.numbers.keys()
    if make is _functional:
        assert copy.get_config() == model.get_config()


@pytest.mark.skipif(not at_least("keras", 3, 15), reason="Keras has MultiOptimizer from 3.15")
def test_a_copy_updates_each_variable_with_the_optimizer_that_it_has():
    import keras

    layers = [keras.Input((2,)), keras.layers.Dense(3, name="body"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    adam, sgd = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.1, momentum=0.9)
    whole = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(adam, {"body/.*": sgd}))
    model.compile(whole, "mse")
    model.optimizer.build(model.trainable_variables)
    data, sent = transport.serialize(model)
    copy, came = transport.deserialize(data, sent.values())
    for one in (model, copy):
        one.fit(np.ones((4, 2)), np.zeros((4, 1)), verbose=0)
    for number, value in sent.values().items():
        np.testing.assert_array_equal(value, came.values()[number])


def test_what_comes_back_is_about_the_objects_that_went():
    import keras

    class Watch(keras.callbacks.Callback):
        def __init__(self, model, teacher):
            super().__init__()
            self.layer, self.teacher = model.layers[0], teacher
            self.seen, self.lock = [], None

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    teacher = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    watch = Watch(model, teacher)
    data, sent = transport.serialize(model)
    calls, own = transport.serialize([watch], sent)
    copy, came = transport.deserialize(data, sent.values())
    (its,), its_own = transport.deserialize(calls, known=came)
    assert its.layer is copy.layers[0] and its.teacher is not teacher
    np.testing.assert_array_equal(its.teacher.get_weights()[0], teacher.get_weights()[0])
    its.seen.append(copy.layers[0].kernel)
    its.teacher.set_weights([np.ones((2, 1)), np.ones(1)])
    its.lock = threading.Lock()
    remote, local = came.joined(its_own), sent.joined(own)
    attributes, lost = transport.serialize_attributes([its], remote)
    assert lost == ["Watch.lock"]
    local.assign(remote.values())
    transport.apply_attributes([watch], attributes, local)
    assert watch.seen[0] is model.layers[0].kernel and watch.teacher is teacher and watch.layer is model.layers[0]
    np.testing.assert_array_equal(teacher.get_weights()[0], np.ones((2, 1)))


class Unreadable:
    def __reduce__(self):
        return getattr, ("a text", "no such attribute")


def test_what_cannot_be_read_of_a_callback_does_not_stay_as_it_was_without_a_word():
    import keras

    its, watch = keras.callbacks.Callback(), keras.callbacks.Callback()
    its.seen, watch.seen = Unreadable(), "what was before"
    attributes, _ = transport.serialize_attributes([its], transport.ObjectTable())
    with pytest.raises(AttributeError, match="no such attribute"):
        transport.apply_attributes([watch], attributes, transport.ObjectTable())


def test_what_does_not_pickle_is_named():
    import keras

    class Locks(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"callback 1, a Locks with its attribute 'lock'"):
        transport.serialize_named(
            [("callback 0, a History", keras.callbacks.History()), ("callback 1, a Locks", Locks())]
        )


def test_what_does_not_pickle_of_a_model_is_named_with_its_layer():
    """And the hint is one for models."""
    import keras

    class Locked(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner, self._guard = keras.layers.Dense(2), threading.Lock()

        def call(self, x):
            return self.inner(x)

    nested = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), Locked(name="guarded")])
    model = keras.Sequential([keras.Input((2,)), nested, keras.layers.Dense(1)])
    text = r"the model, whose layer 'guarded' is a Locked with its attribute '_guard' .*raytf.KerasTrainer: its workers"
    with pytest.raises(ConfigError, match=text):
        transport.serialize_named([("the model", model)])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.rows = (row for row in ())
    with pytest.raises(ConfigError, match=r"the model with its attribute 'rows' \("):
        transport.serialize_named([("the model", model), ("callback 0", keras.callbacks.History())])


def test_tables_of_words_travel():
    import keras
    import tensorflow as tf

    class Words(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            initializer = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64))
            self.words = tf.lookup.StaticVocabularyTable(initializer, 2)
            self.buckets = tf.lookup.StaticVocabularyTable(None, 3)
            self.dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 7, -1, -2)
            self.dense.insert(tf.constant([1, 2], tf.int64), tf.constant([10, 20], tf.int64))

        def call(self, x):
            return x

    layer = Words()
    data, sent = transport.serialize(keras.Sequential([keras.Input((2,)), layer]))
    (copy,) = transport.deserialize(data, sent.values())[0].layers
    for name, keys in (("words", ["a", "b", "z"]), ("buckets", ["a", "b"]), ("dense", [1, 2, 3])):
        keys = tf.constant(keys, tf.int64 if name == "dense" else tf.string)
        left, right = getattr(layer, name), getattr(copy, name)
        assert left is not right
        np.testing.assert_array_equal(left.lookup(keys).numpy(), right.lookup(keys).numpy())
    copy.dense.insert(tf.constant([5], tf.int64), tf.constant([50], tf.int64))
    assert copy.dense.lookup(tf.constant([5, 9], tf.int64)).numpy().tolist() == [50, 7]


def test_users_attributes_are_sent_and_others_are_reported():
    import keras

    class Remembers(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.history, self.predict_function = [1, {"a": 2}], len

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((2,)), Remembers(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data, sent = transport.serialize(model)
    copy, _ = transport.deserialize(data, sent.values())
    assert copy.layers[0].history == [1, {"a": 2}] and copy.layers[0].predict_function is len
    model.other = keras.optimizers.AdamW()
    model.other.exclude_from_weight_decay(var_list=[model.layers[1].bias])
    with pytest.raises(ConfigError, match="variables out of its weight decay that it does not train yet"):
        transport.serialize_named([("the model", model)])


def test_weights_are_not_copied_on_their_way_to_the_object_store():
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    data, sent = transport.serialize(model)
    one, two = sent.values(), sent.values()
    assert one and all(np.shares_memory(one[number], two[number]) for number in one if one[number].size > 1)
    assert len(data) < 64 * 64 * 4, "nor do they go with the model"
