"""Waits for what comes by itself."""

import time


def until(reached, process=None, seconds: float = 300.0):
    """Returns what a function gives once that is true; a bound for what never comes, not a measurement.

    Args:
        reached: Function without arguments.
        process: A `subprocess.Popen` with pipes that is to run until then, or None.
        seconds: Bound in seconds.
    """
    deadline = time.monotonic() + seconds
    while not (found := reached()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)
    return found
