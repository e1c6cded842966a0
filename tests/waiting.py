"""Waits for what comes by itself."""

import time


def until(reached, seconds: float = 240.0):
    """Returns what a function gives once that is true; a bound for what never comes, not a measurement."""
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)
    return found
