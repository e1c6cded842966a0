"""The states of the random numbers of Python and NumPy, as arrays."""

import random

import numpy as np
import pytest

from raytf.worker import random_state


def drawn():
    numbers = [random.random(), random.gauss(0, 1), np.random.random(), np.random.standard_normal()]
    return [*numbers, *np.random.permutation(9).tolist(), random.randrange(10**9)]


@pytest.mark.parametrize("draws", [0, 1, 2, 1000])
def test_random_numbers_continue(draws):
    """Also between the two numbers that a normal distribution gives at a time."""
    random.seed(3)
    np.random.seed(4)
    for _ in range(draws):
        random.gauss(0, 1)
        np.random.standard_normal()
    taken = random_state.random_states()
    assert all(array.dtype != object for array in taken.values())
    first = drawn()
    drawn()
    random_state.restore_random_states(taken)
    assert drawn() == first


@pytest.mark.parametrize("name", ["python", "numpy", "numpy_place"])
def test_what_was_never_taken_is_refused(name):
    with pytest.raises((ValueError, KeyError)):
        random_state.restore_random_states(random_state.random_states() | {name: np.zeros((3, 3))})
    with pytest.raises((ValueError, KeyError)):
        random_state.restore_random_states(
            {k: v for k, v in random_state.random_states().items() if k != "numpy_gauss"}
        )
