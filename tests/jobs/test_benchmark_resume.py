"""The benchmark of resuming, small: a command is killed within an epoch, and given again."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

from tests import warm

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_raytf_repeats_no_step_where_keras_begins_the_epoch_anew(tmp_path, warm_starts):
    """Killed after 68 steps of the second epoch."""
    ways = ["raytf, each step", "BackupAndRestore, 8 steps"]
    command = ["jobs/benchmarks/resume.py", "--smoke", "--json", tmp_path / "found", "--ways", *ways]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm_starts():
        driver = warm.Driver(command, cwd=ROOT, env=os.environ, **pipes)
        try:
            out, err = driver.communicate(timeout=580)
        finally:
            driver.kill()
    assert driver.returncode == 0, out[-3000:] + err[-3000:]
    found = json.loads((tmp_path / "found").read_text())
    assert {way: one["repeated"] for way, (one,) in found["figures"].items()} == dict(zip(ways, [0, 68], strict=True))
    assert all(way in out for way in ways)
