"""What TensorFlow would take of a user's array as it is, is copied; what raytf gives it is not."""

import numpy as np
import pytest
import tensorflow as tf

from raytf.collectives.exchange import empty
from raytf.compat import tensorflow as door
from raytf.parallel import python_arrays


def test_only_arrays_that_tensorflow_would_take_are_copied():
    taken = empty(16, np.dtype("float32"))
    taken[:] = 7.0
    copied = python_arrays._copy_if_aliased(taken)
    assert not np.shares_memory(copied, taken) and copied.tolist() == taken.tolist()
    taken.flags.writeable = False  # as of a file that is mapped
    assert python_arrays._copy_if_aliased(taken).flags.writeable
    for other in (taken[1:], np.array(["a"], object), tf.constant([1.0]), 5, None):
        assert python_arrays._copy_if_aliased(other) is other


@pytest.fixture
def registry():
    return door.FuncRegistry()


def given(registry, function, *args):
    return python_arrays.call(door.FuncRegistry.__call__, registry, registry.insert(function), None, args)


def insert(registry, function):
    return python_arrays.insert(door.FuncRegistry.insert, registry, function)


def test_raytfs_own_memory_is_tensorflows_to_keep(registry):
    array = empty(16, np.dtype("float64"))
    array[:] = 1.0

    def user(x):
        return [array, x]

    def own(x):
        return array

    insert(registry, user)
    with door.releasing_functions():
        insert(registry, own)
    assert not door.releases_function(user) and door.releases_function(own)
    one, other = given(registry, user, array[1:])
    assert not np.shares_memory(one, array) and np.shares_memory(other, array)
    assert np.shares_memory(given(registry, own, None), array)
