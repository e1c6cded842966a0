"""Options of the commands that train: each states where its value goes, and arrives there."""

from __future__ import annotations

import dataclasses
import inspect

import click
import pytest
import ray
from click.testing import CliRunner
from ray.train import RunConfig

import raytf
from raytf import cli, cli_parts
from raytf.data import formats


def given(command: str, *arguments: str) -> dict:
    """What a command's options come to, by what takes them."""
    made = cli.main.commands[command]
    with made.make_context(command, ["m:f", "--data", "d", "--features", "a,b", *arguments]) as ctx:
        return cli_parts.given_options(ctx)


@pytest.mark.parametrize("command", ["train", "plan", "sweep"])
def test_every_option_is_an_argument_of_what_takes_it(command):
    known = {
        "trainer": inspect.signature(raytf.KerasTrainer).parameters,
        "tensorflow": inspect.signature(raytf.TensorflowConfig).parameters,
        "sweep": inspect.signature(raytf.sweep).parameters,
        "run": {"max_failures", *(field.name for field in dataclasses.fields(RunConfig))},
        "datasets": ("train", "validation"),
        "data": inspect.signature(formats.read).parameters,
        "columns": inspect.signature(formats.roles).parameters,
        "workers": ("num_workers", "gpus_per_worker", "cpus_per_worker"),
        "config": ("batch_size", "epochs", "learning_rate"),
    }
    for option in cli.main.commands[command].params:
        if isinstance(option, cli_parts.Option):
            assert option.name in known[option.receiver], option.opts
        else:
            assert isinstance(option, click.Argument) or option.opts in (["--set"], ["--space"])


def test_values_as_they_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = given("train", "--labels", "y", "--storage", "runs", "--resume", "true", "--epochs", "3")
    assert found["trainer"]["features"] == ["a", "b"] and found["trainer"]["labels"] == "y"
    assert found["trainer"]["resume"] is True and given("train")["trainer"]["resume"] == "auto"
    assert found["run"]["storage_path"] == str(tmp_path / "runs")
    assert given("train", "--storage", "s3://a/b")["run"]["storage_path"] == "s3://a/b"
    assert found["config"] == {"batch_size": 32, "epochs": 3, "learning_rate": None}
    assert found["datasets"] == {"train": "d", "validation": None}
    assert found["tensorflow"] == {"ports": (20_000, 31_999), "network": None}
    found = given("plan", "--network", "net1", "--ports", "20000-20099")["tensorflow"]
    assert found == {"ports": (20_000, 20_099), "network": "net1"}
    assert given("sweep")["sweep"]["warm"] is True and given("sweep", "--cold")["sweep"]["warm"] is False
    assert given("sweep", "--search", "optuna")["sweep"]["search_alg"] == "optuna"


def test_a_key_of_the_config_that_no_option_gives(tmp_path, monkeypatch):
    """Raised before Ray is started: the model function is imported, and not called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "readers.py").write_text("def build(config):\n    return config['learning_rate'], config['units']\n")
    arguments = ["train", "readers:build", "--data", "s3://a/b", "--features", "a"]
    before = ray.is_initialized()  # by another test of this process
    for more, missing in ([], "--learning-rate"), (["--learning-rate", "0.1"], "--set units="):
        outcome = CliRunner().invoke(cli.main, [*arguments, *more])
        assert outcome.exit_code == 2 and missing in outcome.output, outcome.output
        assert ray.is_initialized() is before


@pytest.mark.parametrize("command, more", [("train", []), ("plan", []), ("sweep", ["batch_size=[1,2]"])])
def test_where_workers_listen_reaches_the_trainer(command, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listeners.py").write_text("def build(config):\n    return config\n")
    arguments = [command, "listeners:build", *more, "--data", "s3://a/b", "--features", "a"]
    for option, wrong in (("--network", "10.1.0.0/160"), ("--ports", "1-2"), ("--ports", "some")):
        outcome = CliRunner().invoke(cli.main, [*arguments, option, wrong])
        assert outcome.exit_code == 2 and repr(wrong) in outcome.output.replace("(1, 2)", "'1-2'"), outcome.output
    trainers = []
    monkeypatch.setattr("raytf.cli_runs.connected", lambda workers, processes: workers)
    monkeypatch.setattr("raytf.cli_runs.datasets_of", lambda *_: ({}, {}))
    monkeypatch.setattr("raytf.train.keras_trainer.KerasTrainer", lambda *_, **given: trainers.append(given))
    CliRunner().invoke(cli.main, [*arguments, "--network", "net1", "--ports", "20000-20099"])  # ends without a trainer
    (given,) = trainers
    assert given["tensorflow_config"] == raytf.TensorflowConfig(network="net1", ports=(20_000, 20_099))
