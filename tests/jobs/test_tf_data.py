"""The job with a tf.data pipeline over TFRecord files, as a user runs it."""

from __future__ import annotations

import re

import pytest

from tests.jobs.test_jobs import run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def test_the_job_trains_on_an_unchanged_pipeline(tmp_path):
    out, err = run("jobs/tf_data.py", "--smoke", "--storage", str(tmp_path))
    assert "train: tf.data of 'records', on each worker, which takes its part of each batch; resumes at any step" in out
    assert re.search(r"epoch 1/1 .*val_accuracy", out) and "so they were counted: 12 in" in out + err
