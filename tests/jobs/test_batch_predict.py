"""The job that predicts a folder of images, as a user runs it."""

from __future__ import annotations

import re

import pytest

from tests.jobs.test_jobs import run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def test_the_job_predicts_a_folder_of_images(tmp_path):
    import pyarrow.parquet as pq

    out, _ = run("jobs/batch_predict.py", "--smoke", "--storage", str(tmp_path))
    assert re.search(r"200 images, \d+\.\d% right", out)
    table = pq.read_table(tmp_path / "digits-predictions")
    assert table.num_rows == 200 and set(table.column_names) == {"path", "digit", "true"}
