"""The ring of sockets: sums are right for any number of processes, sizes and types; a lost neighbour is reported."""

import contextlib
import gc
import os
import pathlib
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.collectives import packs, scaled_float16, shared_memory
from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import PeerLostError, RaytfError
from tests.logged import warnings_logged

TOKEN = bytes(range(TOKEN_BYTES))


def rings(size, hosts="unix", timeout=20.0, before_join=None, **others):
    """The places of a ring in this process; "tcp" gives each a host of its own, so that no Unix socket is used, and
    "both" one to the last, so that the others have one to one neighbour."""
    own_host = {"unix": (), "tcp": range(size), "both": (size - 1,)}[hosts]
    listeners = [Listener(f"127.0.0.{rank + 1 if rank in own_host else 1}") for rank in range(size)]
    addresses = [(one.host, one.port) for one in listeners]
    if before_join:
        before_join(listeners)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda i: listeners[i].join(i, addresses, TOKEN, 20.0, timeout, **others), range(size)))


@pytest.fixture
def ring_of():
    made = []

    def make(*args, **kwargs):
        made.extend(rings(*args, **kwargs))
        return made[-args[0] :]

    yield make
    for ring in made:
        ring.close()


def laid(place, array, shared=True):
    """An array, in memory that the next one reads where there is such and it is wanted."""
    shared_array = place.empty(array.size, array.dtype) if shared else None
    if shared_array is None:
        return array
    shared_array[...] = array
    return shared_array


def raised(function, places):
    """The errors that `function(place)` has raised, called as `together` does."""
    return [error for error in together(function, places) if isinstance(error, Exception)]


def together(function, places):
    """`function(place)` in a thread for each; what they returned, or the errors they raised."""

    def call(place):
        try:
            return function(place)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(call, places))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("hosts", ["unix", "tcp", "both"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_any_sizes_and_types(ring_of, size, hosts):
    places = ring_of(size, hosts)
    kinds = [np.float64, np.float32, np.int64, np.float16, ml_dtypes.bfloat16]

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, 300_000), st.sampled_from(kinds), st.integers(0, 2**32), st.sets(st.integers(0, size - 1)))
    def check(items, kind, seed, shared):
        items = places[0].padded(items)
        # small whole numbers: every type holds every sum
        arrays = [np.random.default_rng([seed, i]).integers(-8, 9, items).astype(kind) for i in range(size)]
        expected = np.sum([a.astype(np.float64) for a in arrays], axis=0)
        arrays = [laid(place, a, place.rank in shared) for place, a in zip(places, arrays, strict=True)]
        for total in together(lambda place: place.all_reduce(arrays[place.rank]), places):
            np.testing.assert_array_equal(total.astype(np.float64), expected)

    check()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("hosts", ["unix", "tcp", "both"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_gathers_and_broadcasts_any_sizes(ring_of, size, hosts):
    places = ring_of(size, hosts)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.sampled_from([0, 1, 7, 400_000]), min_size=size, max_size=size), st.integers(0, 2**32))
    def check(lengths, seed):
        parts = [np.random.default_rng([seed, i]).integers(0, 256, n, np.uint8) for i, n in enumerate(lengths)]
        bounds, whole = [0, *np.cumsum(lengths).tolist()], np.concatenate(parts)

        def work(place):
            shared = (seed >> place.rank) % 2
            own, chiefs = laid(place, np.zeros_like(whole), shared), parts[place.rank][: min(lengths)].copy()
            own[bounds[place.rank] : bounds[place.rank + 1]] = parts[place.rank]
            own, chiefs = place.gather(own, bounds), place.broadcast(laid(place, chiefs, shared))
            one = np.ones(size)
            place.all_reduce(one)
            assert one.tolist() == [size] * size
            return own.tobytes(), chiefs.tobytes()

        assert together(work, places) == [(whole.tobytes(), parts[0][: min(lengths)].tobytes())] * size

    check()


def test_different_exchanges_of_equal_size_raise(ring_of):
    places = ring_of(2)
    errors = together(lambda p: p.broadcast(np.zeros(16, np.uint8)) if p.rank else p.all_reduce(np.zeros(2)), places)
    messages = [str(error) for error in errors if not isinstance(error, PeerLostError)]
    assert messages and "a sum of 16 bytes" in messages[0] and "a broadcast of 16 bytes" in messages[0]


def test_all_have_the_same_bits_where_rounding_matters(ring_of):
    places = ring_of(3)
    for kind in (np.float32, ml_dtypes.bfloat16, np.float16):
        arrays = [np.random.default_rng(i).normal(size=3000).astype(kind) for i in range(3)]
        exact = np.sum([a.astype(np.float64) for a in arrays], axis=0)
        together(lambda place, arrays=arrays: place.all_reduce(arrays[place.rank]), places)
        assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
        error = np.abs(arrays[0].astype(np.float64) - exact).max() / np.abs(exact).max()
        assert error < 3 * float(ml_dtypes.finfo(kind).eps)


def around_the_ring(arrays):
    """The sum of arrays in the order in which the ring makes it, for types that are added as they are."""
    size = len(arrays)
    cut = [np.split(array, size) for array in arrays]
    total = []
    for first in range(size):
        total.append(cut[first][first])
        for step in range(1, size):
            total[-1] = cut[(first + step) % size][first] + total[-1]
    return np.concatenate(total)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hosts", ["unix", "tcp", "both"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_do_not_depend_on_how_the_values_travel(ring_of, size, hosts, shared):
    """Whether all go to all or around the ring, and where they are; each is there before it is sent, added, or both."""
    places = ring_of(size, hosts)
    for items in (0, 6, 1200, 24_000, 120_000, 600_000, 2_400_006):
        values = [np.random.default_rng(i).normal(size=items).astype(np.float32) for i in range(size)]
        arrays = [laid(place, np.full(items, np.nan, np.float32), shared) for place in places]
        counts = [np.zeros(items, np.uint8) for _ in range(size)]

        def work(place, values=values, arrays=arrays, counts=counts):
            def fill(begin, end):
                arrays[place.rank][begin:end] = values[place.rank][begin:end]
                counts[place.rank][begin:end] += 1

            return place.all_reduce(arrays[place.rank], fill=fill)

        expected = around_the_ring(values).tobytes()
        assert [total.tobytes() == expected for total in together(work, places)] == [True] * size, items
        assert all((count == 1).all() for count in counts), items


def test_a_sum_of_a_pair_that_shares_memory_begins_where_tensorflow_takes_it_without_a_copy(ring_of):
    places = ring_of(2)
    for _ in range(3):
        totals = together(lambda place: place.all_reduce(np.ones(50_000)), places)
        assert [(total.ctypes.data % packs.ALIGNED, total.sum()) for total in totals] == [(0, 100_000)] * 2


def test_what_each_has_comes_to_all_while_sockets_are_full(ring_of):
    """Also after what was passed on and nobody has read."""
    places = ring_of(5)
    most = max(size for size in range(0, 1 << 16, 64) if places[0].uses_small_gather(size))
    content = [np.random.default_rng(i).integers(0, 256, most, np.uint8) for i in range(5)]

    def work(place):
        for number in range(5):
            place.send_to_successor(number, bytes(12_000))
        traded = []
        for _ in range(50):
            place.all_gather_small(content[place.rank], lambda parts: traded.append(np.stack(parts).tobytes()))
        return traded, [number for number, _ in place.peer_messages]

    assert together(work, places) == [([np.stack(content).tobytes()] * 50, [1, 2, 3, 4])] * 5


def test_sums_in_float16_with_scales_pass_its_end(ring_of):
    places = ring_of(3)
    count = 3 * 700  # too many for a socket to send one after the other
    wide = [np.random.default_rng(i).normal(0, 6e4, (count, scaled_float16.ITEMS)).astype(np.float32) for i in range(3)]
    exact = np.sum([a.astype(np.float64) for a in wide], axis=0)
    coded = [laid(place, np.zeros(count, scaled_float16.BLOCK)) for place in places]
    for numbers, blocks in zip(wide, coded, strict=True):
        scaled_float16.encode(numbers, blocks)
    assert not raised(lambda place: place.all_reduce(coded[place.rank]), places)
    assert coded[0].tobytes() == coded[1].tobytes() == coded[2].tobytes()
    found = np.empty_like(wide[0])
    scaled_float16.decode(coded[0], found)
    assert np.abs(found - exact).max() < 3 * 2.0**-11 * np.abs(exact).max()


def memories():
    """Shared memories of rings in this process, and its open descriptors."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:raytf" in line for line in lines), len(list(pathlib.Path("/proc/self/fd").iterdir()))


def test_shared_memory_is_used_again_and_gone_with_the_ring():
    gc.collect()  # of other tests
    before = memories()
    places = rings(3)
    used = set()
    for _ in range(5):
        arrays = [laid(place, np.ones(300_000)) for place in places]
        lie_at = [array.ctypes.data for array in arrays]
        sums = together(lambda place, arrays=arrays: place.all_reduce(arrays[place.rank]), places)
        assert [total.ctypes.data for total in sums] == lie_at
        more = [place.empty(300_000, np.dtype(np.float64)) for place in places]
        others = {one.ctypes.data for one in more}
        assert not set(lie_at) & others  # these are in use
        used |= {*lie_at, *others}
        assert all((total == 3).all() for total in sums)
        arrays = sums = more = None
    assert len(used) == 6
    assert memories()[0] == before[0] + 6  # each one's own, and that of the one before
    for place in places:
        place.close()
    assert memories() == before


def test_a_sum_is_not_left_where_one_may_read_that_is_lost(ring_of):
    """TensorFlow writes into the memory of a sum that is needed no more; a neighbour might take that for the sum."""
    places = ring_of(2)
    places[1]._have_read = lambda *_: places[1].close()
    arrays = [laid(place, np.ones(300_000)) for place in places]
    sums = together(lambda place: place.all_reduce(arrays[place.rank]), places)
    assert not np.shares_memory(sums[0], arrays[0]) and all((total == 2).all() for total in sums)


@pytest.mark.parametrize("hosts", ["unix", "tcp", "both"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_pair_reads_what_the_other_gave_until_its_next_exchange(ring_of, hosts, shared):
    """One that is slow to read gets what was given, whatever the other one does with new arrays in between."""
    places = ring_of(2, hosts)
    read, may_read = [], threading.Event()
    contents = [np.full(1 << 18, 7, np.uint8), np.full(1 << 18, 9, np.uint8)]

    def use(parts):
        assert may_read.wait(20)
        read.append([(part.min(), part.max()) for part in parts])

    def work(place):
        for turn in range(2):
            if place.rank:
                place.all_gather_small(laid(place, contents[1].copy(), shared), use)
            else:
                place.all_gather_small(laid(place, contents[0].copy(), shared), lambda parts: None)
                others = [laid(place, np.zeros(1 << 18, np.uint8)) for _ in range(3)]  # noqa: F841 takes free memory
                if not turn:
                    may_read.set()

    together(work, places)
    assert read == [[(7, 7), (9, 9)]] * 2


@pytest.mark.parametrize("hosts", ["unix", "tcp"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_pair_reads_what_one_gave_that_has_left(ring_of, hosts, shared):
    places, left, read = ring_of(2, hosts), threading.Event(), []

    def work(place):
        if place.rank == 0:
            place.all_gather_small(laid(place, np.full(1 << 18, 7, np.uint8), shared), lambda parts: None)
            place.close()
            left.set()
        else:
            place.all_gather_small(
                laid(place, np.full(1 << 18, 9, np.uint8), shared),
                lambda parts: left.wait(20) and read.extend((part.min(), part.max()) for part in parts),
            )

    assert not raised(work, places)
    assert read == [(7, 7), (9, 9)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fails", ["own", "other", "descriptor"])
def test_without_shared_memory_sockets_carry_all(ring_of, monkeypatch, fails, size):
    def refuse(*_, **__):
        raise OSError("no memory here")

    places = ring_of(size)
    if fails == "own":
        monkeypatch.setattr(os, "memfd_create", refuse)
    elif fails == "other":
        monkeypatch.setattr(shared_memory, "PeerMemory", refuse)
    else:  # as in a process that has as many open files as it may have
        monkeypatch.setattr(
            socket, "recv_fds", lambda connection, *_: (connection.recv(1), [], socket.MSG_CTRUNC, None)
        )
    with warnings_logged("exchange through sockets, which is slower, with equal results"):
        for _ in range(2):
            for items in (99_000, 300_000):
                arrays = [laid(place, np.ones(items)) for place in places]
                sums = together(lambda place, arrays=arrays: place.all_reduce(arrays[place.rank]), places)
                assert all((total == size).all() for total in sums)


def test_workers_that_sum_different_things_raise(ring_of):
    places = ring_of(2)
    first, second = together(lambda place: place.all_reduce(np.zeros(2 + 2 * place.rank)), places)
    assert isinstance(first, (RaytfError, PeerLostError)) and isinstance(second, (RaytfError, PeerLostError))
    messages = [str(e) for e in (first, second) if not isinstance(e, PeerLostError)]
    assert messages and "must sum the same sizes" in messages[0]


def test_a_neighbour_that_leaves_ends_the_sum_of_all(ring_of):
    places = ring_of(3)
    arrays = [np.zeros(places[0].padded(3_000_000)) for _ in places]
    left = threading.Event()

    def work(place):
        if place.rank == 1:
            place.close()
            left.set()
            return None
        assert left.wait(20)
        return place.all_reduce(arrays[place.rank])

    first, _, last = together(work, places)
    assert isinstance(first, PeerLostError) and isinstance(last, PeerLostError)
    with pytest.raises(PeerLostError, match="broke at an earlier sum"):
        places[0].all_reduce(arrays[0])


def test_a_member_that_left_after_the_last_sum_ends_no_sum_of_others(ring_of):
    """All leave one after the other; none takes that for a death, and a worker that sums again learns who left."""
    places = ring_of(4)
    arrays = [np.ones(4) for _ in places]
    assert not raised(lambda place: place.all_reduce(arrays[place.rank]), places)
    for place in places[:3]:
        place.close()
    with pytest.raises(PeerLostError, match="worker . left the ring") as error_info:
        places[3].all_reduce(arrays[3])
    assert error_info.value.lost in (0, 1, 2)


def test_a_member_that_fails_is_named_to_all(ring_of):
    """Also to those that are far from it, after one that does not sum at all."""
    places = ring_of(5)
    errors = together(
        lambda place: place.all_reduce(np.zeros(5 + 5 * (place.rank == 1))), [places[i] for i in (0, 1, 2, 4)]
    )
    assert all(isinstance(error, RaytfError) for error in errors)
    failed = [error for error in errors if not isinstance(error, PeerLostError)]
    assert failed
    for error in errors:
        if isinstance(error, PeerLostError):
            assert error.lost in (1, 2) and "failed: RaytfError: All workers must sum" in str(error)


def test_silent_neighbour_is_waited_for_until_the_timeout(ring_of):
    places = ring_of(2, timeout=0.2)
    with pytest.raises(
        PeerLostError, match=r"worker 0 lost a neighbour .*timeout after 0.2 s: a neighbour sent nothing"
    ):
        places[0].all_reduce(np.zeros(2))


@pytest.mark.slow
def test_a_neighbour_that_does_not_read_is_waited_for_longer_than_its_host(ring_of):
    """What is unsent fills the connection, and the other's kernel answers that it takes nothing."""
    places = ring_of(3, "tcp", timeout=None, host_gone=2)
    arrays = [np.ones(places[0].padded(3 << 20), np.float32) for _ in places]

    def work(place):
        if place.rank == 1:
            time.sleep(3)
        place.all_reduce(arrays[place.rank])

    assert not raised(work, places)
    assert all(array.min() == array.max() == 3 for array in arrays)


def hello_of(rank, purpose=0):
    return b"raytf/ring/4" + b"".join(i.to_bytes(4, "little") for i in (rank, purpose, 0)) + bytes(TOKEN_BYTES)


@pytest.mark.slow
def test_many_strangers_are_turned_away_at_once(ring_of, set_timeouts):
    """Each of them would cost ten minutes if they were asked one after the other."""
    hellos = [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(56), hello_of(0)[:9], hello_of(0), hello_of(7)]
    hellos += [hello_of(0) + bytes(32), hello_of(0, 1) + bytes(31), hello_of(0, 9)]
    strangers = []

    def knock(listeners):
        for i in range(200):
            one = socket.create_connection((listeners[1].host, listeners[1].port), 5)
            one.sendall(hellos[i % len(hellos)])
            if i % 2:
                one.shutdown(socket.SHUT_WR)
            strangers.append(one)

    set_timeouts(ring_stranger=600.0)
    places = ring_of(2, "tcp", before_join=knock)
    arrays = [np.ones(2), np.ones(2)]
    assert not raised(lambda place: place.all_reduce(arrays[place.rank]), places)
    assert arrays[0].tolist() == arrays[1].tolist() == [2.0, 2.0]
    for one in strangers:
        one.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # it was turned away
            assert TOKEN not in one.recv(1 << 16)
        one.close()


def test_one_that_does_not_know_the_token_is_no_neighbour():
    """Neither by what it sends, nor by a replay of what it received."""
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [(one.host, one.port) for one in listeners]
    tokens = [TOKEN, bytes(TOKEN_BYTES)]
    found = together(
        lambda one: one.join(listeners.index(one), addresses, tokens[listeners.index(one)], 5.0, None), listeners
    )
    assert all(isinstance(error, PeerLostError) for error in found)
    assert any("does not know the token of this ring" in str(error) for error in found)


def test_recorded_handshake_cannot_be_replayed():
    """Between neighbours is one that passes on what they send and notes it; later it sends the same."""
    listeners = [Listener("127.0.0.1"), Listener("127.0.0.2")]
    heard = []
    with socket.create_server(("127.0.0.3", 0)) as between, ThreadPoolExecutor(8) as pool:
        # worker 0 finds worker 1 where the one between them listens
        tapped = [(listeners[0].host, listeners[0].port), between.getsockname()]
        direct = [(one.host, one.port) for one in listeners]
        joins = [
            pool.submit(listeners[i].join, i, where, TOKEN, 20.0, 20.0) for i, where in enumerate([tapped, direct])
        ]

        def pump(source, target, notes):
            while data := source.recv(1 << 16):
                notes.append(data)
                target.sendall(data)
            target.close()

        for _ in range(2):
            one, other = between.accept()[0], socket.create_connection(direct[1])
            heard.append([])
            pool.submit(pump, one, other, heard[-1])
            pool.submit(pump, other, one, [])
        places = [join.result() for join in joins]
        for place in places:
            place.close()
    sent = [b"".join(notes) for notes in heard]
    assert not any(TOKEN in text for text in sent)
    again = Listener("127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as parrots:
        for text in sent:
            parrot = parrots.enter_context(socket.create_connection((again.host, again.port)))
            parrot.sendall(text)
        with pytest.raises(PeerLostError, match="timeout: worker 0 did not connect"):
            again.join(1, [silent.getsockname(), (again.host, again.port)], TOKEN, 0.5, None)


def test_bytes_of_another_generation_are_refused(ring_of):
    places = ring_of(2, generation=4)
    places[0].generation = 3  # as one that has not learnt of the new group
    errors = together(lambda place: place.all_reduce(np.ones(2)), places)
    assert "worker 1 is of generation 4, received: bytes of generation 3 from worker 0" in str(errors[1])


@pytest.mark.slow
def test_a_member_of_another_generation_does_not_join():
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [(one.host, one.port) for one in listeners]
    errors = together(lambda i: listeners[i].join(i, addresses, TOKEN, 4.0, None, generation=7 + i), list(range(2)))
    assert all(isinstance(error, PeerLostError) for error in errors)
    assert "worker 0 came with generation 7 of the ring and was refused, as this is generation 8" in str(errors[1])


def test_a_neighbour_that_never_comes():
    listener = Listener("127.0.0.1")
    other = Listener("127.0.0.1")
    with pytest.raises(PeerLostError, match="timeout: worker 1 did not connect"):
        listener.join(0, [(listener.host, listener.port), (other.host, other.port)], TOKEN, 0.2, None)
    other.close()


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(PeerLostError(3, "it closed its connection", 1)))
    assert error.lost == 1
    assert str(error) == "worker 3 lost a neighbour in the ring of workers: it closed its connection"
