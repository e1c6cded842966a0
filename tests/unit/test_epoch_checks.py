"""A loss that is NaN, and workers that have diverged, become events of the run."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.compat.versions import at_least
from raytf.errors import ConfigError
from raytf.events import Kind
from raytf.parallel import trainer
from raytf.worker import epoch_checks
from raytf.worker.callbacks import scale_rate
from raytf.worker.epoch_checks import EpochChecks
from raytf.worker.session import Session
from tests.logged import warnings_logged

ROOT = pathlib.Path(__file__).parents[2]


def of_workers(function: str, workers: int, tmp_path) -> list[dict]:
    path = tmp_path / f"{function}_{workers}.json"
    run = [sys.executable, "-m", "tests.unit.two_workers", str(path), function, str(workers)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


def checks_of(nan: str, users=()) -> tuple[EpochChecks, list]:
    """Returns the checks of a small model, and the list of events that they send."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    session, sent = Session(), []
    session.emit = sent.append
    checks = EpochChecks(nan, users, session)
    checks.set_model(model)
    checks.on_epoch_begin(0)
    return checks, sent


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nan_is_reported_with_its_step_and_the_worker_of_its_rows(tmp_path):
    first, second = of_workers("nan_of_one_row", 2, tmp_path)
    (of_second,) = second["events"]
    assert "NaN or infinite since step 2 of epoch 1, with the rows of worker 1" in of_second
    assert "since step 3 of epoch 1, with the rows of worker 0" in first["events"][0], "the driver takes the first"
    assert len(first["events"]) == 1 and first["epochs"] == 2
    (alone,) = of_workers("nan_of_one_row", 1, tmp_path)
    assert "NaN or infinite since step 2 of epoch 1. The training continues" in alone["events"][0]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nan_stops_a_training_or_is_ignored(tmp_path):
    first, second = of_workers("nan_that_stops", 2, tmp_path)
    assert (first["epochs"], second["epochs"]) == (1, 1) and "nan='stop'" in second["events"][0]
    assert of_workers("nan_that_is_ignored", 1, tmp_path) == [{"events": [], "epochs": 2}]
    (ended,) = of_workers("nan_that_ends_it", 1, tmp_path)
    assert "TerminateOnNaN has ended the training" in ended["events"][0] and ended["epochs"] == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_that_diverge_are_named_and_others_are_not(tmp_path):
    first, second = of_workers("weights_that_drift", 2, tmp_path)
    (line,) = first["events"]
    assert "Worker 1 and worker 0 have other weights or rates" in line
    assert "end of epoch 1: sequential/dense/bias" in line and not second["events"]
    assert [one["events"] for one in of_workers("all_well", 2, tmp_path)] == [[], []]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 69), st.integers(1, 5), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_first_step_with_a_nan_is_reported(steps, bad, each, value):
    """Of any length, and with several steps an execution, of which the first is reported."""
    checks, sent = checks_of("warn")
    ends = [min(end, steps) - 1 for end in range(each, steps + each, each)]
    for last in ends:
        checks.on_train_batch_end(last, {"loss": tf.constant(1.0 if last < bad else value)})
    checks.on_epoch_end(0)
    reached = [last for last in ends if last >= bad]
    assert len(sent) == bool(reached)
    if reached:
        first = reached[0] if ends.index(reached[0]) == 0 else ends[ends.index(reached[0]) - 1] + 1
        assert f"since step {first + 1} of epoch 1." in str(sent[0])
        assert (sent[0].step, sent[0].epoch, sent[0].ranks) == (first + 1, 1, (0,))


def test_nan_in_a_long_epoch_is_reported_near_its_step():
    checks, sent = checks_of("warn")
    for step in range(60):
        checks.on_train_batch_end(step, {"loss": tf.constant(1.0 if step < 30 else math.nan)})
    assert [event.step for event in sent] == [31]


def test_nan_of_a_step_without_rows_is_no_nan():
    """A worker without rows makes a step with a placeholder, of which a train_step may take a mean by weights."""
    checks, sent = checks_of("warn")
    for step, (loss, rows) in enumerate([(1.0, 4.0), (math.nan, 0.0), (1.0, 4.0), (math.nan, 0.0)]):
        checks.model.__dict__["_raytf_last"] = {"loss": tf.constant(loss)}, tf.constant(rows)
        checks.on_train_batch_end(step)
    checks.on_epoch_end(0, {"loss": 1.0})
    assert not sent
    checks.model.__dict__["_raytf_last"] = {"loss": tf.constant(math.nan)}, tf.constant(1.0)
    checks.on_epoch_begin(1)
    checks.on_train_batch_end(0)
    checks.on_epoch_end(1, {"loss": 1.0})
    assert [event.step for event in sent] == [1]


def test_nan_loss_of_unseen_steps_is_reported_at_the_epochs_end():
    """As the coordinator of parameter servers has it."""
    for word, count in (("warn", 1), ("ignore", 0)):
        checks, sent = checks_of(word)
        checks.on_epoch_begin(2)
        checks.on_epoch_end(2, {"loss": math.nan})
        checks.on_epoch_end(3, {"loss": math.nan})
        assert len(sent) == count
        assert all("NaN or infinite in epoch 3." in str(event) for event in sent)


def test_nan_of_the_validation_alone_is_reported_once():
    for word, count in (("warn", 1), ("stop", 1), ("ignore", 0)):
        checks, sent = checks_of(word)
        for epoch in range(2):
            checks.on_epoch_begin(epoch)
            checks.on_epoch_end(epoch, {"loss": 1.0, "val_loss": math.nan, "val_mae": 1.0})
        assert [(event.kind, event.name) for event in sent] == [(Kind.VALIDATION_NOT_FINITE, "val_loss")] * count
        assert not checks.model.stop_training
    checks, sent = checks_of("warn")
    checks.on_epoch_end(0, {"loss": math.nan, "val_loss": math.nan})
    assert [event.kind for event in sent] == [Kind.LOSS_NOT_FINITE], "the other follows from it"


def test_nan_weights_are_reported_where_the_loss_is_finite():
    """A row that is none makes the weights so, and relu makes 0 of them."""
    checks, sent = checks_of("stop")
    checks.model.set_weights([np.full((1, 1), math.nan), np.zeros(1)])
    checks.on_epoch_end(0, {"loss": 1.0, "val_loss": math.nan})
    assert [event.kind for event in sent] == [Kind.WEIGHTS_NOT_FINITE]
    assert "kernel has weights that are NaN or infinite at the end of epoch 1" in str(sent[0])
    assert checks.model.stop_training


def test_a_replacement_worker_agrees_on_a_stop_after_the_same_steps_as_the_others(monkeypatch):
    agreed = []
    monkeypatch.setattr(EpochChecks, "_agree", lambda self, **how: agreed.append((self, self._epoch, self._executed)))
    other, _ = checks_of("stop")
    joins, sent = checks_of("stop")
    finite = {"loss": tf.constant(1.0)}
    for step in range(99, 251, 4):  # several steps an execution
        other.on_train_batch_end(step, finite)
    other._reported_validation = True
    joins.load_state_dict(json.loads(json.dumps(other.state_dict())))
    joins.on_epoch_begin(0)
    agreed.clear()
    for step in range(251, 404, 4):
        for checks in (other, joins):
            checks.on_train_batch_end(step, finite)
    for checks in (other, joins):
        checks.on_epoch_end(0, {"loss": 1.0, "val_loss": math.nan})
        checks.on_epoch_begin(1)
        checks.on_train_batch_end(98, finite)
        checks.on_train_batch_end(102, finite)
    found = [[numbers for checks, *numbers in agreed if checks is one] for one in (other, joins)]
    assert found[0] == found[1] == [[0, 300], [0, 400], [0, 404], [1, 103]]
    assert not sent, "the others have reported it"


@pytest.mark.skipif(not at_least("keras", 3, 15), reason="Keras has MultiOptimizer from 3.15")
@pytest.mark.parametrize("scaled", [False, True])
def test_optimizers_within_another_are_seen(scaled, monkeypatch):
    adam, sgd = keras.optimizers.Adam(0.5, gradient_accumulation_steps=2), keras.optimizers.SGD(0.5)
    whole = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(adam, {"body/.*": sgd}))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="body"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(whole) if scaled else whole, "mse")
    before = epoch_checks.checksums(model)
    adam.learning_rate = 0.25
    after = epoch_checks.checksums(model)
    assert before[0] == after[0] and before[1] != after[1], "the weights are alike, the rates are not"
    with pytest.raises(ConfigError, match="received: MultiOptimizer, with a schedule or several rates"):
        scale_rate(model, 2.0)
    monkeypatch.setattr(trainer.local_sgd, "averaging_interval", lambda strategy: 4)
    with pytest.raises(ConfigError, match="received: .*gradient_accumulation_steps.* with sync_every=4"):
        trainer._refuse_what_cannot_work(model, model.distribute_strategy)


def test_where_there_is_no_driver_the_line_is_logged():
    with warnings_logged("The loss is NaN or infinite in epoch 1. The training continues"):
        checks = EpochChecks("warn")
        checks.set_model(checks_of("warn")[0].model)
        checks.on_epoch_end(0, {"loss": math.nan})
