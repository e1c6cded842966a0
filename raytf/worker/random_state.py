"""The states of Python's `random` and NumPy's global generator, as plain arrays."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

# The default kind of NumPy's generator, and the only one whose state is saved.
_KIND = "MT19937"


def random_states() -> dict[str, np.ndarray]:
    """Returns both states, by name."""
    _, numbers, gauss = random.getstate()
    state = {"python": np.array(numbers, np.uint32), "python_gauss": np.array([] if gauss is None else [gauss])}
    kind, keys, position, has_gauss, cached = np.random.get_state()
    if kind == _KIND:
        state |= {"numpy": keys, "numpy_place": np.array([position, has_gauss]), "numpy_gauss": np.array(cached)}
    return state


def restore_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Restores both states; one that was not saved is left as it is.

    Raises:
        ValueError, KeyError: The arrays are not a result of `random_states`.
    """
    try:
        if "python" in states:
            gauss = states["python_gauss"].tolist()
            random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
        if "numpy" in states:
            position, has_gauss = states["numpy_place"].tolist()
            np.random.set_state((_KIND, states["numpy"], position, has_gauss, float(states["numpy_gauss"])))
    except (TypeError, IndexError) as error:
        raise ValueError(f"no state of a generator ({error})") from error
