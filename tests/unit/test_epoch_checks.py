"""A loss that is no number, and workers that have diverged, are named at the end of the epoch."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.worker.epoch_checks import EpochChecks

ROOT = pathlib.Path(__file__).parents[2]


def of_workers(function: str, workers: int, tmp_path) -> list[dict]:
    path = tmp_path / f"{function}_{workers}.json"
    run = [sys.executable, "-m", "tests.unit.two_workers", str(path), function, str(workers)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


def messages_of(found: dict) -> str:
    assert "warnings" in found, found
    return " | ".join(found["warnings"])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nan_is_reported_with_its_step_and_the_worker_of_its_rows(tmp_path):
    first, second = of_workers("nan_of_one_row", 2, tmp_path)
    assert "NaN or infinite since step 2 of epoch 1, with the rows of worker 1" in messages_of(first)
    assert not second["warnings"] and first["epochs"] == 2
    (alone,) = of_workers("nan_of_one_row", 1, tmp_path)
    assert "NaN or infinite since step 2 of epoch 1. The training continues" in messages_of(alone)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nan_stops_a_training_or_is_ignored(tmp_path):
    first, second = of_workers("nan_that_stops", 2, tmp_path)
    assert (first["epochs"], second["epochs"]) == (1, 1) and "nan='stop'" in messages_of(first)
    assert of_workers("nan_that_is_ignored", 1, tmp_path) == [{"warnings": [], "epochs": 2}]
    (ended,) = of_workers("nan_that_ends_it", 1, tmp_path)
    assert "TerminateOnNaN has ended the training" in messages_of(ended)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_diverge_are_named_and_others_are_not(tmp_path):
    first, second = of_workers("weights_that_drift", 2, tmp_path)
    assert "Worker 1 and worker 0 have other weights or rates" in messages_of(first)
    assert "end of epoch 1: sequential/dense/bias" in messages_of(first)
    assert len(first["warnings"]) == 1 and not second["warnings"]
    assert [one["warnings"] for one in of_workers("all_well", 2, tmp_path)] == [[], []]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 69), st.integers(1, 5), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_first_step_with_a_nan_is_reported(steps, bad, each, value):
    """Of any length, and with several steps an execution, of which the first is reported."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checks = EpochChecks("warn")
    checks.set_model(model)
    checks.on_epoch_begin(0)
    ends = [min(end, steps) - 1 for end in range(each, steps + each, each)]
    for last in ends:
        checks.on_train_batch_end(last, {"loss": tf.constant(1.0 if last < bad else value)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks.on_epoch_end(0)
    reached = [last for last in ends if last >= bad]
    assert len(caught) == bool(reached)
    if reached:
        first = reached[0] if ends.index(reached[0]) == 0 else ends[ends.index(reached[0]) - 1] + 1
        assert f"since step {first + 1} of epoch 1." in str(caught[0].message)


def test_nan_loss_of_unseen_steps_is_reported_at_the_epochs_end():
    """As the coordinator of parameter servers has it."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for word, count in (("warn", 1), ("ignore", 0)):
        checks = EpochChecks(word)
        checks.set_model(model)
        checks.on_epoch_begin(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checks.on_epoch_end(2, {"loss": math.nan})
            checks.on_epoch_end(3, {"loss": math.nan})
        assert len(caught) == count
        assert all("NaN or infinite in epoch 3." in str(one.message) for one in caught)


def test_nan_weights_are_reported_where_the_loss_is_finite():
    """A row that is none makes the weights so, and relu makes 0 of them."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.set_weights([np.full((1, 1), math.nan), np.zeros(1)])
    checks = EpochChecks("stop")
    checks.set_model(model)
    checks.on_epoch_begin(0)
    with pytest.warns(UserWarning, match="kernel has weights that are NaN or infinite at the end of epoch 1"):
        checks.on_epoch_end(0, {"loss": 1.0})
    assert model.stop_training
