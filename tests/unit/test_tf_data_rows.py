"""`raytf.fit` of a `tf.data.Dataset` reads it once: only where Keras, which reads it in each epoch, sees those rows."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import raytf
from raytf.console import phases
from raytf.errors import ConfigError
from raytf.fitting import arrays, tf_data
from tests.waiting import until

STEPS = {
    "map": lambda ds: ds.map(lambda x: x + 100),
    "filter": lambda ds: ds.filter(lambda x: x % 3 > 0),
    "shuffle": lambda ds: ds.shuffle(20),
    "shuffle once": lambda ds: ds.shuffle(20, reshuffle_each_iteration=False),
    "take": lambda ds: ds.take(9),
    "skip": lambda ds: ds.skip(2),
    "repeat": lambda ds: ds.repeat(2),
    "cache": lambda ds: ds.cache(),
    "pairs": lambda ds: ds.batch(2).unbatch(),
    "whole pairs": lambda ds: ds.batch(2, drop_remainder=True).unbatch(),
    "flat": lambda ds: ds.flat_map(lambda x: tf.data.Dataset.from_tensors(x)),
    "zip": lambda ds: tf.data.Dataset.zip((ds, tf.data.Dataset.range(1000))).map(lambda x, i: 1000 * x + i),
    "shuffle within": lambda ds: ds.flat_map(lambda x: tf.data.Dataset.range(3).shuffle(3).map(lambda i: 10 * x + i)),
}
ENDS = {
    "batch": lambda ds: ds.batch(4),
    "whole batches": lambda ds: ds.batch(4, drop_remainder=True),
    "whole batches, ready": lambda ds: ds.batch(4, drop_remainder=True).prefetch(1),
    "whole batches, mapped": lambda ds: ds.batch(4, drop_remainder=True).map(lambda x: x - 7),
}


def readings(dataset, epochs=6):
    return [[int(x) for batch in dataset.as_numpy_iterator() for x in batch] for _ in range(epochs)]


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.sampled_from(sorted(ENDS)))
@settings(max_examples=12, deadline=None)
def test_what_is_taken_is_what_each_epoch_of_keras_sees(steps, end):
    dataset = tf.data.Dataset.range(13)
    for name in steps:
        dataset = STEPS[name](dataset)
    dataset = ENDS[end](dataset)
    epochs = readings(dataset)
    if not epochs[0]:
        return
    try:
        found = tf_data.rows_of(dataset, "x", {})
    except ConfigError:
        # refused is what may change; a shuffle that happens not to change anything may be among it
        assert any("shuffle" in name for name in steps)
        return
    rows = found.parts[0].tolist()
    for epoch in epochs:
        if found.drops:
            assert not collections.Counter(epoch) - collections.Counter(rows)
            assert len(epoch) == len(rows) // found.batch * found.batch
        elif found.shuffles:
            assert sorted(epoch) == sorted(rows)
        else:
            assert epoch == rows


@pytest.mark.parametrize("names", [["shuffle", "take"], ["shuffle", "skip"], ["shuffle", "zip"], ["shuffle within"]])
def test_other_rows_in_each_epoch_are_refused(names):
    dataset = tf.data.Dataset.range(13)
    for name in names:
        dataset = STEPS[name](dataset)
    with pytest.raises(ConfigError, match="the same rows each time"):
        tf_data.rows_of(dataset.batch(4), "x", {})


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (["shuffle once", "take"], "batch"),
        (["take", "shuffle"], "batch"),
        (["shuffle", "cache"], "whole batches, mapped"),
        (["shuffle"], "whole batches, ready"),
    ],
)
def test_the_same_rows_in_each_epoch_are_taken(names, end):
    dataset = tf.data.Dataset.range(13)
    for name in names:
        dataset = STEPS[name](dataset)
    found = tf_data.rows_of(ENDS[end](dataset), "x", {})
    assert (found.shuffles, found.drops) == (names[-1] == "shuffle", names == ["shuffle"])


def test_what_keras_reads_once_may_give_other_rows_each_time():
    """`evaluate`, `predict` and a `fit` of one epoch: in the order of that reading."""
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(range(13)), output_signature=tf.TensorSpec((), tf.int64)
    ).shuffle(20)
    found = tf_data.rows_of(dataset.take(9).batch(4), "x", {}, reads_once=True)
    assert len(found.parts[0]) == 9 and not found.shuffles


@pytest.mark.parametrize("call", [raytf.fit, raytf.evaluate, raytf.predict])
def test_a_call_shows_that_it_reads_and_converts_its_data(call, monkeypatch, capsys):
    def waits_for(text):
        shown = []
        until(lambda: shown.append(capsys.readouterr().out) or text in "".join(shown))
        raise ConfigError("It has been shown", text, "Go ahead")

    monkeypatch.setattr(phases, "_WORTH_A_LINE", 0.0)
    monkeypatch.setattr(tf_data, "rows_of", lambda dataset, name, *arguments, **options: waits_for(f"reading {name} ."))
    monkeypatch.setattr(arrays, "check_rows", lambda *arguments: waits_for("reading data ..."))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = np.zeros((4, 2))
    for data in (tf.data.Dataset.from_tensors(rows), rows):
        with pytest.raises(ConfigError, match="It has been shown"):
            call(model, data)
