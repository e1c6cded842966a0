"""What is shown of a sweep while it runs, and of a run at its end and when it is begun once more."""

from __future__ import annotations

import io
import math
import types

import numpy as np
import pandas as pd
import pytest
import rich.console
from click.testing import CliRunner
from ray.train import RunConfig

from raytf import cli
from raytf.console import phases
from raytf.train import results, run_list
from raytf.tune import table
from tests.unit.test_command_line import epoch


def trial(rate: float, scaled: float | None):
    last = {"loss": 0.5, "per_replica_batch": 16, "steps_per_epoch": 4, "training_iteration": 2}
    last |= {} if scaled is None else {"scaled_learning_rate": scaled}
    return types.SimpleNamespace(
        trial_id="abcdef", status="RUNNING", config={"learning_rate": rate, "batch_size": 32}, last_result=last
    )


@pytest.mark.parametrize(("scaled", "times"), [(0.01, 1), (0.02, 1), (None, 1)])
def test_trial_prints_its_rate_once(scaled, times):
    text = table._config(trial(0.01, scaled))
    assert text.count("0.01") == times and text.count("0.02") == (scaled == 0.02) and "4 steps an epoch" in text


def test_the_head_of_the_live_table_is_whole_where_the_table_is_narrow():
    shown = table.SweepTable("loss", "min", 3, True)
    shown._trials = [trial(0.01, 0.01)]
    out = io.StringIO()
    rich.console.Console(file=out, width=70).print(shown._table())
    assert out.getvalue().splitlines()[0].strip() == "0/3 trials ended, 1 running, best loss 0.5"


def result(rows, checkpoint=True):
    frame = pd.DataFrame(rows)
    return types.SimpleNamespace(
        metrics=rows[-1],
        metrics_dataframe=frame,
        checkpoint=checkpoint and types.SimpleNamespace(path="/r/c"),
        path="/r",
    )


def test_a_run_ends_with_its_result_and_how_to_load_it():
    rows = [{"epoch": 1, "loss": 0.5, "val_loss": 0.25}, {"epoch": 2, "loss": 0.125, "val_loss": 0.75}]
    first, second = results.lines(result(rows), "/shared/runs/first")
    assert first == "result  epoch 2  loss 0.1250  val_loss 0.7500  (best val_loss 0.2500 in epoch 1)"
    assert second == 'model   raytf.load_model("/shared/runs/first")'
    assert results.lines(result(rows[:1], checkpoint=None), "/r") == ["result  epoch 1  loss 0.5000  val_loss 0.2500"]


def test_a_run_whose_last_loss_is_nan_names_an_epoch_before():
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": math.nan}]
    *_, model = results.lines(result(rows), "/r")
    assert model == 'model   its last loss is NaN or infinite; raytf.load_model("/r", which="best") has epoch 1'
    assert results.lines(result(rows[1:]), "/r")[-1] == "model   its last loss is NaN or infinite"


@pytest.mark.parametrize(("word", "loss", "code"), [("stop", math.nan, 1), ("stop", 0.5, 0), ("warn", math.nan, 0)])
def test_nan_stop_is_a_failed_command(word, loss, code, monkeypatch):
    trainer = types.SimpleNamespace(nan=word, fit=lambda: result([{"epoch": 1, "loss": loss}]))
    monkeypatch.setattr(cli, "_trainer", lambda context: trainer)
    assert CliRunner().invoke(cli.main, ["train", "m:f", "--data", "d", "--features", "a"]).exit_code == code


def test_the_table_of_a_result_has_a_whole_head():
    out = io.StringIO()
    rows = [{"epoch": 1, "loss": 0.5, "learning_rate": 1e-5}]
    results.show_result(result(rows), rich.console.Console(file=out, width=80))
    assert out.getvalue().splitlines()[0] == "result of the last epoch" and " 1e-05 " in out.getvalue()
    assert results.summary(rows[0], rows) == ["result  epoch 1  loss 0.5000  learning_rate 1e-05"]


def test_ended_run_is_reported_before_anything_starts(tmp_path, monkeypatch):
    epoch(tmp_path, "done", 3, loss=[3.0, 2.0, 1.0])
    epoch(tmp_path, "early", 1, stopped=True, loss=[3.0])
    run = lambda name: RunConfig(name=name, storage_path=str(tmp_path))
    message = results.has_ended(run("done"), 3)
    assert message == "done has trained 3 of 3 epochs, and is finished" and message in phases.starting_phase(message)
    assert results.has_ended(run("early"), 5) is not None
    assert results.has_ended(run("done"), 4) is None and results.has_ended(run("new"), 1) is None

    def no_access(*place):
        raise PermissionError("ACCESS_DENIED")

    monkeypatch.setattr(run_list, "newest", no_access)
    assert results.has_ended(run("done"), 3) is None, "the run reports it as it starts"


def test_a_loop_of_a_users_own_reports_what_it_likes():
    """`raytf.TensorflowTrainer`: NumPy's numbers, no epochs, and a checkpoint that is not raytf's."""
    rows = [{"loss": np.float32(0.5), "steps": 3}, {"loss": np.float32(0.25), "steps": 6}]
    found = results.lines(result(rows), "/shared/runs/first", learned=False)
    assert found[0] == "result  loss 0.2500" and found[1].startswith("saved   "), found
    assert results.lines(result([{"steps": 3}], checkpoint=None), "/r") == []
