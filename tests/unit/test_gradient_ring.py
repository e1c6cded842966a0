"""Gradients over the ring: means and sums are right whatever their size, on a wire of 16 bits, too."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import ConfigError

# Enough to fill blocks of numbers with a scale each; fewer travel in float32.
COPIES = 4000


@pytest.fixture(scope="module")
def on_each():
    """on_each(work): what work(place) gives for each of three members of a ring, in threads of their own."""
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    addresses = [(one.host, one.port) for one in listeners]
    with ThreadPoolExecutor(3) as pool:
        places = list(pool.map(lambda i: listeners[i].join(i, addresses, bytes(TOKEN_BYTES), 20.0, 20.0), range(3)))
        yield lambda work: list(pool.map(work, places))
        for place in places:
            place.close()


@pytest.fixture(scope="module")
def sums(on_each):
    """sums(gradients of each worker, rows of each or None, wire dtype): what each worker gets."""
    import tensorflow as tf

    from raytf.collectives.gradient_ring import GradientRing

    def make(gradients, rows, wire):
        def work(place):
            own = None if rows is None else tf.constant(rows[place.rank])
            ring = GradientRing(place, wire_dtype=None if wire is None else tf.as_dtype(wire))
            found, _ = ring.sum([tf.constant(g) for g in gradients[place.rank]], own)
            return [g.numpy() for g in found]

        return on_each(work)

    return make


@pytest.mark.parametrize("wire", [None, "float16", "bfloat16"])
def test_gradients_larger_and_smaller_than_float16_can_be(sums, wire):
    big, small = (np.tile(np.float32(a), COPIES) for a in ([3e5, -2e30, 1], [1e-8, -3e-12]))
    few = np.zeros((0, 2), np.float32)
    rows = [2, 2, 4]
    found = sums([[big * k, small * k, few] for k in (1, -1, 2)], rows, wire)
    assert all(a.tobytes() == b.tobytes() for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert found[0][2].shape == (0, 2)
    together = np.concatenate([big, small])
    exact = together.astype(np.float64) * (2 - 2 + 8) / 8
    got = np.concatenate(found[0][:2])
    if wire == "float16":  # what is small next to 2e30 is lost, and nothing is infinite
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, exact, atol=2e30 * 2.0**-24, rtol=2e-3)
    else:
        np.testing.assert_allclose(got, exact, rtol=2e-2 if wire else 1e-6)


@pytest.fixture(scope="module")
def rows_of_tables(on_each):
    """rows_of_tables(slices of each worker, rows of each or None, merge): (ids, values) of each table by worker."""
    import tensorflow as tf

    from raytf.collectives.gradient_ring import GradientRing

    def make(tables, rows, merge, fixed=None):
        def work(place):
            own = None if rows is None else tf.constant(rows[place.rank])
            slices = [tf.IndexedSlices(tf.constant(v), tf.constant(i), (9, 2)) for i, v in tables[place.rank]]
            ring = GradientRing(place)
            return [
                (g.indices.numpy(), g.values.numpy())
                for g in ring.sum_rows(slices, own, merge, fixed or len(slices) * [False])
            ]

        return on_each(work)

    return make


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_rows_of_tables_are_summed_by_their_ids(rows_of_tables, kind):
    """A worker without rows counts for nothing, whatever it has, and one may have used no row of a table."""
    values = lambda *numbers: np.array([[n, 2 * n] for n in numbers], kind).reshape(-1, 2)
    tables = [
        [(np.int64([5, 1]), values(1, 2)), (np.int32([8]), values(3))],
        [(np.int64([1]), values(np.nan)), (np.int32([8]), values(np.inf))],
        [(np.int64([1, 7, 0]), values(4, 8, 16)), (np.int32([]), values())],
    ]
    found = rows_of_tables(tables, [1, 0, 3], True)
    for ids_and_values in found:
        (ids, sums), (others, other_sums) = ids_and_values
        assert (ids.dtype, others.dtype, sums.dtype) == (np.int64, np.int32, kind)
        assert ids.tolist() == [0, 1, 5, 7]
        np.testing.assert_array_equal(sums, values(12, 3.5, 0.25, 6))
        assert others.tolist() == [8]
        np.testing.assert_array_equal(other_sums, values(0.75))
    (ids, parts), _ = rows_of_tables(tables, [1, 0, 3], False)[2]
    assert ids.tolist() == [5, 1, 5, 1, 7, 0]  # a placeholder's id is not used
    np.testing.assert_array_equal(parts, values(0.25, 0.5, 0, 3, 6, 12))
    (ids, sums), _ = rows_of_tables(tables[::2] + tables[:1], None, True)[1]
    assert ids.tolist() == [0, 1, 5, 7]
    np.testing.assert_array_equal(sums, values(16, 8, 2, 8))


def test_ids_that_do_not_come_from_rows_are_there_once(rows_of_tables):
    """As one process has them; where they differ after all, all are there. A worker without rows counts for nothing."""
    values = lambda *numbers: np.array([[n, 2 * n] for n in numbers], np.float64)
    ids = np.int64([0, 1])
    tables = [
        [(ids, values(1, 2)), (ids, values(1, 2))],
        [(ids, values(np.nan, 1)), (ids, values(1, 1))],
        [(ids, values(4, 8)), (ids + 1, values(4, 8))],
    ]
    for merge in (False, True):
        for (once, sums), (others, parts) in rows_of_tables(tables, [1, 0, 3], merge, [True, True]):
            assert once.tolist() == [0, 1]
            np.testing.assert_array_equal(sums, values(3.25, 6.5))
            assert others.tolist() == ([0, 1, 2] if merge else [0, 1, 0, 0, 1, 2])
            np.testing.assert_array_equal(parts.sum(0), [9.75, 19.5])
    for rows, found in (([1, 0, 3], [0, 1]), ([1, 0, 1], [0, 1, 0, 0, 0, 1]), (None, 3 * [0, 1])):  # of unknown origin
        (either, _), _ = rows_of_tables(tables, rows, False, [None, None])[0]
        assert either.tolist() == found


@pytest.mark.parametrize("copies", [1, COPIES])
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_means_have_the_same_bits_however_few_the_gradients_are(sums, kind, copies):
    """A worker without rows counts for nothing, whatever it has."""
    rows = [3, 0, 4]
    parts = [np.tile(np.random.default_rng(i).normal(size=7).astype(kind), copies) for i in range(3)]
    parts[1][:] = np.nan
    found = [one[0] for one in sums([[part] for part in parts], rows, None)]
    first, _, last = (part * kind(count / 7) for part, count in zip(parts, rows, strict=True))
    assert [one.tobytes() for one in found] == [(first + last).tobytes()] * 3


def test_small_gradients_do_not_vanish(sums):
    small = np.tile(np.float32([1e-8, 3e-9]), COPIES)
    found = sums([[small] for _ in range(3)], [1, 1, 1], "float16")
    np.testing.assert_allclose(found[0][0], small, rtol=1e-3)


@pytest.mark.parametrize("copies", [1, COPIES])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_what_is_infinite_stays_so_for_loss_scaling(sums, kind, copies):
    parts = [1, np.inf, 2, 3], [1, 1, np.nan, 4], [1, 1, 1, 1]
    gradients = [[np.tile(np.array(part, kind), copies)] for part in parts]
    for found in sums(gradients, [1, 1, 1], "float16"):
        assert found[0].size == 4 * copies
        np.testing.assert_allclose(found[0], np.tile([1, np.inf, np.nan, 8 / 3], copies), rtol=1e-3)


@pytest.mark.parametrize("copies", [1, COPIES])
def test_float16_gradients_whose_sum_passes_its_end_on_the_way(sums, copies):
    found = sums([[np.full(copies, k, np.float16)] for k in (60000, 60000, -60000)], None, None)
    assert [set(one[0].tolist()) for one in found] == [{60000}] * 3


def test_missing_token_warns_or_raises():
    from raytf.collectives.gradient_ring import check_without

    with pytest.warns(UserWarning, match="no token for raytf's ring"):
        check_without(None)
    with pytest.raises(ConfigError, match="gradient_dtype='float16' without a token"):
        check_without("float16")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_halves_of_a_sum_give_its_bits(on_each, dtype):
    """Each worker sums its share alone; joined, and gathered between steps, shares are what the sum gives all."""
    import tensorflow as tf

    from raytf.collectives.gradient_ring import GradientRing

    draw = np.random.default_rng(3)
    shapes = [(300, 700), (5,), (0, 2), (33, 61), (1,)]
    gradients = [[draw.normal(size=shape) for shape in shapes] for _ in range(3)]

    def work(place):
        ring = GradientRing(place, pack_bytes=9000)
        own = [tf.cast(g, dtype) for g in gradients[place.rank]]
        rows, before = tf.constant([2, 3, 4][place.rank]), place.sent
        whole, total = ring.sum(own, rows)
        both, before = place.sent - before, place.sent
        shares, total_of_shares = ring.sum(own, rows, shares=True)
        joined = ring.join(shares, [tf.TensorSpec(g.shape, g.dtype) for g in own])
        halves = place.sent - before
        gathered = [ring.whole(share.numpy()) for share in shares]
        assert total == total_of_shares == 9
        return [g.numpy() for g in whole], [g.numpy() for g in joined], gathered, shares, (both, halves)

    found = on_each(work)
    for whole, joined, gathered, _, (both, halves) in found:
        assert halves == pytest.approx(both, rel=0.02)
        for one, two, three in zip(whole, joined, gathered, strict=True):
            assert one.tobytes() == two.tobytes() == three.tobytes()
    counts = [sum(int(share.shape[0]) for share in shares) for *_, shares, _ in found]
    assert sum(counts) == sum(int(np.prod(shape)) for shape in shapes)
    assert counts == pytest.approx([sum(counts) / 3] * 3, rel=0.02)
