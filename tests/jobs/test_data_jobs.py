"""The jobs on TFRecord files and on CSV files with preprocessing layers, as a user runs them."""

from __future__ import annotations

import re

import pytest

from tests.jobs.test_jobs import run

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


def test_records_of_images_train(tmp_path):
    out, err = run("jobs/tfrecord.py", "--smoke", "--storage", str(tmp_path))
    assert "with the features of the first records: image string; label int64" in out + err
    assert "train: 1,438 rows" in out and re.search(r"epoch 1/1 .*val_accuracy", out)


def test_tables_train_with_layers_that_are_adapted(tmp_path):
    out, _ = run("jobs/tabular.py", "--smoke", "--storage", str(tmp_path))
    assert "train: 400 rows" in out and re.search(r"epoch 1/1 .*val_accuracy", out)
