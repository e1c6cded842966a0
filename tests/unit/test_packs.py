"""Shares of packs: each number belongs to exactly one worker, and each worker has as many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.collectives import packs

KINDS = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["f", "d", "h"])), min_size=1, max_size=12)
BYTES = {"f": 4, "d": 8, "h": 2}


@settings(deadline=None)
@given(kinds=KINDS, workers=st.integers(2, 9), most=st.integers(64, 40_000))
def test_each_number_is_one_workers(kinds, workers, most):
    found = packs.packs([(size, kind, BYTES[kind]) for size, kind in kinds], most)
    assert sorted(i for pack in found for i in pack.indices) == list(range(len(kinds)))
    assert [i for pack in found for i in pack.indices] == list(reversed(range(len(kinds))))
    for pack in found:
        assert len({kinds[i][1] for i in pack.indices}) == 1
        assert len(pack.indices) == 1 or sum(pack.sizes) * pack.itemsize <= most
        owners = [np.zeros(size, int) for size in pack.sizes]
        for rank in range(workers):
            for count, (begin, end) in zip(owners, pack.shares(rank, workers), strict=True):
                count[begin:end] += 1
        assert all((count == 1).all() for count in owners)


@settings(deadline=None)
@given(kinds=KINDS, workers=st.integers(2, 9))
def test_a_share_in_the_order_of_segments_is_the_whole(kinds, workers):
    sizes = [size for size, _ in kinds]
    for pack in packs.packs([(size, "f", 4) for size in sizes], 1 << 12):
        for place, size in enumerate(pack.sizes):
            whole = np.arange(size)
            parts = [whole[slice(*pack.shares(rank, workers)[place])] for rank in range(workers)]
            joined = np.concatenate([parts[rank] for rank in packs.by_segment(workers)])
            np.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_shares_of_a_usual_model_differ_by_less_than_two_percent(workers):
    """An MLP of 10 million parameters in packs of 4 MiB."""
    sizes = [784 * 2560, 2560, 2560 * 2560, 2560, 2560 * 500, 500, 5000, 10]
    found = packs.packs([(size, "f", 4) for size in sizes], 4 << 20)
    for rank in range(workers):
        own = sum(end - begin for pack in found for begin, end in pack.shares(rank, workers))
        assert own == pytest.approx(sum(sizes) / workers, rel=0.02)
