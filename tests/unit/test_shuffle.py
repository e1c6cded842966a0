"""An order that takes no memory: each row once, at any number of rows, and like an order drawn at random."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import sampling

seeds = st.integers(0, 2**63 - 1)
# not a power of two, so that some numbers are put in again
ROWS = 70_001


def feistel(rows, seed=0, epoch=0):
    return sampling.Feistel(rows, sampling.generator(seed, epoch, sampling._ROUNDS))


def test_each_row_comes_once_for_every_small_number_of_rows():
    for rows in range(1, 700):
        assert np.array_equal(np.sort(feistel(rows, rows, 3).elements_at(np.arange(rows))), np.arange(rows)), rows


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200_000), seeds, st.integers(0, 10_000))
def test_each_row_comes_once(rows, seed, epoch):
    assert np.array_equal(np.sort(feistel(rows, seed, epoch).elements_at(np.arange(rows))), np.arange(rows))


@settings(deadline=None)
@given(st.integers(1, 2**62), seeds, st.data())
def test_a_place_can_be_looked_at_alone(rows, seed, data):
    """Of any number of rows, with no work for the others; no two places have the same row."""
    places = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=50))
    made = feistel(rows, seed)
    found = made.elements_at(np.array(places, np.int64))
    assert found.dtype == np.int64 and len(set(found.tolist())) == len(places)
    assert all(0 <= row < rows for row in found.tolist())
    assert found.tolist() == [int(made.elements_at(np.array([place]))[0]) for place in places]


def far(statistic, freedom):
    """Whether a chi-square statistic is in a tail, by the normal approximation."""
    return abs(statistic - freedom) > 6 * np.sqrt(2 * freedom)


def chi_square(values, bins):
    counts = np.bincount(values, minlength=bins)
    return ((counts - len(values) / bins) ** 2 / (len(values) / bins)).sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [7, 12, 33])
def test_rows_are_everywhere_alike_often(rows):
    epochs = 2000
    counts = np.zeros((rows, rows))
    for epoch in range(epochs):
        counts[feistel(rows, 1, epoch).elements_at(np.arange(rows)), np.arange(rows)] += 1
    assert not far(((counts - epochs / rows) ** 2 / (epochs / rows)).sum(), (rows - 1) ** 2)


@pytest.mark.parametrize("epoch", range(4))
def test_neighbours_are_not_related(epoch):
    """What is next to a row, or a power of two from it, may be anything; both in the order and in the dataset."""
    found = feistel(ROWS, 5, epoch).elements_at(np.arange(ROWS))
    for one in (found, np.argsort(found)):
        for lag in (1, 2, 7, 64, 256, 512, 1024):
            differences = (one[lag:] - one[:-lag]) % ROWS
            assert not far(chi_square(differences * 200 // ROWS, 200), 199), lag
            assert abs(np.corrcoef(one[lag:], one[:-lag])[0, 1]) < 6 / np.sqrt(ROWS)
            both = one[lag:] * 20 // ROWS * 20 + one[:-lag] * 20 // ROWS
            assert not far(chi_square(both, 400), 399), lag
    following = feistel(ROWS, 5, epoch + 1).elements_at(np.arange(ROWS))
    assert abs(np.corrcoef(found, following)[0, 1]) < 6 / np.sqrt(ROWS)
    assert not far(chi_square((following - found) % ROWS * 200 // ROWS, 200), 199)


@pytest.mark.parametrize("batch", [16, 250])
def test_batches_are_mixed_as_at_random(batch):
    """The rows of one half of the data in each batch: spread as where one draws without putting back."""
    halves = [
        lambda rows: rows < ROWS // 2,
        lambda rows: rows % 2 == 0,
        lambda rows: rows // 64 % 2 == 0,
        lambda rows: rows // 512 % 2 == 0,
    ]
    for number, half in enumerate(halves):
        ratios = []
        for epoch in range(6):
            mixed = half(feistel(ROWS, number, epoch).elements_at(np.arange(ROWS)))
            part = mixed.mean()
            counts = mixed[: ROWS // batch * batch].reshape(-1, batch).sum(1)
            ratios.append(counts.var() / (batch * part * (1 - part) * (ROWS - batch) / (ROWS - 1)))
        # a variance of n numbers is off by about sqrt(2 / n)
        assert abs(np.mean(ratios) - 1) < 5 * np.sqrt(2 / (6 * ROWS / batch))


@pytest.mark.slow
def test_a_billion_rows_take_no_memory_and_no_time():
    made = sampling.Sampler(rows=(10**6,) * 1000, global_batch=1024)
    began = time.process_time()
    plan = made.epoch(7)
    parts = [plan.part(plan.chunks - 1, slice(0, 2), worker, 3) for worker in range(3)]
    assert time.process_time() - began < 1.0  # 8 GB and a minute as an array
    assert len({*np.concatenate(parts).tolist()}) == 2048
    assert not hasattr(plan._permutation, "_permutation")


def test_a_worker_works_out_its_own_rows_alone():
    made = sampling.Sampler(rows=(sampling.EXACT_ROWS, 99), global_batch=1000, seed=3)
    plan = made.epoch(1)
    for chunk in range(plan.chunks):
        whole = plan.positions(chunk)
        for worker in range(3):
            steps = slice(0, 2)
            alone = plan.part(chunk, steps, worker, 3)
            assert np.array_equal(alone, sampling.worker_part(whole, 1000, worker, 3, steps))
            assert np.array_equal(alone, plan.part(chunk, steps, worker, 3, whole))
    together = np.concatenate([plan.positions(chunk) for chunk in range(plan.chunks)])
    assert np.array_equal(np.sort(together), np.arange(made.total))
