"""A loss that is no number, and workers that have diverged, are named at the end of the epoch."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def of_workers(function: str, workers: int, tmp_path) -> list[dict]:
    told = tmp_path / f"{function}_{workers}.json"
    run = [sys.executable, "-m", "tests.unit.two_workers", str(told), function, str(workers)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(told.read_text())


def said(found: dict) -> str:
    assert "warnings" in found, found
    return " | ".join(found["warnings"])


@pytest.mark.timeout(120)
def test_nan_is_told_with_its_step_and_the_worker_whose_rows_it_has(tmp_path):
    first, second = of_workers("nan_of_one_row", 2, tmp_path)
    assert "no finite number since step 2 of epoch 1, with the rows of worker 1" in said(first)
    assert not second["warnings"] and first["epochs"] == 2
    (alone,) = of_workers("nan_of_one_row", 1, tmp_path)
    assert "no finite number since step 2 of epoch 1. The training goes on" in said(alone)


@pytest.mark.timeout(120)
def test_nan_stops_a_training_or_is_ignored(tmp_path):
    first, second = of_workers("nan_that_stops", 2, tmp_path)
    assert (first["epochs"], second["epochs"]) == (1, 1) and "nan='stop'" in said(first)
    assert of_workers("nan_that_is_ignored", 1, tmp_path) == [{"warnings": [], "epochs": 2}]
    (ended,) = of_workers("nan_that_ends_it", 1, tmp_path)
    assert "TerminateOnNaN has ended the training" in said(ended)


@pytest.mark.timeout(120)
def test_workers_that_diverge_are_named_and_others_are_not(tmp_path):
    first, second = of_workers("weights_that_drift", 2, tmp_path)
    assert "Worker 1 and worker 0 have other weights or rates" in said(first)
    assert "end of epoch 1: sequential/dense/bias" in said(first)
    assert len(first["warnings"]) == 1 and not second["warnings"]
    assert [one["warnings"] for one in of_workers("all_well", 2, tmp_path)] == [[], []]
