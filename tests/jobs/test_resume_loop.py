"""A loop of a user's own that is killed within an epoch, as the script shows it."""

from __future__ import annotations

import re

import pytest

from tests.jobs.test_jobs import run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


@pytest.mark.timeout(300)
def test_loop_resumes_with_the_next_batch(tmp_path):
    """1030 rows in batches of 64 are 17 steps; the chief dies after the report of step 25, when Ray has that of 20."""
    out, err = run("jobs/resume_loop.py", "--smoke", "--storage", str(tmp_path))
    pattern = r"34 steps, at last from step [38] of epoch 1 on; the weights of a quiet run to the bit: True"
    assert re.search(pattern, out), out + err
