"""Processes that train and end: none is aborted, and one that is would be seen."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = pathlib.Path(__file__).parents[2]
ABORTS = "import os, sys; sys.path.insert(0, 'jobs/benchmarks'); import ends; ends.fit = os.abort; ends.main()"


def test_all_end_well(tmp_path):
    command = [sys.executable, "jobs/benchmarks/ends.py", "--smoke", "--json", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    figures = json.loads((tmp_path / "found").read_text())["figures"]
    assert {kind: its["codes"] for kind, its in figures.items()} == dict.fromkeys(("fit", "left", "pair"), [0] * 4)


def test_one_that_is_aborted_is_counted():
    command = [sys.executable, "-c", ABORTS, "--smoke", "--kinds", "fit"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 1 and "-6: 4" in done.stdout and "4 processes have not ended well" in done.stderr
