"""Versions that are not in the table are looked at before training starts: a step, too, in less than 5 s."""

import subprocess
import sys

import pytest

CHECK = """
import sys, time
from raytf.compat import versions
versions.TESTED["keras"] = ("3.11",)
from raytf.parallel import losses, step_check
if sys.argv[1] == "wrong":
    import raytf.parallel.optimizers as optimizers
    optimizers._reduced_gradients = lambda grads: grads
began = time.monotonic()
print(repr(step_check.refusal()))
print(time.monotonic() - began, file=sys.stderr)
"""


def told(how: str) -> str:
    """What the check says in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CHECK, how], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_version_that_fits_is_used_with_a_line():
    said = told("right")
    assert "is not tested with raytf" in said and "keras 3." in said and "training goes on" in said


@pytest.mark.slow
def test_a_step_with_other_results_is_refused():
    said = told("wrong")
    assert said.startswith("UnsupportedVersionError") and "a step on two devices has" in said
