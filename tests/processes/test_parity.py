"""Two and three real TensorFlow processes against one: weights, logs, predictions and decisions are the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes.groups import FAST, WANTED, parity_folder

CASES = [
    pytest.param(
        *key, name, id=f"{name}-{key[1]}-{key[0]}", marks=[] if name in FAST.get(key, ()) else [pytest.mark.slow]
    )
    for key, names in WANTED.items()
    for name in names
    if key[1] != "1"
]
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "place", "name"), CASES)
def test_equals_one_process(behind, dtype, place, name):
    """`bits:` results must be equal between workers alone, `chief:` ones are the chief's, others equal everywhere."""
    folder = behind.of("processes/test_parity.py")
    (one,), many = (behind.results(parity_folder(folder, dtype, its), name) for its in ("1", place))
    for outcome in (one, *many):
        assert not isinstance(outcome, str), outcome
    for rank, other in enumerate(many[1:], 1):
        for key, value in other.items():
            np.testing.assert_array_equal(value, many[0][key], err_msg=f"{key}: worker {rank} differs from worker 0")
    for key, value in one.items():
        if not key.startswith(("bits:", "chief:")):
            np.testing.assert_allclose(many[0][key], value, rtol=0, atol=TOLERANCE[dtype], err_msg=key)
