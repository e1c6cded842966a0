"""What workers exchange over the ring besides gradients, in graphs and outside; updates are made as a whole or not."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from raytf.collectives.gradient_ring import GradientRing
from raytf.collectives.ring_listener import Listener
from raytf.errors import ConfigError, RaytfError
from tests.unit.test_ring import TOKEN, together


def connected(size, generation=0):
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    addresses = [(one.host, one.port) for one in listeners]
    join = lambda i: listeners[i].join(i, addresses, TOKEN, 20.0, 20.0, generation=generation)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


@pytest.fixture
def workers():
    with contextlib.ExitStack() as stack:

        def make(size=2, **kwargs):
            made = [GradientRing(ring, **kwargs) for ring in connected(size)]
            for one in made:
                stack.callback(one.close)
            return made

        yield make


def at(worker, values):
    return values[worker.ring.rank]


def test_arrays_of_any_types_and_shapes(workers):
    rng = np.random.default_rng(0)
    of = lambda dtype, *shape: [rng.integers(0, 9, shape).astype(dtype) for _ in range(3)]
    given = [of("float64", 5), of("float32", 2, 3), of("int64"), of("int32", 0, 2), of("float32", 300_000)]
    big = [np.full(1 << 21, rank, np.uint8) for rank in range(3)]

    def work(worker):
        part = [at(worker, one) for one in given]
        flags, words = np.bool_([worker.ring.rank == 0] * 3), at(worker, big)
        return worker.all_reduce_arrays(part), worker.broadcast_arrays([*part, flags, words])

    for sums, chiefs in together(work, workers(3)):
        for one, total, first in zip(given, sums, chiefs[:-2], strict=True):
            assert total.dtype == first.dtype == one[0].dtype and total.shape == one[0].shape
            np.testing.assert_array_equal(total, sum(one))
            np.testing.assert_array_equal(first, one[0])
        assert chiefs[-2].all() and not chiefs[-1].any() and chiefs[-1].size == 1 << 21


def test_parts_of_different_lengths_along_any_axis(workers):
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(2, n, 3)).astype("float32") for n in (4, 0, 7)]
    found = together(lambda w: w.gather([tf.constant(at(w, parts))], 1)[0].numpy(), workers(3))
    for one in found:
        np.testing.assert_array_equal(one, np.concatenate(parts, 1))


def test_parts_that_do_not_fit_raise(workers):
    errors = together(lambda w: w.gather_arrays([np.zeros((2, 3 + w.ring.rank))]), workers())
    assert all(isinstance(error, RaytfError) and "rows of [[24], [32]] bytes" in str(error) for error in errors)


def test_what_is_no_number_is_refused(workers):
    first, _ = workers()
    with pytest.raises(ConfigError, match="received: bool"):
        first.add([tf.constant(True)])
    with pytest.raises(ConfigError, match="received: string"):
        first.broadcast(tf.constant("a"))


@pytest.mark.slow
def test_one_order_in_conditions_and_loops_and_with_another_ring(workers):
    """Exchanges that need nothing of each other; all but the second function's are traced once."""
    made, traces = workers(pack_bytes=64), []

    def traced(worker):
        rank = float(worker.ring.rank)

        @tf.function
        def work(times):
            traces.append(rank)
            total, first = tf.zeros(4), tf.zeros(2)
            for _ in tf.range(times):
                total += worker.add([tf.fill([4], rank + 1)])[0]
                if times > 2:
                    first += worker.broadcast(tf.fill([2], rank + 3))
                summed, rows = worker.sum([tf.fill([20], rank), tf.fill([30], 2 * rank)], tf.constant(2))
                total += summed[0][:4] + tf.cast(rows, tf.float32)
            found = worker.gather([tf.fill([int(rank) + 1], rank)])[0]
            return total, first, found

        return work

    functions = {worker.ring.rank: traced(worker) for worker in made}
    call = lambda w: [v.numpy().tolist() for v in functions[w.ring.rank](tf.constant(3))]
    expected = [[3 * (3 + 0.5 + 4)] * 4, [9.0] * 2, [0.0, 1.0, 1.0]]
    assert together(call, made) == [expected] * 2
    assert [w.completed for w in made] == [3, 3]
    made[0].ring.close()
    assert all(isinstance(error, tf.errors.OpError) and "PeerLostError" in str(error) for error in together(call, made))
    for worker, ring in zip(made, connected(2, generation=1), strict=True):
        worker.replace(ring)
        assert worker.completed == 0
    assert together(call, made) == [expected] * 2
    assert [w.completed for w in made] == [3, 3] and sorted(traces) == [0.0, 1.0]


@pytest.mark.parametrize("sparse", [False, True])
def test_an_update_is_made_as_a_whole_or_not(workers, sparse):
    """A worker leaves between two packs of one update: nothing of it is assigned where the first pack has arrived."""
    made = workers(pack_bytes=64)
    variables = [tf.Variable(tf.zeros(20)) for _ in range(2)]

    @tf.function
    def update():
        gradients, _ = made[0].sum([tf.ones(20), tf.ones(20)], None, last=not sparse)
        if sparse:
            values, indices = made[0].gather([tf.ones((2, 3)), tf.range(2)])
            gradients = made[0].commit([*gradients, tf.IndexedSlices(values, indices)])
        for variable, gradient in zip(variables, gradients[:2], strict=True):
            variable.assign_add(gradient)

    def other(worker, packs):
        for _ in range(packs):
            worker.ring.all_reduce(np.zeros(32, np.float32), sum_number=1)
        worker.close()

    def work(worker):
        return update() if worker is made[0] else other(worker, 2 if sparse else 1)

    error, _ = together(work, made)
    assert isinstance(error, tf.errors.OpError) and "PeerLostError" in str(error)
    assert not any(v.numpy().any() for v in variables) and made[0].completed == 0
