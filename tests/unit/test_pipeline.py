"""A `tf.data` function on one worker of several: parts, steps, chance, and where it resumes."""

from __future__ import annotations

import functools
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.data import pipeline
from raytf.data.pipeline import PipelineFeed
from raytf.data.sampling import Sampling
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard

ROWS, BATCH = 101, 24


def opened(source, worker=0, workers=1, batch=BATCH, agreed=True, seed=3):
    feed = PipelineFeed(source, Sampling(global_batch=batch, seed=seed, shuffle="none"), Shard(worker, workers))
    if agreed:  # of several workers without an exchange between them
        feed.steps = feed.known_steps() if workers > 1 else feed.agree(None).steps
    return feed


def flat(parts):
    return list(itertools.chain.from_iterable(parts))


def numbers(context):
    return tf.data.Dataset.range(ROWS).shuffle(50).batch(context.batch)


def epoch(feed, number=0, first=0):
    feed.set_epoch(number, first)
    return [batch.tolist() for batch in feed.dataset().as_numpy_iterator()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_workers_cut_the_same_global_batches(rows):
    make = (lambda context: tf.data.Dataset.range(ROWS).shuffle(50)) if rows else numbers
    alone = epoch(opened(TFData(make, rows=rows)))
    assert [len(batch) for batch in alone] == [24, 24, 24, 24, 5] and sorted(flat(alone)) == list(range(ROWS))
    for workers in (2, 3, 7):
        parts = [epoch(opened(TFData(make, rows=rows), worker, workers)) for worker in range(workers)]
        assert [flat(step) for step in zip(*parts, strict=True)] == alone
    assert parts[-1][-1] == []


def test_a_function_that_shards_itself_gives_every_row_once():
    def make(context):
        return tf.data.Dataset.range(ROWS).shard(context.num_shards, context.index).batch(context.batch)

    parts = [epoch(opened(TFData(make, shards_itself=True), worker, 3)) for worker in range(3)]
    steps = [sorted(flat(step)) for step in zip(*parts, strict=True)]
    assert steps == [list(range(start, min(start + BATCH, ROWS))) for start in range(0, ROWS, BATCH)]


def test_a_function_that_does_not_read_its_shard_is_warned_of():
    def sharded(context):
        return tf.data.Dataset.range(ROWS).shard(context.num_shards, context.index).batch(context.batch)

    def whole(context):
        return tf.data.Dataset.range(ROWS).batch(context.batch)

    sampling = Sampling(global_batch=BATCH)
    for source in TFData(sharded, shards_itself=True), TFData(whole):
        assert source.with_facts(pipeline.inspect(source, sampling, "train")).facts.is_shared
    source = TFData(whole, shards_itself=True)
    with pytest.warns(UserWarning, match=r"'whole', of a raytf.TFData .* reads neither context.index"):
        source.with_facts(pipeline.inspect(source, sampling, "train"))


def test_shares_of_a_fixed_size_may_have_no_rows():
    def make(context):
        rows = tf.data.Dataset.range(ROWS).shard(context.num_shards, context.index)
        return rows.take(60 if context.index else 20).batch(context.batch, drop_remainder=True)

    feeds = [opened(TFData(make, shards_itself=True), worker, 2, 25, agreed=False) for worker in range(2)]
    assert repr(feeds[0].spec) == repr(feeds[1].spec)
    feeds[0].steps = feeds[1].steps = 4
    assert [[len(batch) for batch in epoch(feed)] for feed in feeds] == [[13, 0, 0, 0], [12, 12, 12, 12]]


def of_one_worker(context):
    return tf.data.Dataset.range(50 if context.index else 0).batch(context.batch)


def test_a_shard_that_is_empty_has_steps_without_rows():
    feed = opened(TFData(of_one_worker, shards_itself=True), 0, 2, agreed=False)
    feed.steps = 5
    assert epoch(feed) == [[]] * 5


def test_an_epoch_that_ends_early_is_an_error_and_no_wait():
    def fewer(context):
        return tf.data.Dataset.range(50 if context.epoch else 100).batch(context.batch)

    feed = opened(TFData(fewer))
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many batches as the first one.*fewer"):
        epoch(feed, 1)


@pytest.mark.slow
def test_epochs_follow_the_seed_and_resume_at_any_step():
    def make(context):
        noise = lambda x: (x, tf.random.uniform([]), np.random.random())
        rows = tf.data.Dataset.range(ROWS).shuffle(ROWS, reshuffle_each_iteration=True).map(noise)
        return rows.batch(context.batch).map(lambda *parts: tf.stack([tf.cast(part, tf.float64) for part in parts]))

    state = tf.random.get_global_generator().state.numpy()
    one = opened(TFData(make))
    found = {number: epoch(one, number) for number in range(3)}
    assert found[0] != found[1] != found[2]
    again = opened(TFData(make))
    assert epoch(again, 2) == found[2] and epoch(opened(TFData(make), seed=4), 2) != found[2]
    for first in range(1, 5):
        assert epoch(again, 1, first) == found[1][first:]
    assert (tf.random.get_global_generator().state.numpy() == state).all()


def test_the_seeds_of_a_function_are_its_own():
    tf.random.set_seed(1)
    np.random.seed(1)
    before = [tf.random.uniform([]).numpy(), np.random.random()]
    tf.random.set_seed(1)
    np.random.seed(1)
    epoch(opened(TFData(numbers)))
    assert [tf.random.uniform([]).numpy(), np.random.random()] == before


@pytest.mark.slow
def test_what_is_cached_stays_and_is_that_of_the_first_epoch():
    calls = []

    def counted(x):
        calls.append(int(x))
        return x

    def make(context):
        rows = tf.data.Dataset.range(ROWS).shuffle(ROWS).map(lambda x: tf.py_function(counted, [x], tf.int64))
        return rows.cache().batch(context.batch).map(lambda x: tf.ensure_shape(x, [None]))

    def typed(context):
        return make(context)

    source = TFData(typed, steps_per_epoch=5)
    one = opened(source)
    found = [epoch(one, number) for number in range(3)]
    assert len(calls) == ROWS and found[0] == found[1] == found[2]
    assert epoch(opened(source), 2) == found[0], "a run that goes on in a later epoch has the same rows"


def test_a_cache_within_a_function_is_one_for_each_dataset_that_it_makes():
    def make(context):
        within = lambda x: tf.data.Dataset.range(x * 10, x * 10 + 2).cache()
        return tf.data.Dataset.range(3).interleave(within, cycle_length=1).batch(context.batch)

    one = opened(TFData(make))
    assert [epoch(one, number) for number in range(2)] == [[[0, 1, 10, 11, 20, 21]]] * 2


def test_batches_of_another_size_are_reported():
    def make(context):
        return tf.data.Dataset.range(ROWS).batch(10)

    layout = pipeline.inspect(TFData(make), Sampling(global_batch=BATCH), "train")
    assert "a batch has 10 rows, and batch_size is 24" in layout.text and layout.steps == 11


@pytest.mark.slow
def test_an_endless_dataset_is_one_stream():
    def make(context):
        return tf.data.Dataset.range(ROWS).repeat().batch(context.batch)

    one = opened(TFData(make, steps_per_epoch=3))
    found = [epoch(one, number) for number in range(3)]
    assert flat(flat(found)) == [i % ROWS for i in range(9 * BATCH)]
    assert epoch(opened(TFData(make, steps_per_epoch=3)), 2, 1) == found[2][1:]
    one.set_epoch(0)
    left = iter(one.dataset())
    next(left)
    assert epoch(one, 1) == found[1], "what reads ahead takes nothing from it"
    with pytest.raises(ConfigError, match="endless dataset needs steps_per_epoch"):
        opened(TFData(make))


def test_batches_that_are_not_known_are_counted(capsys):
    feed = opened(TFData(lambda context: tf.data.Dataset.range(ROWS).filter(lambda x: x > 40).batch(context.batch)))
    assert feed.steps == 3 and feed.dataset().cardinality() == 3
    assert "so they were counted: 3 in" in capsys.readouterr().err


def test_order_is_kept_whatever_options_the_function_sets():
    def make(context):
        slow = lambda x: tf.py_function(lambda x: x, [x], tf.int64)
        rows = tf.data.Dataset.range(ROWS).map(slow, num_parallel_calls=8, deterministic=False)
        options = tf.data.Options()
        options.deterministic = False
        return rows.map(lambda x: tf.ensure_shape(x, [])).batch(context.batch).with_options(options)

    assert flat(epoch(opened(TFData(make)))) == list(range(ROWS))


class Batches(keras.utils.PyDataset):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def __len__(self):
        return math.ceil(ROWS / self.size)

    def __getitem__(self, index):
        rows = np.arange(index * self.size, min(ROWS, (index + 1) * self.size))
        return {"x": rows, "half": rows / 2}, rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("workers", "processes"),
    [(1, False), pytest.param(3, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_a_py_dataset_with_workers_of_its_own(workers, processes):
    source = TFData(lambda context: Batches(context.batch, workers=workers, use_multiprocessing=processes))
    for number in range(2):
        parts = []
        for worker in range(2):
            feed = opened(source, worker, 2)
            assert feed.resume_unit == "epoch" and feed.hidden
            feed.set_epoch(number)
            parts.append([(x["half"], y) for x, y in feed.dataset().as_numpy_iterator()])
        for half, y in itertools.chain(*parts):
            np.testing.assert_array_equal(half * 2, y)
        steps = [np.concatenate([y for _, y in step]) for step in zip(*parts, strict=True)]
        np.testing.assert_array_equal(np.concatenate(steps), np.arange(ROWS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sparse", [False, True])
def test_ragged_and_sparse_rows_in_a_dict(sparse):
    lists = tf.ragged.range(tf.range(1, 10))

    def make(context):
        x = tf.sparse.from_dense(lists.to_tensor()) if sparse else lists
        return tf.data.Dataset.from_tensor_slices(({"x": x}, tf.range(9))).batch(4)

    feeds = [opened(TFData(make), worker, 3, 4) for worker in range(3)]
    dense = lambda x: tf.sparse.to_dense(x).numpy() if sparse else x.to_tensor(shape=[None, 9]).numpy()
    parts = [[(dense(x["x"]), y.numpy()) for x, y in feed.dataset()] for feed in feeds]
    whole = np.concatenate([x for step in zip(*parts, strict=True) for x, _ in step])
    np.testing.assert_array_equal(whole, lists.to_tensor(shape=[None, 9]).numpy())
    short = opened(TFData(make, shards_itself=True), 0, 3, 4, agreed=False)
    short.steps = 5
    assert [int(y.shape[0]) for _, y in short.dataset()] == [4, 4, 1, 0, 0]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda context: np.arange(9), {}, "a numpy.ndarray; from '<lambda>', of 'train'. Return the dataset"),
        (
            lambda context: {}["a"],
            {},
            r"received: KeyError: .a. \(test_pipeline.py, line \d+\)",
        ),
        (lambda context: numbers(context).map(tf.io.decode_raw), {}, r"TypeError: .*\(test_pipeline.py, line \d+\)"),
        (lambda context: tf.data.Dataset.range(3), {}, "rows, .*int64.*rows=True"),
        (
            lambda context: tf.data.Dataset.range(3).map(lambda x: tf.range(x)),
            {"rows": True},
            "known shape.*set_shape.*padded_batch",
        ),
        (
            lambda context: tf.data.TFRecordDataset(["/nowhere"]).batch(3).map(lambda x: tf.strings.length(x)),
            {},
            "first batch fails: NotFoundError: /nowhere",
        ),
        (lambda context: tf.data.Dataset.range(0).batch(3), {}, "a dataset without a batch.*Check the files"),
    ],
)
def test_errors_name_the_function_and_the_fix(make, options, message):
    with pytest.raises(ConfigError, match=message):
        pipeline.inspect(TFData(make, **options), Sampling(global_batch=BATCH), "train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((tf.data.Dataset.range(3),), "Pass the function"),
        ((numbers,), None),
        ((functools.partial(numbers),), None),
    ],
)
def test_what_a_tfdata_takes(given, message):
    if message is None:
        assert TFData(*given).name == "numbers"
        return
    with pytest.raises(ConfigError, match=message):
        TFData(*given)


@pytest.mark.parametrize("wrong", [{"uneven": "drop"}, {"resume": True}, {"steps_per_epoch": 0}, {"rows": 3}])
def test_wrong_arguments(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TFData(numbers, **wrong)
