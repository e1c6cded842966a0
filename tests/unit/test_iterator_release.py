"""Who ends an iterator does not wait for it, if TensorFlow may wait."""

import gc
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from raytf.compat.tensorflow import OwnedIterator
from raytf.parallel import iterator_release

# The end of its iterator takes three seconds more when Python begins to end. Hooks run from the last to the first.
ENDS_WITH_PYTHON = """
import atexit, gc, threading, time
waits, ended = threading.Event(), threading.Event()
atexit.register(lambda: print("freed before Python ends:", ended.is_set()))
import tensorflow as tf
from raytf.parallel import trainer
trainer.install()
atexit.register(waits.set)

def rows():
    try:
        yield from range(9)
    finally:
        waits.wait(60)
        time.sleep(3)
        ended.set()

iterator = iter(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int32)).prefetch(1))
next(iterator)
del iterator
gc.collect()
assert not ended.is_set()
"""


@pytest.fixture
def replaced(monkeypatch):
    def end(self):
        iterator_release.release_iterator(None, self)

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


@pytest.mark.slow
@pytest.mark.usefixtures("replaced")
def test_the_end_of_an_iterator_that_waits_holds_up_nobody():
    waits, ended = threading.Event(), threading.Event()
    iterator = iter(whose_end(waits, ended))
    assert next(iterator) == 1
    del iterator
    gc.collect()
    assert not ended.is_set()
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


@pytest.mark.slow
def test_python_exits_after_all_iterators_are_freed():
    """A thread that asks for Python's lock within a destructor while Python ends would abort the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_PYTHON], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "freed before Python ends: True\n"), done.stderr[-3000:]


def test_slow_end_is_logged_and_has_a_limit(monkeypatch, capsys, set_timeouts):
    monkeypatch.setattr(iterator_release, "_QUIET_INTERVAL", 0.0)
    set_timeouts(iterator_end=0.1)
    waits, ended = threading.Event(), threading.Event()

    class Held:
        def __del__(self):
            waits.wait(60)
            ended.set()

    ends = iterator_release._IteratorReaper()
    ends.begin([Held()])
    ends.close()
    lines = capsys.readouterr().err.splitlines()
    assert "may take a minute" in lines[0] and "has not freed 1 iterators" in lines[1] and len(lines) == 2, lines
    assert ends.closed and not ended.is_set()
    waits.set()
    assert ended.wait(60)
    ends.close()
    assert not capsys.readouterr().err


def test_one_of_a_function_warns_of_nothing(recwarn):
    @tf.function
    def first(n):
        held = iter(tf.data.Dataset.range(n))
        iterators.append(iter(tf.data.Dataset.range(3)))
        value = held.get_next()
        del held
        iterators.clear()  # that of another place, while this is traced
        gc.collect()
        return value

    iterators = [iter(tf.data.Dataset.range(3))]
    assert int(first(tf.constant(2, tf.int64))) == 0
    assert not [warning for warning in recwarn if "tf.data options" in str(warning.message)]
