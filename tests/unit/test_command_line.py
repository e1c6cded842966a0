"""The command `raytf` behaves as commands of click do: help, choices, exit codes, completion, and a list of runs."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys

import keras
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import raytf
from raytf import cli, cli_options
from raytf.cli_parts import given_options
from raytf.console import phases
from raytf.doctor import examination
from raytf.errors import ConfigError, ResourceError
from raytf.runtime import connection, resources
from raytf.storage.checkpoint_files import AT_ENDS, CheckpointState, DamagedCheckpointError
from raytf.storage.run_lock import RunLock
from raytf.train import run_list
from raytf.worker import export
from tests.unit.test_tfrecords import example, write
from tests.waiting import until

TRAINING = ["m:f", "--data", "d", "--features", "a"]


def invoke(*arguments: str):
    return CliRunner().invoke(cli.main, list(arguments))


def helped(command: str) -> str:
    outcome = invoke(command, "--help")
    assert outcome.exit_code == 0
    return outcome.output


def test_the_list_of_commands_is_not_cut():
    text = invoke("--help").output
    assert "..." not in text.partition("Commands:")[2]
    assert all(re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE) for name in cli.main.commands), text


@pytest.mark.parametrize("command", cli.main.commands)
def test_help_has_an_example_that_the_command_takes(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").touch()
    text = helped(command)
    example = text.partition("Example:")[2].partition("\n\n")[0].replace("\\\n", " ")
    made = cli.main.commands[command]
    lines = [line for line in example.splitlines() if line.strip().startswith(f"raytf {command} ")]
    lines += re.findall(r"\$\((raytf .*)\)", example)
    assert lines, text
    for line in lines:
        words = shlex.split(line.partition("|")[0])[2:]
        made.make_context(command, words, resilient_parsing=False)
    assert all(param.help for param in made.params if param.param_type_name == "option"), command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *TRAINING, "--strategy", "x"], "'multi_worker_mirrored'"),
        (["sweep", *TRAINING, "--mode", "x"], "'min', 'max'"),
        (["sweep", *TRAINING, "--scheduler", "x"], "'asha'"),
        (["sweep", *TRAINING, "--search", "x"], "'optuna'"),
        (["sweep", *TRAINING, "--num-samples", "0"], "--num-samples"),
        (["train", *TRAINING, "--checkpoint-every", "often"], "--checkpoint-every"),
        (["train", *TRAINING, "--memory-every", "often"], "--memory-every"),
        (["train", *TRAINING, "--learning-rate", "inf"], "finite"),
        (["train", *TRAINING, "--max-failures", "-2"], "--max-failures"),
        (["train", *TRAINING, "--nan", "x"], "'warn', 'stop', 'ignore'"),
        (["train", *TRAINING, "--name", "../other"], "'../other'"),
        (["export", "r", "-o", "x", "--format", "pt"], "'onnx'"),
        (["export", "r", "-o", "x", "--which", "first"], "'best'"),
        (["predict", "nowhere", "--data", "d", "--features", "a", "-o", "x"], "nowhere"),
        (["evaluate", "nowhere", "--data", "d", "--features", "a"], "nowhere"),
        (["runs", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["report", ".", "-o", "."], "may write"),
        (["completion", "tcsh"], "'bash', 'zsh', 'fish'"),
        (["nothing"], "No such command"),
    ],
)
def test_wrong_value_is_reported_with_the_usage_and_exit_code_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = invoke(*arguments)
    assert outcome.exit_code == 2 and message in outcome.output and "Usage: " in outcome.output, outcome.output


@pytest.mark.parametrize(("command", "domains"), [("train", []), ("sweep", ["units=[8,16]"])])
def test_nan_is_an_argument_of_the_trainer(command, domains):
    for words, value in ((["--nan", "stop"], "stop"), ([], "warn")):
        context = cli.main.commands[command].make_context(command, [*TRAINING[:1], *domains, *TRAINING[1:], *words])
        assert given_options(context)["trainer"]["nan"] == value


def test_verify_is_off_by_a_word():
    for words, value in ((["--verify", "off"], False), (["--verify", "error"], "error"), ([], "warn")):
        context = cli.main.commands["train"].make_context("train", [*TRAINING, *words])
        assert given_options(context)["trainer"]["verify"] == value


def test_wrong_content_of_a_users_file_is_a_wrong_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("a: [1, 2\nb: }")
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    (tmp_path / "needs.py").write_text("import a_package_that_is_missing.part\n")
    write(tmp_path / "rows.tfrecord", [example(x=1, target=1)])
    (tmp_path / "predicted").mkdir()
    (tmp_path / "predicted" / "1.parquet").touch()
    epoch(tmp_path, "first", 1, loss=[1.0])
    training = ["--features", "a", "--labels", "y"]
    for arguments, message in (
        (["sweep", "needs:f", "--space", "bad.yaml", "--data", "rows.csv", *training], "is a file of YAML"),
        (["train", "needs:f", "--data", "rows.csv", "--features", "z"], "which has 'a', 'y'"),
        (["train", "needs:f", "--data", "rows.tfrecord", "--features", "z"], "which has 'target', 'x'"),
        (["train", "needs:f", "--data", "rows.csv", *training], "needs.py, line 1"),
        (["train", "raytf.missing:f", "--data", "rows.csv", *training], "MODULE must be a module"),
        (["predict", "first", "--data", "rows.csv", "-o", "rows.csv"], "written into a folder"),
        (["predict", "first", "--data", "rows.csv", "-o", "rows.csv/out"], "may write"),
        (["predict", "first", "--data", "rows.csv", "-o", "predicted"], "in which is '1.parquet'"),
        (["runs", ".", "--metric", "los"], "no run in . has the metric 'los'"),
    ):
        outcome = invoke(*arguments)
        text = " ".join(outcome.output.split())
        assert outcome.exit_code == 2 and message in text and "Usage: " in text, (outcome.output, outcome.exception)


@pytest.mark.parametrize("names", [["label", "image", "path"], ["age", "image", "path"]])
def test_columns_of_images_are_known_before_ray_starts(names, tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    if names[0] == "age":
        (tmp_path / "labels.csv").write_text("file,age\ncat/1.png,2\n")
    cli_options.check_files("train", str(tmp_path), "auto", {"labels": names[0]})
    with pytest.raises(ConfigError, match="'z'"):
        cli_options.check_files("train", str(tmp_path), "auto", {"labels": "z"})
    with pytest.raises(ConfigError, match="which has 'image', 'path'; "):
        cli_options.check_files("train", str(tmp_path), "auto", {"labels": "label"}, labelled=False)


def test_hidden_files_of_a_parquet_folder_are_not_read(tmp_path):
    """Hadoop writes a checksum next to each file, and its name comes first."""
    rows = tmp_path / "rows" / "day=1"
    rows.mkdir(parents=True)
    pq.write_table(pa.table({"y": [1.0]}), rows / "part-0.snappy.parquet")
    (rows / ".part-0.snappy.parquet.crc").write_bytes(b"crc")
    for path in (tmp_path / "rows", rows / "part-0.snappy.parquet"):
        assert cli_options.check_files("train", str(path), "auto", {"labels": "y"}) == "parquet"
    assert cli_options.check_files("train", str(tmp_path / "rows"), "auto", {"labels": "y", "features": "day"})
    with pytest.raises(ConfigError, match="folder or file that exists.*parquet'"):
        cli_options.check_files("train", f"{rows}/*.parquet", "auto", {"labels": "y"})
    with pytest.raises(ConfigError, match="must hold Parquet files.*rows.csv"):
        (tmp_path / "rows.csv").write_text("y")
        cli_options.check_files("train", str(tmp_path / "rows.csv"), "parquet", {"labels": "y"})


def test_more_workers_than_the_cluster_holds_are_a_wrong_value(tmp_path, monkeypatch):
    """At the start; a cluster that changes later is an error of the run, see below."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text("def f(config): pass\n")
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    monkeypatch.setattr(connection, "connect", lambda *bundles, **options: None)
    monkeypatch.setattr(resources, "describe_sharing", lambda workers, bundles: workers)

    def refuse(workers):
        raise ResourceError("The cluster must be able to hold every worker", workers.num_workers, "Use fewer workers")

    monkeypatch.setattr(resources, "check_cluster", refuse)
    outcome = invoke(
        "train", "models:f", "--data", "rows.csv", "--features", "a", "--labels", "y", "--num-workers", "9"
    )
    assert outcome.exit_code == 2 and "received: 9" in outcome.output, (outcome.output, outcome.exception)


class Waiting:
    """A module's code that ends when the command has shown a text."""

    def __init__(self, text: str):
        self.text = text

    def __call__(self, *arguments, **options):
        shown = lambda: self.text in "".join(s.buffer.getvalue().decode() for s in (sys.stdout, sys.stderr))
        until(shown)
        raise ConfigError("It has been shown", repr(self.text), "Go ahead")


@pytest.fixture
def shown(monkeypatch):
    """Phases are printed at once."""
    monkeypatch.setattr(phases, "_WORTH_A_LINE", 0.0)


def test_what_a_command_waits_for_is_shown(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    (tmp_path / "waits.py").write_text(
        "from tests.unit.test_command_line import Waiting\nWaiting('importing waits ...')()\n"
    )
    monkeypatch.setattr(raytf, "load_model", Waiting("loading the model ..."))
    monkeypatch.setattr(export, "export", Waiting("writing and checking the model ..."))
    monkeypatch.setattr(examination, "run_examination", Waiting("looking for the cluster ..."))
    for arguments in (
        ["train", "waits:f", "--data", "rows.csv", "--features", "a"],
        ["predict", "model.keras", "--data", "rows.csv", "-o", "out"],
        ["evaluate", "model.keras", "--data", "rows.csv", "--json"],
        ["export", "model.keras", "-o", "served"],
        ["doctor"],
    ):
        outcome = invoke(*arguments)
        assert outcome.exit_code == 2 and "It has been shown" in outcome.output, (outcome.output, outcome.exception)
        assert ("..." in outcome.stdout) == (arguments[0] == "train"), "stdout is the result's"


def test_version_and_completion():
    assert raytf.__version__ in invoke("--version").output
    for shell in ("zsh", "fish"):
        assert "_RAYTF_COMPLETE" in invoke("completion", shell).output
    words = {"COMP_WORDS": "raytf train --strategy ", "COMP_CWORD": "3", "_RAYTF_COMPLETE": "bash_complete"}
    outcome = CliRunner(env=words).invoke(cli.main, prog_name="raytf")
    assert "plain,one_device" in outcome.output, outcome.output


def epoch(folder, run: str, number: int, epochs: int = 3, stopped: bool = False, **metrics) -> None:
    """A checkpoint of an epoch's end, as far as a list of runs reads it."""
    where = folder / run / f"{AT_ENDS}2026-01-0{number}"
    where.mkdir(parents=True)
    history = [{"epoch": i, **{name: values[i - 1] for name, values in metrics.items()}} for i in range(1, number + 1)]
    (where / "state.json").write_text(CheckpointState(number, 10 * number, 0, stopped, history).to_json())
    (where / "build.json").write_text(json.dumps({"config": {"epochs": epochs}}))
    os.utime(where / "state.json", (1e9 + number, 1e9 + number))


def test_runs_that_are_not_there(tmp_path):
    runner = CliRunner()
    done = runner.invoke(cli.main, ["runs", str(tmp_path)])
    assert done.exit_code == 0 and f"no runs in {tmp_path}: name the folder given as --storage" in done.output
    epoch(tmp_path, "done", 1, loss=[3.0])
    done = runner.invoke(cli.main, ["runs", str(tmp_path), "--metric", "los"])
    assert "has the metric 'los'" in done.output and "interrupted" in done.output


def test_runs_of_a_folder(tmp_path):
    epoch(tmp_path, "team/done", 3, val_loss=[3.0, 1.0, 2.0], acc=[0.5, 0.7, 0.6])
    epoch(tmp_path, "broken", 2, loss=[2.0, float("nan")])
    epoch(tmp_path, "early", 1, stopped=True, loss=[2.0])
    (tmp_path / "else" / "deeper").mkdir(parents=True)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "sweep.json").write_text(json.dumps({"metric": "loss", "mode": "min"}))
    found = {run.name: run for run in run_list.listed(tmp_path)}
    assert found.keys() == {"team/done", "broken", "early", "search"}
    assert found["team/done"].cells()[:4] == ("team/done", "finished", "3/3", "val_loss 1 (epoch 2)")
    assert found["broken"].cells()[:4] == ("broken", "interrupted, loss nan", "2/3", "loss 2 (epoch 1)")
    assert found["early"].state == "stopped" and found["search"].state == "sweep, 0 of 0 trials ended"
    assert next(run.name for run in run_list.listed(tmp_path)) == "team/done", "what was changed last comes first"
    best = {run.name: run.best for run in run_list.listed(tmp_path, "acc", "max")}
    assert best["team/done"] == ("acc", 0.7, 2) and best["broken"] is None
    lines = [line.split("\t") for line in invoke("runs", str(tmp_path)).stdout.splitlines()]
    assert lines[0] == ["name", "state", "epochs", "best", "when"] and {len(line) for line in lines} == {5}


def test_the_best_trial_of_a_sweep_follows_the_metric_that_is_asked_for(tmp_path):
    sweep = tmp_path / "search"
    trials = []
    for name, row in {"a": {"loss": 1.0, "acc": 0.5}, "b": {"loss": 2.0, "acc": 0.7}}.items():
        (sweep / name).mkdir(parents=True)
        (sweep / name / "result.json").write_text(json.dumps(row) + "\n")
        trials.append([json.dumps({"relative_logdir": name, "status": "TERMINATED"}), "{}"])
    (sweep / "sweep.json").write_text(json.dumps({"metric": "loss", "mode": "min"}))
    (sweep / "experiment_state-1.json").write_text(json.dumps({"trial_data": trials}))
    best = lambda *asked: run_list.listed(tmp_path, *asked)[0].best
    assert best() == ("loss", 1.0, 0) and best("acc", "max") == ("acc", 0.7, 0) and best("acc", "min")[1] == 0.5
    tied = [{"epoch": epoch, "acc": 0.7} for epoch in (1, 2, 3)]
    assert run_list.best_of(tied, "acc", "max") == run_list.best_of(tied, "acc", "min") == ("acc", 0.7, 1)
    without = [{"epoch": math.nan, "loss": 0.1}, {"loss": 0.2}, {"epoch": 2.0, "loss": 0.3}]
    assert run_list.best_of(without) == ("loss", 0.3, 2), "reports of a loop that name no epoch"


def test_locked_run_is_listed_as_running(tmp_path):
    import pyarrow.fs

    epoch(tmp_path, "a", 1, loss=[1.0])
    with RunLock(pyarrow.fs.LocalFileSystem(), str(tmp_path / "a")):
        assert [run.state for run in run_list.listed(tmp_path)] == ["running"]
    assert [run.state for run in run_list.listed(tmp_path / "a")] == ["interrupted"]


def test_a_model_is_used_on_columns_that_the_data_has(tmp_path):
    """Known before Ray starts, as for `raytf train`."""
    epoch(tmp_path, "first", 1)
    pq.write_table(pa.table({"a": [1.0], "y": [1]}), tmp_path / "rows.parquet")
    run, data = str(tmp_path / "first"), str(tmp_path / "rows.parquet")
    for words in (
        ["predict", run, "--features", "z", "-o", "x"],
        ["evaluate", run, "--features", "a", "--labels", "z"],
    ):
        outcome = invoke(*words, "--data", data)
        assert outcome.exit_code == 2 and "'z'" in outcome.output and "'a', 'y'" in outcome.output, outcome.output


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (DamagedCheckpointError, 1), (ResourceError, 1)])
def test_what_turns_out_to_be_wrong_as_the_model_is_tried_is_a_wrong_value(kind, code, monkeypatch):
    class Refusing:
        def fit(self):
            raise kind("metric must be one that the model reports", "'acuracy'", "Correct it")

    monkeypatch.setattr(cli, "_trainer", lambda ctx: Refusing())
    outcome = invoke("train", *TRAINING)
    assert outcome.exit_code == code and "received: 'acuracy'" in outcome.output, outcome.output
