"""Where Python's `random` and NumPy's global generator stand, as plain arrays."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

# Of NumPy's generator, the only kind whose state is kept; it is the default.
_KIND = "MT19937"


def taken() -> dict[str, np.ndarray]:
    """Both states."""
    _, numbers, gauss = random.getstate()
    found = {"python": np.array(numbers, np.uint32), "python_gauss": np.array([] if gauss is None else [gauss])}
    kind, keys, place, has_gauss, cached = np.random.get_state()
    if kind == _KIND:
        found |= {"numpy": keys, "numpy_place": np.array([place, has_gauss]), "numpy_gauss": np.array(cached)}
    return found


def give_back(found: Mapping[str, np.ndarray]) -> None:
    """Sets both as they were taken; one that was not is left alone.

    Raises:
        ValueError, KeyError: these were never taken.
    """
    try:
        if "python" in found:
            gauss = found["python_gauss"].tolist()
            random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
        if "numpy" in found:
            place, has_gauss = found["numpy_place"].tolist()
            np.random.set_state((_KIND, found["numpy"], place, has_gauss, float(found["numpy_gauss"])))
    except (TypeError, IndexError) as error:
        raise ValueError(f"no state of a generator ({error})") from error
