"""A call that all workers make, or none, is named where one makes it alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raytf import activity
from raytf.activity import PhaseTracker
from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import PeerLostError, RaytfError


@pytest.fixture
def workers(monkeypatch):
    """workers(what each calls, what each does): what they returned, or the errors that they raised."""
    calls = {}

    class OfThread(PhaseTracker):
        """Each worker is a thread here, and a process elsewhere."""

        call = property(lambda self: calls.get(threading.get_ident(), 0), lambda self, value: None)

        def calling(self, name):
            calls[threading.get_ident()] = activity.CALLS.index(name)

    monkeypatch.setattr(activity, "tracker", OfThread())
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [(one.host, one.port) for one in listeners]

    def run(names, works):
        def work(rank):
            try:
                activity.tracker.calling(names[rank])
                return works[rank](places[rank])
            except Exception as error:
                return error

        return list(pool.map(work, range(2)))

    with ThreadPoolExecutor(2) as pool:
        places = list(pool.map(lambda i: listeners[i].join(i, addresses, bytes(TOKEN_BYTES), 20.0, 20.0), range(2)))
        yield run
        for place in places:
            place.close()


def add(place):
    return place.all_reduce(np.ones(2), 3).tolist()


@pytest.mark.parametrize("other", ["", "model.fit()"])
def test_a_chief_that_calls_evaluate_alone_is_named_with_it(workers, other):
    """Also where the sums have the same sizes: they would be added."""
    found = workers(["model.evaluate()", other], [add, add])
    assert all(isinstance(error, RaytfError) for error in found)
    message = next(str(error) for error in found if not isinstance(error, PeerLostError))
    assert "in model.evaluate()" in message and "worker 0" in message
    assert "all workers make, or none" in message and "the chief alone" in message


def test_worker_that_calls_evaluate_after_the_others_ended_gets_an_error(workers):
    _, error = workers(["", "model.evaluate()"], [lambda place: place.close(), add])
    assert isinstance(error, PeerLostError)
    assert "worker 0 left the ring" in str(error) and "this worker is in model.evaluate()" in str(error)


@pytest.mark.parametrize("name", activity.CALLS)
def test_call_of_all_workers_continues(workers, name):
    assert workers([name] * 2, [add, add]) == [[2.0, 2.0]] * 2


def test_the_outermost_call_counts():
    tracker = PhaseTracker()
    with tracker.calling("model.fit()"):
        with tracker.calling("model.evaluate()"):  # a validation
            assert activity.CALLS[tracker.call] == "model.fit()"
        assert activity.CALLS[tracker.call] == "model.fit()"
    assert tracker.call == 0
