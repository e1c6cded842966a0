"""Few bytes cross a ring in log2(n) hops: the same bits as around it, and a loss is a loss."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.collectives import ring as ring_module
from raytf.collectives.ring_links import chords
from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import PeerLostError


def joined(pool, size, hosts):
    listeners = [Listener("127.0.0.1" if hosts == "unix" else f"127.0.0.{i + 1}") for i in range(size)]
    addresses = [(one.host, one.port) for one in listeners]
    join = lambda i: listeners[i].join(i, addresses, bytes(TOKEN_BYTES), 30.0, 30.0)
    return list(pool.map(join, range(size)))


@contextlib.contextmanager
def ring_of(size, hosts="unix"):
    """(one ring's places; together(function): what it gives for each, all at once)."""
    with ThreadPoolExecutor(size) as pool:
        places = joined(pool, size, hosts)

        def call(function, place):
            try:
                return function(place)
            except Exception as error:
                return error

        yield places, lambda function: list(pool.map(lambda place: call(function, place), places))
        for place in places:
            place.close()


@pytest.mark.parametrize(("size", "hosts"), [(4, "tcp"), (5, "unix"), (8, "unix"), (11, "unix")])
def test_sum_has_the_bits_of_the_ring(size, hosts, monkeypatch):
    with ring_of(size, hosts) as (places, together):

        @settings(max_examples=15, deadline=None)
        @given(st.integers(1, 900), st.sampled_from([np.float64, np.float32, np.float16, np.int32]), st.integers(0, 99))
        def check(items, kind, seed):
            items = places[0].padded(items)
            arrays = [(np.random.default_rng([seed, i]).normal(size=items) * 100).astype(kind) for i in range(size)]
            assert places[0].uses_small_gather(arrays[0].nbytes)
            found = together(lambda place: place.all_reduce(arrays[place.rank].copy()))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ring_module.Ring, "uses_small_gather", lambda self, size: False)
                expected = together(lambda place: place.all_reduce(arrays[place.rank].copy()))
            assert len({one.tobytes() for one in (*found, *expected)}) == 1

        check()


@pytest.mark.parametrize("size", [2, 3, 4, 6, 9])
def test_each_gets_what_all_have_by_rank(size):
    with ring_of(size) as (_, together):
        for count in (1, 300):

            def work(place, count=count):
                found = []
                place.all_gather_small(
                    np.full(count, place.rank, np.uint8), lambda parts: found.extend(map(list, parts))
                )
                return found

            assert together(work) == [[[rank] * count for rank in range(size)]] * size


def test_the_hops_grow_with_the_logarithm():
    assert [chords(size) for size in (2, 3, 4, 5, 8, 9, 16, 17, 1000)] == [0, 0, 1, 2, 2, 3, 3, 4, 9]
    with ring_of(8) as (places, _):
        assert all(len(place._chords) == 2 for place in places)
        open_here = {one.fileno() for one in ring_module.connections()}
        assert {chord.previous.fileno() for place in places for chord in place._chords} <= open_here


def test_a_member_that_has_left_is_named_by_all():
    with ring_of(6) as (places, together):
        places[4].close()
        found = together(lambda place: None if place.rank == 4 else place.all_reduce(np.ones(6)))
        assert all(isinstance(error, PeerLostError) and error.lost == 4 for i, error in enumerate(found) if i != 4)


def test_a_member_that_does_something_else_ends_all():
    """Also those that have only heard of it across the ring."""
    with ring_of(6) as (_, together):
        found = together(lambda place: place.all_reduce(np.ones(6 + 6 * (place.rank == 3))))
        assert all(isinstance(error, Exception) for error in found)
        assert any("must sum the same sizes" in str(error) for error in found)
