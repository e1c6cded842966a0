"""Rows from Arrow tables to the batches of each worker, through tf.data."""

import itertools
import time

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from raytf.data import feed as feed_module
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime.topology import Shard

ROWS = 103


def blocks(table, cuts=(10, 60)):
    tables = [table.slice(a, b - a) for a, b in zip((0, *cuts), (*cuts, len(table)), strict=True)]
    return StoredDataset(tables, [len(t) for t in tables], table.column_names)


def feed(table, features, labels=None, weights=None, **options):
    batch = BatchSpec.parsed(features, labels, weights, options.pop("map", None))
    shard = Shard(options.pop("worker", 0), options.pop("workers", 1))
    own = {name: options.pop(name) for name in ("static", "reader_shard", "shapes_only") if name in options}
    return Feed(blocks(table), batch, Sampling(**{"global_batch": 25} | options), shard, **own)


def numbers():
    return pa.table({"id": np.arange(ROWS), "x": np.arange(ROWS, dtype="float32"), "w": np.ones(ROWS)})


@pytest.fixture(params=["full", "window", "none"])
def shuffle(request):
    return request.param


@pytest.mark.sampled(3)
@pytest.mark.parametrize("superbatch", [pytest.param(feed_module.SUPERBATCH, marks=pytest.mark.slow), 600])
def test_workers_together_give_every_row_once(shuffle, superbatch, monkeypatch):
    """As many steps on each worker as on any, also where a last step has no row for one."""
    monkeypatch.setattr(feed_module, "SUPERBATCH", superbatch)
    monkeypatch.setattr(feed_module, "FIRST_SUPERBATCH", superbatch)
    options = {"shuffle": shuffle, "window": 50, "global_batch": 34}
    alone = [b.numpy().tolist() for b in feed(numbers(), "id", **options).dataset()]
    assert len(alone) == 4 and sorted(itertools.chain(*alone)) == list(range(ROWS))
    for workers in (2, 3):
        feeds = [feed(numbers(), "id", worker=w, workers=workers, **options) for w in range(workers)]
        epochs = [list(f.dataset().as_numpy_iterator()) for f in feeds]
        together = [np.concatenate(step).tolist() for step in zip(*epochs, strict=True)]
        assert together == alone
        assert len(epochs[-1][-1]) == 0, "one row is left for the last step"
        assert all(f.dataset().cardinality() == 4 for f in feeds)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [False, True])
def test_step_one_million_is_not_looked_for(shuffle, bucket):
    """An epoch that resumes there takes as much of the processors as its rows do, and not what is before them."""
    rows, step = 1_001_000, 1_000_000
    table = pa.table({"id": np.arange(rows)})
    if bucket:
        ends = pa.array(np.arange(rows + 1, dtype=np.int32))
        table = table.append_column("words", pa.ListArray.from_arrays(ends, pa.array(np.arange(rows))))
    features = Column("words", pad="batch", bucket=True) if bucket else "id"
    made = feed(table, features, "id", global_batch=1, shuffle=shuffle, seed=4)
    taken = {0: [], step: []}
    for epoch, first in itertools.product((1, 2, 3), taken):
        began = time.process_time()
        made.set_epoch(epoch, first)
        _, found = next(iter(made.dataset()))
        taken[first].append(time.process_time() - began)
    order = Sampling(global_batch=1, seed=4, shuffle=shuffle).sampler([10, 50, rows - 60])
    chunk, within = divmod(step, order.chunk_steps)
    lengths = np.ones_like if bucket else None
    epoch = order.epoch(3)
    assert found.numpy().tolist() == [epoch.row_numbers(epoch.positions(chunk, lengths))[within]]
    assert min(taken[step]) < 4 * min(taken[0]), taken


@pytest.mark.sampled(3)
def test_run_resumes_at_any_step(shuffle):
    one = feed(numbers(), "id", shuffle=shuffle, window=50)
    one.set_epoch(3)
    whole = [b.tolist() for b in one.dataset().as_numpy_iterator()]
    for step in range(len(whole)):
        again = feed(numbers(), "id", shuffle=shuffle, window=50)
        again.set_epoch(3, step)
        dataset = again.dataset()
        assert dataset.cardinality() == len(whole) - step
        assert [b.tolist() for b in dataset.as_numpy_iterator()] == whole[step:]


def test_epochs_count_themselves_and_rows_stay_together(shuffle):
    table = pa.table({"id": np.arange(ROWS), "twice": 2 * np.arange(ROWS), "w": np.arange(ROWS) / 7})
    one = feed(table, {"a": "id", "b": ["id", "twice"]}, "twice", "w", shuffle=shuffle)
    dataset = one.dataset()
    orders = []
    for _ in range(2):
        ids = []
        for features, label, weight in dataset.as_numpy_iterator():
            assert features["a"].dtype == np.int64 and features["b"].dtype == np.float32
            np.testing.assert_array_equal(features["b"], np.stack([features["a"], 2 * features["a"]], 1))
            np.testing.assert_array_equal(label, 2 * features["a"])
            np.testing.assert_allclose(weight, features["a"] / 7)
            ids += features["a"].tolist()
        assert sorted(ids) == list(range(ROWS))
        orders.append(ids)
    assert (orders[0] == orders[1]) == (shuffle == "none")


LISTS = [[i] * (i % 7) for i in range(ROWS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", [{"ragged": True}, {"pad": 9, "pad_value": -1}, {"pad": "batch"}])
@pytest.mark.parametrize("workers", [1, 3])
def test_lists_of_different_lengths(options, workers):
    table = pa.table({"tokens": pa.array(LISTS, pa.list_(pa.int32())), "id": np.arange(ROWS)})
    seen, batches = [], [batch.numpy() for batch in feed(table, "id", global_batch=34).dataset()]
    for worker in range(workers):
        place = {"worker": worker, "workers": workers, "global_batch": 34}
        dataset = feed(table, Column("tokens", **options), "id", **place).dataset()
        for (tokens, ids), everybodys in zip(dataset, batches, strict=True):
            ids = ids.numpy().tolist()
            assert tokens.dtype == tf.int32
            if "ragged" in options:
                assert tokens.to_list() == [LISTS[i] for i in ids]
            else:
                value = options.get("pad_value", 0)
                width = 9 if options["pad"] == 9 else max(i % 7 for i in everybodys)
                assert tokens.numpy().tolist() == [LISTS[i] + [value] * (width - i % 7) for i in ids]
            seen += ids
    assert sorted(seen) == list(range(ROWS))


def test_rows_of_similar_length_share_a_batch():
    table = pa.table({"tokens": pa.array(LISTS, pa.list_(pa.int32())), "id": np.arange(ROWS)})
    seen, widths = [], []
    for tokens, ids in feed(table, Column("tokens", pad="batch", bucket=True), "id", global_batch=10).dataset():
        seen += ids.numpy().tolist()
        widths.append(np.ptp([i % 7 for i in ids.numpy()]))
        assert tokens.shape[1] == max(i % 7 for i in ids.numpy())
    assert sorted(seen) == list(range(ROWS))
    assert np.mean(widths[:-1]) <= 1.5


def test_images_are_decoded_and_resized():
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255, (8, 6, 3) if i % 2 else (4, 3, 3), dtype=np.uint8) for i in range(ROWS)]
    files = [tf.io.encode_png(p).numpy() for p in pixels]
    table = pa.table({"png": pa.array(files), "id": np.arange(ROWS)})
    for image, ids in feed(table, Column("png", image=(8, 6, 3)), "id").dataset():
        assert image.dtype == tf.uint8 and image.shape[1:] == (8, 6, 3)
        for decoded, i in zip(image.numpy(), ids.numpy(), strict=True):
            if i % 2:
                np.testing.assert_array_equal(decoded, pixels[i])
            else:
                its = tf.image.resize(pixels[i], (8, 6)).numpy()
                assert np.abs(decoded - its).max() <= 0.51


def test_large_jpeg_files_are_decoded_at_a_smaller_size():
    """Where their size allows it; other files as before."""
    shapes = [(40, 31, 3), (20, 15, 3), (19, 40, 3), (9, 6, 3), (90, 70, 3)]
    rng = np.random.default_rng(0)
    pixels = [tf.image.resize(rng.integers(0, 255, (4, 3, 3)), shape[:2]).numpy().astype(np.uint8) for shape in shapes]
    jpeg = [tf.io.encode_jpeg(image, quality=95).numpy() for image in pixels]
    table = pa.table({"file": pa.array([*jpeg, tf.io.encode_png(pixels[0]).numpy()]), "id": np.arange(6)})
    found = {}
    for draft in (False, True):
        column = Column("file", image=(9, 7, 3), draft=draft)
        for images, ids in feed(table, column, "id").dataset():
            found |= {(draft, int(i)): image for i, image in zip(ids, images.numpy(), strict=True)}
    for i, ratio in enumerate([4, 2, 2, 1, 8]):
        image = tf.image.resize(tf.io.decode_jpeg(jpeg[i], channels=3, ratio=ratio), (9, 7)).numpy()
        assert np.abs(found[True, i] - image).max() <= 0.51
    for i in (3, 5):
        np.testing.assert_array_equal(found[True, i], found[False, i])
    with pytest.raises(ConfigError, match="draft needs image"):
        Column("file", draft=True)


def test_strings_reach_the_model_whole():
    words = [f"word {i}\0" for i in range(ROWS)]
    for text, ids in feed(pa.table({"text": words, "id": np.arange(ROWS)}), "text", "id").dataset():
        assert [t.decode() for t in text.numpy()] == [words[i] for i in ids.numpy()]


@pytest.mark.slow
def test_augmentation_depends_on_seed_epoch_and_row_alone():
    def augment(x, y, seeds):
        noise = tf.map_fn(lambda s: tf.random.stateless_uniform([], s), seeds, fn_output_signature=tf.float32)
        return x + noise, y

    def values(epoch, **options):
        one = feed(numbers(), "x", "id", map=augment, **options)
        one.set_epoch(epoch)
        return {int(i): float(x) for xs, ids in one.dataset() for x, i in zip(xs, ids, strict=True)}

    alone = values(2)
    assert len(alone) == ROWS and all(0 <= x - i < 1 for i, x in alone.items())
    halves = values(2, worker=0, workers=2) | values(2, worker=1, workers=2)
    assert alone == halves
    assert alone == values(2, global_batch=7, shuffle="window", window=20), "whatever the order"
    assert alone != values(3) and alone != values(2, seed=1)


def test_two_columns_cannot_both_define_which_rows_share_a_batch():
    table = pa.table({"a": pa.array(LISTS), "b": pa.array(LISTS)})
    with pytest.raises(ConfigError, match="One column at most"):
        feed(table, {n: Column(n, pad="batch", bucket=True) for n in "ab"})


def test_order_identifies_the_rows_of_steps():
    """What changes no step's rows is not in it: seeds without a shuffle, windows with a full one, how rows are cut."""

    def order(cuts=(10, 60), **options):
        batch = BatchSpec.parsed("id", None, None, None)
        return Feed(blocks(numbers(), cuts), batch, Sampling(**{"global_batch": 25} | options)).order

    assert order(shuffle="none", seed=1) == order(shuffle="none", seed=2) != order(shuffle="none", global_batch=20)
    assert order(shuffle="full", window=50) == order(shuffle="full", window=99, cuts=(3,))
    assert order(shuffle="full", seed=1) != order(shuffle="full", seed=2)
    assert order(shuffle="window", window=50) == order(shuffle="window", window=60), "both are two steps"
    assert order(shuffle="window", window=50) != order(shuffle="window", window=75)
    assert order(shuffle="window") != order(shuffle="window", cuts=(10, 61))
