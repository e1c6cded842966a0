"""Who ends an iterator does not wait for it, if TensorFlow may wait."""

import gc
import threading
import time

import pytest
import tensorflow as tf

from raytf.compat.tensorflow import OwnedIterator
from raytf.parallel import iterator_ends


@pytest.fixture
def replaced(monkeypatch):
    def end(self):
        iterator_ends.end(None, self)

    monkeypatch.setattr(OwnedIterator, "__del__", end, raising=False)


def whose_end(waits, ended, **autotune):
    """A dataset whose iterators cannot end before `waits` is set; then they set `ended`."""

    def rows():
        try:
            yield 1
            yield 2
        finally:
            waits.wait(20)
            ended.set()

    options = tf.data.Options()
    for name, value in autotune.items():
        setattr(options.autotune, name, value)
    return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int32)).with_options(options)


@pytest.mark.usefixtures("replaced")
def test_the_end_of_an_iterator_that_waits_holds_up_nobody():
    waits, ended = threading.Event(), threading.Event()
    iterator = iter(whose_end(waits, ended))
    assert next(iterator) == 1
    began = time.monotonic()
    del iterator
    gc.collect()
    assert time.monotonic() - began < 10 and not ended.is_set()
    waits.set()
    assert ended.wait(20)


@pytest.mark.usefixtures("replaced")
def test_without_a_thread_that_tunes_it_ends_at_once():
    """As what it was made of may be needed by the next: raytf's own feed is such."""
    waits, ended = threading.Event(), threading.Event()
    waits.set()
    iterator = iter(whose_end(waits, ended, enabled=False))
    assert next(iterator) == 1
    del iterator
    gc.collect()
    assert ended.is_set()


@pytest.mark.usefixtures("replaced")
def test_iterators_are_what_they_were():
    dataset = tf.data.Dataset.range(5).map(lambda x: 2 * x, num_parallel_calls=tf.data.AUTOTUNE)
    assert [int(x) for x in dataset] == [0, 2, 4, 6, 8]

    @tf.function
    def total(numbers):
        found = tf.constant(0, tf.int64)
        for number in numbers:
            found += number
        return found

    assert int(total(dataset)) == int(total(iter(dataset))) == 20
    gc.collect()
    assert int(dataset.reduce(tf.constant(0, tf.int64), lambda a, b: a + b)) == 20
