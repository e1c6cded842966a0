"""What a worker does from the loss of a member until there is another ring: sockets and threads, no training."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from raytf.collectives.recovery_client import BlockedWorker, RecoveryClient, RingConfig, state_version
from raytf.collectives.ring_listener import Listener
from raytf.errors import PeerLostError, RaytfError
from raytf.train.recovery_coordinator import RecoveryFailedError, error_clause, replays_from_boundary
from tests.logged import warnings_logged
from tests.unit.test_ring import TOKEN
from tests.waiting import until


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
        self.ring.all_reduce(array)
        return array


def joined(listeners, rank, generation=0):
    addresses = [(one.host, one.port) for one in listeners]
    return listeners[rank].join(rank, addresses, TOKEN, 20.0, 20.0, generation=generation)


def standing(healer):
    """Where it waits, once it does."""
    return until(lambda: isinstance(found := healer.waiting(), BlockedWorker) and found)


@pytest.fixture
def survivor():
    """(healer, holder, future of its sum): the other one of two has passed something on, and has died."""
    with ThreadPoolExecutor(2) as pool:
        listeners = [Listener("127.0.0.1") for _ in range(2)]
        ring, other = pool.map(lambda rank: joined(listeners, rank), range(2))
        healer, holder = RecoveryClient(), Holder(ring)
        losses = []
        healer.arm(lambda: Listener("127.0.0.1"), lambda: None, lambda: losses.append("lost"), step=0)
        with healer.execution():
            healer.send_state_after_step(holder, b"mine")
            other.send_to_successor(2, b"the other's")
            other.close()
            yield healer, holder, pool.submit(healer.run_exchange, holder, holder.add)
        holder.ring.close()
        assert losses, "the driver is told of a loss at once"


def ring_of(waiting, listener, generation):
    return RingConfig([waiting.address, (listener.host, listener.port)], TOKEN, generation, {})


@pytest.mark.slow
def test_a_ring_that_will_not_be_is_left_at_once_and_the_next_one_joined(survivor, set_timeouts):
    """Its new member died after the driver's command: an hour would be its. What was passed on is had by the next."""
    set_timeouts(ring_join=3600.0)
    healer, holder, sum_ = survivor
    first = standing(healer)
    assert first.peer_messages == ((2, b"the other's"),)
    gone = Listener("127.0.0.1")
    healer.command(ring_of(first, gone, 1))
    while healer.waiting() is not None:  # it joins
        time.sleep(0.005)
    gone.close()
    healer.leave(1)
    second = standing(healer)
    assert second.peer_messages == first.peer_messages and second.address != first.address
    new = Listener("127.0.0.1")
    rejoin = ring_of(second, new, 2)
    healer.command(rejoin)
    ring = new.join(1, rejoin.addresses, TOKEN, 20.0, 20.0, generation=2)
    ring.all_reduce(array := np.ones(2))
    assert array.tolist() == sum_.result(20).tolist() == [2, 2]
    assert ring.peer_messages == ((state_version(1), b"mine"),), (
        "this one may be lost next, and the new one is behind it"
    )
    assert holder.ring.peer_messages == ((2, b"the other's"),), "the new one may be lost before it passes on anything"
    ring.close()


def test_command_for_an_abandoned_generation_is_ignored(survivor):
    healer, _, sum_ = survivor
    healer.leave(3)
    first = standing(healer)
    healer.command(ring_of(first, Listener("127.0.0.1"), 3))
    while standing(healer).address == first.address:
        time.sleep(0.005)
    healer.command("nobody has a place")
    with pytest.raises(PeerLostError):
        sum_.result(20)


def test_next_training_of_the_process_counts_its_rings_from_zero(survivor):
    healer, _, sum_ = survivor
    healer.leave(3)
    standing(healer)
    healer.command("all workers restart")
    with pytest.raises(PeerLostError):
        sum_.result(20)
    healer.reset()
    with ThreadPoolExecutor(2) as pool:
        listeners = [Listener("127.0.0.1") for _ in range(2)]
        first, other = pool.map(lambda rank: joined(listeners, rank), range(2))
        holder, new = Holder(first), Listener("127.0.0.1")
        healer.arm(lambda: Listener("127.0.0.1"), lambda: None, lambda: None, step=0)
        with healer.execution():
            other.close()
            sum_ = pool.submit(healer.run_exchange, holder, holder.add)
            rejoin = ring_of(standing(healer), new, 1)
            healer.command(rejoin)
            ring = new.join(1, rejoin.addresses, TOKEN, 20.0, 20.0, generation=1)
            ring.all_reduce(np.ones(2))
            assert sum_.result(20).tolist() == [2, 2]
        for one in (ring, holder.ring):
            one.close()


def test_join_is_cancelled_before_it_begins_and_while_it_runs():
    for early in (True, False):
        one = Listener("127.0.0.1")
        with ThreadPoolExecutor(1) as pool:
            if early:
                one.stop()
            joining = pool.submit(one.join, 0, [(one.host, one.port), ("127.0.0.1", 9)], TOKEN, 30.0, None)
            if not early:
                time.sleep(0.1)
                one.stop()
            with pytest.raises(PeerLostError, match="the driver has cancelled the recovery"):
                joining.result(5)


class Epoch:
    """A survivor of two after the last step of an epoch: two exchanges were made since, and the third fails."""

    foreseen = False  # whether workers are known to meet after other steps

    def __init__(self, pool):
        listeners = [Listener("127.0.0.1") for _ in range(2)]
        ring, self.other = pool.map(lambda rank: joined(listeners, rank), range(2))
        self.healer, self.holder, self.made, self.pool = RecoveryClient(), Holder(ring), [], pool
        nothing = lambda: None
        self.healer.arm(lambda: Listener("127.0.0.1"), nothing, nothing, step=0, capture_at_boundary=self.note)
        with self.healer.execution():
            self.healer.send_state_after_step(self.holder, b"mine")
        self.healer.end_epoch()
        assert self.healer.mark_epoch_end(), "a loss is survived from here on, too"
        for name in ("logs", "rate"):
            both = pool.submit(self.add, self.other, 1), pool.submit(self.make, name)
            assert [one.result(20).tolist() for one in both] == [[3, 3]] * 2
        self.made.clear()

    def make_a_step(self):
        """Makes a step after which workers are known to meet."""
        self.foreseen = True
        with self.healer.execution():
            self.healer.send_state_after_step(self.holder, b"mine")
            self.healer.steps_made()

    def note(self, epoch_ends):
        return (lambda: "the end" if epoch_ends else "the step") if epoch_ends or self.foreseen else None

    @staticmethod
    def add(ring, number):
        ring.all_reduce(array := np.full(2, number))
        return array

    def make(self, name):
        def exchange():
            self.made.append(name)
            return self.add(self.holder.ring, 2)

        return self.healer.run_exchange(self.holder, exchange)

    @contextlib.contextmanager
    def lost_in_the_next(self, from_scratch):
        """Within its first step, as the other one is lost: (its sum, where this one waited, the new one's ring)."""
        self.healer.send_state_at_epoch_begin(self.holder, b"begun")
        with self.healer.execution():
            self.other.close()
            yield self.pool.submit(self.make, "gradients"), *self.goes_on(from_scratch)

    def goes_on(self, from_scratch):
        """The ring of the one that is new."""
        waiting, new = standing(self.healer), Listener("127.0.0.1")
        rejoin = RingConfig([waiting.address, (new.host, new.port)], TOKEN, 1, {}, from_scratch)
        self.made.clear()
        self.healer.command(rejoin)
        return waiting, new.join(1, rejoin.addresses, TOKEN, 20.0, 20.0, generation=1)


@pytest.fixture
def ended():
    with ThreadPoolExecutor(3) as pool:
        epoch = Epoch(pool)
        yield epoch
        epoch.holder.ring.close()


def test_what_followed_an_epoch_is_exchanged_again(ended):
    """Also within the first step of the next one, with a process that begins after the last step."""
    with ended.lost_in_the_next(from_scratch=True) as (sum_, waiting, ring):
        assert (waiting.boundary, waiting.tag, waiting.at_boundary) == (state_version(1), state_version(1) + 2, False)
        assert ended.healer.capture_state(True) == "the end"
        assert [ended.add(ring, 1).tolist() for _ in range(3)] == [[3, 3]] * 3
        assert sum_.result(20).tolist() == [3, 3] and ended.made == ["logs", "rate", "gradients"]
        ended.healer.send_state_after_step(ended.holder, b"mine")
    ring.close()
    with pytest.raises(PeerLostError):
        ended.make("in a callback of the next step")
    ended.healer.disarm()
    assert "between two steps" in ended.healer.waiting(), "also when the training has failed of it"


def test_what_callbacks_left_of_what_each_has_for_itself_is_passed_on_again(ended):
    """Before the step that follows them; what it was after the step before them is kept, for one that begins there."""
    ended.make_a_step()
    ended.healer.send_state_before_execution(ended.holder, b"mine")
    assert ended.healer.tag == state_version(2), "nothing has changed"
    ended.healer.send_state_before_execution(ended.holder, b"reset")
    with ended.healer.execution():
        ended.other.close()
        step = ended.pool.submit(ended.make, "gradients")
        waiting, ring = ended.goes_on(from_scratch=False)
        assert (waiting.boundary, waiting.tag, waiting.at_boundary) == (state_version(2), state_version(2) + 3, False)
        assert waiting.sent_messages == ((state_version(2), b"mine"), (state_version(2) + 3, b"reset"))
        ended.add(ring, 1)
        assert step.result(20).tolist() == [3, 3] and ended.made == ["gradients"]
    ring.close()


def test_what_followed_an_execution_is_exchanged_again_where_that_was_foreseen(ended):
    """Of three workers' exchanges after a step the second breaks; the third is within the next step."""
    ended.foreseen = True
    with ended.healer.execution():
        ended.healer.send_state_after_step(ended.holder, b"mine")
        ended.healer.steps_made()
        assert not ended.healer.executes
        both = ended.pool.submit(ended.add, ended.other, 1), ended.pool.submit(ended.make, "logs of the batch")
        assert [one.result(20).tolist() for one in both] == [[3, 3]] * 2
    ended.healer.send_averaged_state(ended.holder, b"mean")
    ended.other.close()
    stop = ended.pool.submit(ended.make, "stop")
    waiting, ring = ended.goes_on(from_scratch=True)
    assert (waiting.boundary, waiting.tag, waiting.at_boundary) == (state_version(2), state_version(2) + 1, True)
    assert waiting.sent_messages == ((state_version(2), b"mine"), (state_version(2) + 1, b"mean"))
    assert ended.healer.capture_state(True) == "the step"
    assert [ended.add(ring, 1).tolist() for _ in range(2)] == [[3, 3]] * 2
    assert stop.result(20).tolist() == [3, 3] and ended.made == ["logs of the batch", "stop"]
    assert ring.peer_messages == waiting.sent_messages, "of this one, should it be lost next"
    with pytest.raises(RaytfError, match="callbacks may have been called after the step"):
        ended.healer._waiting, ended.healer._save_checkpoint = waiting, lambda *_: 0
        ended.healer.save_checkpoint([], [])
    ring.close()


def test_where_a_process_takes_part_from_the_step_on_only_that_is_made_again(ended):
    with ended.lost_in_the_next(from_scratch=False) as (sum_, _, ring):
        assert ended.add(ring, 1).tolist() == sum_.result(20).tolist() == [3, 3]
        assert ended.made == ["gradients"]
        ring.close()
        again = ended.pool.submit(ended.make, "more")
        assert standing(ended.healer).boundary is None, "the one that is new knows nothing of the epoch before"
        ended.healer.command("all workers restart")
        with pytest.raises(PeerLostError):
            again.result(20)


def test_a_process_that_comes_to_something_else_at_the_end_of_an_epoch_is_not_followed(ended):
    """As a chief whose callback draws a learning rate."""
    ended.other.close()
    sum_ = ended.pool.submit(ended.make, "stop")
    waiting, ring = ended.goes_on(from_scratch=True)
    assert waiting.at_boundary and ended.healer.refused is None
    with warnings_logged("with another result"):
        ended.add(ring, 1)
        ended.add(ring, 7)
        assert isinstance(sum_.exception(20), PeerLostError)
    assert "gave another result" in ended.healer.refused
    ring.close()


def test_exchanges_within_batch_callbacks_are_made_again(ended):
    """As where one evaluates the model then: the replacement of one that is lost in that step does, too."""
    ended.make_a_step()
    ended.healer.begin_batch()
    both = ended.pool.submit(ended.add, ended.other, 1), ended.pool.submit(ended.make, "evaluation")
    assert [one.result(20).tolist() for one in both] == [[3, 3]] * 2
    with ended.healer.execution():
        ended.other.close()
        step = ended.pool.submit(ended.make, "gradients")
        waiting, ring = ended.goes_on(from_scratch=True)
        assert (
            waiting.has_exchanged
            and not waiting.at_boundary
            and replays_from_boundary({0: at(8, 8, 8, has_exchanged=True)}, [1], 2)
        )
        assert [ended.add(ring, 1).tolist() for _ in range(2)] == [[3, 3]] * 2
        assert step.result(20).tolist() == [3, 3] and ended.made == ["evaluation", "gradients"]
    ring.close()


def at(tag, held=None, boundary=None, at_boundary=False, has_exchanged=False):
    return BlockedWorker(
        tag, ("", 0), () if held is None else ((held, b""),), {}, (), boundary, at_boundary, has_exchanged
    )


@pytest.mark.parametrize(
    ("waiting", "lost", "expected"),
    [
        ({0: at(8), 2: at(8, 8)}, [1], False),
        ({0: at(8, boundary=8, at_boundary=True), 2: at(8, 8, 8, True)}, [1], True),
        ({0: at(10, boundary=8), 2: at(10, 10, 8)}, [1], False),
        ({0: at(10, boundary=8), 2: at(10, 8, 8)}, [1], True),  # it was lost before it began the epoch
        ({0: at(10, boundary=8), 2: at(8, 8, 8, True)}, [1], True),
        ({0: at(8), 2: at(12)}, [1], None),
        ({0: at(10, boundary=8), 2: at(12, 12)}, [1], None),
        ({0: at(8), 1: at(8)}, [], False),
        ({0: at(8, boundary=8, at_boundary=True), 1: at(10, boundary=8)}, [], True),
    ],
)
def test_what_is_made_again(waiting, lost, expected):
    size = len(waiting) + len(lost)
    if expected is None:
        with pytest.raises(RecoveryFailedError, match="not in one step"):
            replays_from_boundary(waiting, lost, size)
        return
    assert replays_from_boundary(waiting, lost, size) is expected


def test_refusal_of_a_worker_is_reported_with_its_own_text():
    """And not as Ray wraps it, whose first line names the actor."""
    refused = RaytfError("the state of ModelCheckpoint existed on the lost chief only")
    wrapped = ray.exceptions.RayTaskError("execute", "of a worker", refused).as_instanceof_cause()
    assert error_clause(wrapped) == str(refused) and "actor" not in error_clause(wrapped)
    assert error_clause(RecoveryFailedError("no node has room")) == "no node has room"
    assert error_clause(ray.exceptions.RayTaskError("execute", "", ValueError("x"))) == "ValueError: x"
