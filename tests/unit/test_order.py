import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf import order

rows_ = st.integers(0, 400)
batches = st.integers(1, 60)


@settings(max_examples=200)
@given(rows_, batches, st.integers(0, 2**63 - 1), st.integers(0, 50), st.data())
def test_the_global_batches_do_not_depend_on_the_number_of_workers(rows, batch, seed, epoch, data):
    """Workers' parts, put together by rank, are the global batches; every row comes exactly once."""
    first = data.draw(st.integers(0, order.steps_per_epoch(rows, batch)))
    alone = list(order.epoch_parts(rows, seed, epoch, batch, 0, 1, first_step=first))
    for workers in (2, 3, 5):
        parts = [
            list(order.epoch_parts(rows, seed, epoch, batch, w, workers, first_step=first)) for w in range(workers)
        ]
        together = [np.concatenate(step) for step in zip(*parts, strict=True)]
        assert len(together) == len(alone)
        assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    if first == 0:
        seen = np.sort(np.concatenate(alone)) if alone else np.empty(0)
        assert np.array_equal(seen, np.arange(rows))


@given(st.integers(20, 400), st.integers(0, 2**63 - 1))
def test_epochs_are_shuffled_differently_and_repeatably(rows, seed):
    first, again, second = (order.permutation(rows, seed, epoch) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    assert not np.array_equal(order.permutation(rows, (seed + 1) % 2**63, 0), first)


@given(rows_, batches)
def test_steps(rows, batch):
    assert order.steps_per_epoch(rows, batch) == -(-rows // batch)
    assert order.steps_per_epoch(rows, batch, drop_remainder=True) == rows // batch


def test_no_shuffle_keeps_the_order():
    assert order.permutation(7, 3, 2, "none").tolist() == list(range(7))


def test_positions_are_uniform():
    """Over many epochs a row comes at every place about as often: a chi-square statistic far from its tail."""
    rows, epochs = 12, 3000
    counts = np.zeros((rows, rows))
    for epoch in range(epochs):
        counts[order.permutation(rows, 1, epoch), np.arange(rows)] += 1
    expected = epochs / rows
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (rows - 1) ** 2
    assert abs(statistic - freedom) < 6 * np.sqrt(2 * freedom)
