import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import sampling
from raytf.data.sampling import Sampler

seeds = st.integers(0, 2**63 - 1)
orders = st.builds(
    lambda rows, batch, seed, shuffle, window: Sampler(
        rows=tuple(rows), global_batch=batch, seed=seed, shuffle=shuffle, window=window
    ),
    st.lists(st.integers(0, 90), max_size=8),
    st.integers(1, 60),
    seeds,
    st.sampled_from(sampling.SHUFFLES),
    st.integers(1, 300),
)


def parts(order_, epoch, worker, workers, first=0, lengths=None):
    """Stream positions of each step of one worker, from step `first` on."""
    made, batch = [], order_.global_batch
    steps = sampling.steps_per_epoch(order_.total, batch)
    plan = order_.epoch(epoch)
    for step in range(first, steps):
        chunk, within = divmod(step, order_.chunk_steps)
        positions = plan.positions(chunk, lengths)
        made.append(sampling.worker_part(positions, batch, worker, workers, slice(within, within + 1)))
    return made


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(orders, st.integers(0, 50), st.booleans(), st.data())
def test_the_global_batches_do_not_depend_on_the_number_of_workers(made, epoch, by_length, data):
    """Workers' parts, put together by rank, are the global batches; every row comes exactly once, wherever a run
    starts again, in whatever chunks and pieces."""
    lengths = (lambda positions: positions * 7919 % 13) if by_length else None
    steps = sampling.steps_per_epoch(made.total, made.global_batch)
    first = data.draw(st.integers(0, steps))
    alone = parts(made, epoch, 0, 1, 0, lengths)
    for workers in (2, 3, 5):
        those = [parts(made, epoch, w, workers, first, lengths) for w in range(workers)]
        together = [np.concatenate(step) for step in zip(*those, strict=True)]
        assert len(together) == steps - first
        assert all(np.array_equal(a, b) for a, b in zip(alone[first:], together, strict=True))
    assert all(len(step) == made.global_batch for step in alone[:-1])
    seen = np.sort(np.concatenate(alone)) if alone else np.empty(0)
    assert np.array_equal(seen, np.arange(made.total))


@given(orders, st.integers(0, 20), st.integers(1, 5), st.data())
def test_many_steps_are_cut_as_one_by_one(made, epoch, workers, data):
    plan = made.epoch(epoch)
    if not plan.chunks:
        return
    chunk = data.draw(st.integers(0, plan.chunks - 1))
    positions = plan.positions(chunk)
    steps = sampling.steps_per_epoch(len(positions), made.global_batch)
    start = data.draw(st.integers(0, steps))
    stop = data.draw(st.integers(start, steps))
    for worker in range(workers):
        at_once = sampling.worker_part(positions, made.global_batch, worker, workers, slice(start, stop))
        single = [
            sampling.worker_part(positions, made.global_batch, worker, workers, slice(s, s + 1))
            for s in range(start, stop)
        ]
        assert np.array_equal(at_once, np.concatenate(single) if single else np.empty(0))


@settings(deadline=None)
@given(st.integers(20, 400), seeds, st.sampled_from(["full", "window"]))
def test_epochs_are_shuffled_differently_and_repeatably(rows, seed, shuffle):
    def whole(seed, epoch):
        return np.concatenate(parts(Sampler(rows=(rows,), global_batch=7, seed=seed, shuffle=shuffle), epoch, 0, 1))

    assert np.array_equal(whole(seed, 0), whole(seed, 0))
    assert not np.array_equal(whole(seed, 0), whole(seed, 1))
    assert not np.array_equal(whole((seed + 1) % 2**63, 0), whole(seed, 0))


def test_a_window_holds_neighbours_and_pieces_change_places():
    made = Sampler(rows=(50,) * 20, global_batch=10, seed=1, shuffle="window", window=100)
    plan = made.epoch(0)
    for chunk in range(plan.chunks):
        assert sorted(plan.positions(chunk)) == list(range(chunk * 100, chunk * 100 + 100))
    assert sorted(plan.pieces) == list(range(20))
    assert list(plan.pieces) != list(range(20)) and list(made.epoch(1).pieces) != list(plan.pieces)


def test_steps():
    assert sampling.steps_per_epoch(10, 3) == 4
    assert sampling.steps_per_epoch(10, 3, drop_remainder=True) == 3
    assert sampling.steps_per_epoch(0, 3) == 0


def test_no_shuffle_keeps_the_order():
    whole = parts(Sampler(rows=(3, 0, 4), global_batch=2, shuffle="none", window=2), 2, 0, 1)
    assert np.concatenate(whole).tolist() == list(range(7))


def test_rows_of_similar_length_share_a_batch():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 500, 1003)
    found = sampling.bucketed(rng.permutation(1003), lengths[:1003], 10, sampling.generator(0, 0))
    assert sorted(found) == list(range(1003))
    by_row = dict(zip(found, found, strict=True))
    assert len(by_row) == 1003
    spreads = [np.ptp(batch) for batch in np.split(np.sort(lengths)[:1000], 100)]
    positions = np.arange(1003)
    found = sampling.bucketed(positions, lengths, 10, sampling.generator(0, 0))
    spans = [np.ptp(lengths[batch]) for batch in np.split(found[:1000], 100)]
    assert np.mean(spans) < 2 * np.mean(spreads) + 5
    first = [lengths[batch].mean() for batch in np.split(found[:1000], 100)]
    assert any(a > b for a, b in itertools.pairwise(first)), "batches come in random order"


def test_positions_are_uniform():
    """Over many epochs a row comes at every place about as often: a chi-square statistic far from its tail."""
    rows, epochs = 12, 3000
    counts = np.zeros((rows, rows))
    for epoch in range(epochs):
        counts[sampling.shuffled(rows, 1, epoch).elements_at(np.arange(rows)), np.arange(rows)] += 1
    expected = epochs / rows
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (rows - 1) ** 2
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)


def test_seeds_are_by_row_and_differ():
    one = sampling.row_seeds(3, 1, np.arange(10_000))
    assert one.shape == (10_000, 2) and one.dtype == np.int32
    assert len({tuple(row) for row in one}) == 10_000
    assert np.array_equal(one[[5, 77]], sampling.row_seeds(3, 1, np.array([5, 77])))
    for other in (sampling.row_seeds(3, 2, np.arange(100)), sampling.row_seeds(4, 1, np.arange(100))):
        assert not np.array_equal(one[:100], other)
    bits = np.unpackbits(one.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.01
