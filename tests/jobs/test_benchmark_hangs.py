"""Three of the six hangs of the benchmark, and the right worker and cause of each; others have tests elsewhere."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import ray

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_the_right_worker_and_cause(tmp_path):
    kinds = ("input", "steps", "collective")
    command = [sys.executable, "jobs/benchmarks/hangs.py", "--seeds", "1", "--limit", "3", "--json"]
    command += [tmp_path / "found", "--kinds", *kinds]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    found = json.loads((tmp_path / "found").read_text())["figures"]
    assert [each["right"] for each in found] == [True] * 3 and {each["kind"] for each in found} == set(kinds)
