"""Lists that are filled up to the longest of their batch: the global one, whatever the number of workers."""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import feed as feed_module
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.runtime.topology import Shard


def feeds(lengths, workers: int, block: int, batch: BatchSpec, **sampling) -> list[Feed]:
    """One for each worker, over blocks of `block` rows whose lists have these lengths."""
    table = pa.table(
        {
            "tokens": pa.array([[i + 1] * size for i, size in enumerate(lengths)], pa.list_(pa.int32())),
            "tags": pa.array([[0.5] * (3 * size % 4) for size in lengths], pa.list_(pa.float64())),
            "id": np.arange(len(lengths)),
        }
    )
    tables = [table.slice(start, block) for start in range(0, len(table), block)]
    dataset = StoredDataset(tables, [len(t) for t in tables], table.column_names)
    return [Feed(dataset, batch, Sampling(**sampling), Shard(w, workers)) for w in range(workers)]


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    workers=st.integers(2, 4),
    block=st.integers(1, 17),
    global_batch=st.integers(4, 20),
    shuffle=st.sampled_from(["full", "window", "none"]),
    bucket=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_each_worker_knows_the_longest_list_of_each_global_batch(
    lengths, workers, block, global_batch, shuffle, bucket, data
):
    """From any step on, in superbatches of any number of steps, also of a step of which a worker has no row."""
    columns = {"tokens": Column("tokens", pad="batch", bucket=bucket), "tags": Column("tags", pad="batch")}
    how = {"global_batch": global_batch, "shuffle": shuffle, "window": 20, "seed": 3}
    batch = BatchSpec.parsed(columns, "id")
    alone, *many = feeds(lengths, 1, block, batch, **how) + feeds(lengths, workers, block, batch, **how)
    first = data.draw(st.integers(0, alone.steps - 1))
    chunk_end = min(alone.steps, (first // alone.chunk_steps + 1) * alone.chunk_steps)
    count = data.draw(st.integers(1, chunk_end - first))
    ids = alone.span(1, first, count)[4]
    longest = [max(lengths[i] for i in ids[begin : begin + global_batch]) for begin in range(0, len(ids), global_batch)]
    for feed in (alone, *many):
        *_, tokens, tags = feed.span(1, first, count)
        assert tokens.tolist() == longest
        assert len(tags) == count


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shuffle", "bucket", "superbatch"),
    [pytest.param("full", False, 1, marks=pytest.mark.slow), ("window", True, 1 << 20)],
)
def test_workers_pad_to_the_longest_list_of_the_global_batch(shuffle, bucket, superbatch, monkeypatch):
    """The batches of all workers, one below the other, are those of one process: shapes, too."""
    monkeypatch.setattr(feed_module, "SUPERBATCH", superbatch)
    monkeypatch.setattr(feed_module, "FIRST_SUPERBATCH", superbatch)
    lengths = [(i * i) % 11 for i in range(31)]
    columns = {
        "tokens": Column("tokens", pad="batch", bucket=bucket, pad_value=-1),
        "tags": Column("tags", pad="batch"),
    }
    how = {"global_batch": 6, "shuffle": shuffle, "window": 20, "seed": 3}
    batch = BatchSpec.parsed(columns, "id")
    alone, *many = (
        list(feed.dataset().as_numpy_iterator())
        for workers in (1, 3)
        for feed in feeds(lengths, workers, 12, batch, **how)
    )
    assert len(many[-1][-1][1]) == 0, "one row is left for the last step"
    for whole, *parts in zip(alone, *many, strict=True):
        for leaf, *leaves in zip(tf.nest.flatten(whole), *map(tf.nest.flatten, parts), strict=True):
            np.testing.assert_array_equal(leaf, np.concatenate(leaves))
        assert whole[0]["tokens"].shape[1] == max(lengths[i] for i in whole[1])


@pytest.mark.slow
def test_rows_that_were_taken_before_still_count():
    """A step that resumes after its first rows is as wide as the whole step."""
    lengths = [7, 1, 2, 3, 1, 2]
    spec = BatchSpec.parsed(Column("tokens", pad="batch"))
    parts = [
        next(feed.step_without(2).as_numpy_iterator())
        for feed in feeds(lengths, 2, 6, spec, global_batch=6, shuffle="none")
    ]
    assert [part.shape for part in parts] == [(1, 7), (3, 7)]


def test_the_users_function_of_a_batch_sees_the_width_of_the_global_batch():
    spec = BatchSpec.parsed(
        Column("tokens", pad="batch"), "id", map=lambda x, y, seeds: (x, tf.shape(x, tf.int64)[1] + 0 * y)
    )
    lengths = [1, 5, 2, 2, 1]
    found = [list(feed.dataset()) for feed in feeds(lengths, 2, 2, spec, global_batch=4, shuffle="none")]
    for one, other, width in zip(*found, [5, 1], strict=True):
        assert [set(part[1].numpy().tolist()) - {width} for part in (one, other)] == [set(), set()]
        assert one[0].shape[1] == other[0].shape[1] == width
