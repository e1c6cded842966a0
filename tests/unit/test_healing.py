"""What a worker does from the loss of a member until there is another ring: sockets and threads, no training."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raytf.collectives.healing import Healer, Rejoin, Waiting, tag_of
from raytf.collectives.ring import Listener
from raytf.errors import PeerLostError
from tests.unit.test_ring import TOKEN


class Holder:
    """As an `Exchange`, for sums alone."""

    completed = 0

    def __init__(self, ring):
        self.ring = ring

    def replace(self, ring):
        self.ring.close()
        self.ring = ring

    def add(self):
        array = np.ones(2)
        self.ring.add(array)
        return array


def joined(listeners, rank, generation=0):
    addresses = [(one.host, one.port) for one in listeners]
    return listeners[rank].join(rank, addresses, TOKEN, 20.0, 20.0, generation=generation)


def until(what):
    """What a function gives once that is a `Waiting`."""
    end = time.monotonic() + 20
    while not isinstance(found := what(), Waiting):
        assert time.monotonic() < end, f"still {found}"
        time.sleep(0.005)
    return found


@pytest.fixture
def survivor():
    """(healer, holder, future of its sum): the other one of two has passed something on, and has died."""
    with ThreadPoolExecutor(2) as pool:
        listeners = [Listener("127.0.0.1") for _ in range(2)]
        mine, other = pool.map(lambda rank: joined(listeners, rank), range(2))
        healer, holder = Healer(), Holder(mine)
        told = []
        healer.arm(lambda: Listener("127.0.0.1"), lambda: None, lambda: told.append("lost"), step=0)
        with healer.execution():
            healer.stepped(holder, b"mine")
            other.pass_on(2, b"the other's")
            other.close()
            yield healer, holder, pool.submit(healer.make, holder, holder.add)
        holder.ring.close()
        assert told, "the driver is told of a loss at once"


def ring_of(waiting, listener, generation):
    return Rejoin([waiting.address, (listener.host, listener.port)], TOKEN, generation, {})


def test_a_ring_that_will_not_be_is_left_at_once_and_the_next_one_joined(survivor):
    """Its new member died behind the driver's word: no 30 s for it to come. What was passed on is had by the next."""
    healer, holder, sum_ = survivor
    first = until(healer.waiting)
    assert first.held == (2, b"the other's")
    gone = Listener("127.0.0.1")
    healer.command(ring_of(first, gone, 1))
    while healer.waiting() is not None:  # it joins
        time.sleep(0.005)
    began = time.monotonic()
    gone.close()
    healer.leave(1)
    second = until(healer.waiting)
    assert time.monotonic() - began < 5
    assert second.held == first.held and second.address != first.address
    new = Listener("127.0.0.1")
    told = ring_of(second, new, 2)
    healer.command(told)
    ring = new.join(1, told.addresses, TOKEN, 20.0, 20.0, generation=2)
    ring.add(array := np.ones(2))
    assert array.tolist() == sum_.result(20).tolist() == [2, 2]
    assert ring.held == (tag_of(1), b"mine"), "this one may be lost next, and the new one is behind it"
    assert holder.ring.held == (2, b"the other's"), "the new one may be lost before it passes on anything"
    ring.close()


def test_a_word_that_comes_behind_its_end_is_not_followed(survivor):
    healer, _, sum_ = survivor
    healer.leave(3)
    first = until(healer.waiting)
    healer.command(ring_of(first, Listener("127.0.0.1"), 3))
    while until(healer.waiting).address == first.address:
        time.sleep(0.005)
    healer.command("nobody has a place")
    with pytest.raises(PeerLostError):
        sum_.result(20)


def test_another_training_of_the_process_counts_its_rings_anew(survivor):
    healer, _, sum_ = survivor
    healer.leave(3)
    until(healer.waiting)
    healer.command("all start anew")
    with pytest.raises(PeerLostError):
        sum_.result(20)
    healer.reset()
    with ThreadPoolExecutor(2) as pool:
        listeners = [Listener("127.0.0.1") for _ in range(2)]
        mine, other = pool.map(lambda rank: joined(listeners, rank), range(2))
        holder, new = Holder(mine), Listener("127.0.0.1")
        healer.arm(lambda: Listener("127.0.0.1"), lambda: None, lambda: None, step=0)
        with healer.execution():
            other.close()
            sum_ = pool.submit(healer.make, holder, holder.add)
            told = ring_of(until(healer.waiting), new, 1)
            healer.command(told)
            ring = new.join(1, told.addresses, TOKEN, 20.0, 20.0, generation=1)
            ring.add(np.ones(2))
            assert sum_.result(20).tolist() == [2, 2]
        for one in (ring, holder.ring):
            one.close()


def test_a_join_is_ended_before_and_while_it_goes_on():
    for early in (True, False):
        one = Listener("127.0.0.1")
        with ThreadPoolExecutor(1) as pool:
            if early:
                one.stop()
            joining = pool.submit(one.join, 0, [(one.host, one.port), ("127.0.0.1", 9)], TOKEN, 30.0, None)
            if not early:
                time.sleep(0.1)
                one.stop()
            with pytest.raises(PeerLostError, match="told that there will be none"):
                joining.result(5)
