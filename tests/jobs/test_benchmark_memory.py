"""The memory soak of a few minutes: processes that live long do not grow."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_that_live_long_do_not_grow():
    command = [sys.executable, "jobs/benchmarks/memory.py", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
