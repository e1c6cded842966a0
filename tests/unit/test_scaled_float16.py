"""float16 with scales: whatever is finite stays so and keeps its leading digits, what is not arrives as it is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from raytf.collectives import scaled_float16
from raytf.collectives.scaled_float16 import BLOCK, ITEMS

# Of what a block's largest number keeps: 11 bits; others are at most so far below it.
_DIGITS, _BELOW = 2.0**-11, 2.0**-38


def there_and_back(numbers):
    wide = np.zeros((scaled_float16.blocks(numbers.size), ITEMS), np.float32)
    wide.reshape(-1)[: numbers.size] = numbers
    coded, found = np.zeros(len(wide), BLOCK), np.empty_like(wide)
    scaled_float16.encode(wide, coded)
    scaled_float16.decode(coded, found)
    return found.reshape(-1)[: numbers.size]


@settings(max_examples=100, deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)))
def test_any_numbers(numbers):
    found = there_and_back(numbers)
    finite = np.isfinite(numbers)
    np.testing.assert_array_equal(found[~finite], numbers[~finite])
    assert np.isfinite(found[finite]).all()
    largest = np.abs(numbers[finite].astype(np.float64)).max(initial=0)
    error = np.abs(found[finite].astype(np.float64) - numbers[finite])
    # 2 ** -134: float16's smallest number with the smallest scale that float32 has
    assert (error <= np.abs(numbers[finite].astype(np.float64)) * _DIGITS + max(largest * _BELOW, 2.0**-134)).all()


def test_each_block_has_its_own_scale():
    numbers = np.repeat(np.float32([3e38, 1e-9, 0, -2e5]), ITEMS)
    np.testing.assert_allclose(there_and_back(numbers), numbers, rtol=_DIGITS)


def test_a_block_is_a_page():
    assert BLOCK.itemsize == 4096
