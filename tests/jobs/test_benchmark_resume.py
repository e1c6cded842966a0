"""The benchmark of resuming, small: a command is killed within an epoch, and given again."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_raytf_repeats_no_step_where_keras_repeats_the_epoch(tmp_path):
    """Killed after 68 steps of the second epoch."""
    ways = ["raytf, each step", "BackupAndRestore, 8 steps"]
    command = [sys.executable, "jobs/benchmarks/resume.py", "--smoke", "--json", tmp_path / "found", "--ways", *ways]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found").read_text())
    assert {way: one["repeated"] for way, (one,) in found["figures"].items()} == dict(zip(ways, [0, 68], strict=True))
    assert all(way in done.stdout for way in ways)
