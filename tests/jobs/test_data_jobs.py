"""The jobs on several kinds of data, as a user runs them."""

from __future__ import annotations

import re
import socket

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


def test_texts_are_classified(tmp_path):
    out, _ = run("jobs/text.py", "--smoke", "--storage", str(tmp_path))
    assert "train: 400 rows" in out and re.search(r"epoch 1/1 .*val_accuracy", out)


def test_a_head_trains_and_then_all_layers(tmp_path):
    out, _ = run("jobs/transfer.py", "--smoke", "--storage", str(tmp_path))
    assert out.count("train: 160 rows") == 2 and len(re.findall(r"epoch 1/1 .*val_accuracy", out)) == 2


def test_large_tables_train(tmp_path):
    out, _ = run("jobs/large_embedding.py", "--smoke", "--storage", str(tmp_path))
    assert "train: 20,000 rows" in out and re.search(r"epoch 1/1 .*AUC", out)


def test_a_model_is_trained_evaluated_exported_and_served(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out, _ = run("jobs/serve.py", "--smoke", "--storage", str(tmp_path), "--port", str(port))
    assert re.search(r"accuracy 0\.\d+", out) and re.search(r"digits \[(\d, ){4}\d\]", out)
