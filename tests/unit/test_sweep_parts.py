"""What a sweep is made of, without a cluster: spaces as text, names, scaled rates."""

import dataclasses
import importlib
import json

import numpy as np
import pyarrow.fs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import tune
from ray.tune import schedulers

from raytf.errors import ConfigError
from raytf.runtime.topology import per_replica_batch
from raytf.tune import learning_rate, space
from raytf.tune.options import SweepOptions
from tests.logged import lines_logged


def test_a_space_as_text():
    parsed = space.parse_space(
        {
            "learning_rate": "loguniform(1e-4, 1e-1)",
            "batch_size": "[32, 64]",
            "units": [8, 16],
            "kind": "choice(['cnn', 'mlp'])",
            "grid": "tune.grid_search([1, 2, 3])",
            "epochs": 3,
            "name": "a text",
            "dropout": "0.5",
        }
    )
    assert (parsed["learning_rate"].lower, parsed["learning_rate"].upper) == (1e-4, 1e-1)
    assert parsed["batch_size"].categories == [32, 64] and parsed["units"].categories == [8, 16]
    assert parsed["kind"].categories == ["cnn", "mlp"] and parsed["grid"] == {"grid_search": [1, 2, 3]}
    assert (parsed["epochs"], parsed["name"], parsed["dropout"]) == (3, "a text", 0.5)
    assert space.count_trials(parsed, 4) == 12 and space.count_trials(parsed, -1) is None
    drawn = space.sample_config(parsed)
    assert drawn["grid"] == 1 and 1e-4 <= drawn["learning_rate"] <= 1e-1 and drawn["kind"] in ("cnn", "mlp")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('false')",
        "exec('1')",
        "loguniform(open('x'), 1)",
        "uniform(1)",
        "tune.run(1)",
        "uniform(1,",
    ],
)
def test_no_code_runs_from_a_space(text):
    with pytest.raises(ConfigError):
        space.parse_space({"learning_rate": text})


def test_an_argument_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"those of ray.tune.loguniform; received: .*argument: 'upper'"):
        space.parse_space({"learning_rate": "loguniform(1e-2)"})


def test_numbers_of_a_key():
    assert space.key_bounds(tune.choice([1, 3]), "num_workers") == [1, 3]
    assert space.key_bounds(tune.grid_search([2]), "num_workers") == [2]
    assert space.key_bounds(tune.randint(1, 4), "num_workers") == [1, 3]
    assert space.key_bounds(2, "num_workers") == [2]
    with pytest.raises(ConfigError, match="num_workers must have known bounds"):
        space.key_bounds(tune.uniform(1, 2), "num_workers")


@pytest.mark.parametrize("value", [tune.grid_search([]), tune.choice([])])
def test_a_key_without_a_value_is_named(value):
    with pytest.raises(ConfigError, match="received: 'rate' with none"):
        space.check_space({"batch_size": 3, "rate": value})


def test_numbers_that_a_trial_cannot_have():
    assert space.numbers(tune.choice([2, 4]), "epochs") == [2, 4]
    for value in (tune.choice(["a"]), 0, tune.grid_search([4, 0]), 1.5):
        with pytest.raises(ConfigError, match="batch_size of a trial must be an integer of at least 1"):
            space.numbers(value, "batch_size")


def test_a_scheduler_with_a_metric_of_its_own_is_refused_at_once():
    own = schedulers.ASHAScheduler(metric="mae", mode="min")
    with pytest.raises(ConfigError, match=r"received: AsyncHyperBandScheduler\(metric='mae', ...\). Leave metric"):
        space.make_scheduler(own, {}, 3)


def test_names_of_schedulers_and_searches():
    domain = {"learning_rate": tune.loguniform(1e-4, 1e-1), "batch_size": 32, "num_workers": tune.choice([1, 2])}
    assert space.make_scheduler(None, domain, 3) is None and space.make_scheduler("fifo", domain, 3) is None
    for name, kind in {
        "asha": schedulers.AsyncHyperBandScheduler,
        "hyperband": schedulers.HyperBandScheduler,
        "median": schedulers.MedianStoppingRule,
        "pbt": schedulers.PopulationBasedTraining,
    }.items():
        assert isinstance(space.make_scheduler(name, domain, 3), kind)
    own = schedulers.FIFOScheduler()
    assert space.make_scheduler(own, domain, 3) is own
    for wrong in ("best", 3):
        with pytest.raises(ConfigError, match="scheduler must be one of fifo, asha"):
            space.make_scheduler(wrong, domain, 3)
    with pytest.raises(ConfigError, match="mutates what has a domain"):
        space.make_scheduler("pbt", {"batch_size": 32}, 3)
    assert space.make_search(None) is None
    with pytest.raises(ConfigError, match="search_alg must be one of random, optuna"):
        space.make_search("best")


@pytest.mark.parametrize(
    ("batch_size", "rows", "pipeline_steps", "reports"),
    [
        (tune.choice([40, 20]), 100, None, 3),  # steps 2 and 4, and the end
        (tune.randint(30, 50), 100, None, 2),
        (tune.sample_from(lambda _: 20), 100, None, 2),  # as many as for the sample
        (40, 100, None, 2),
        (20, None, 4, 4),
        (20, None, None, 1),
    ],
)
def test_reports_within_epochs_are_counted_for_schedulers(batch_size, rows, pipeline_steps, reports):
    from types import SimpleNamespace

    from raytf.data.tf_data import PipelineFacts, TFData

    module = importlib.import_module("raytf.tune.sweep")
    facts = PipelineFacts(text="", resume_unit="step", steps=pipeline_steps, rows=40, spec="")
    train = None if rows is not None else TFData(len).with_facts(facts)
    task = SimpleNamespace(datasets={"train": train})
    plan = SimpleNamespace(rows=rows, train=SimpleNamespace(task=task), config={"batch_size": 10})
    options = SweepOptions(report_every_steps=2, sample={"batch_size": 40})
    assert module._most_reports(plan, options, {"batch_size": batch_size}) == reports


@given(st.floats(1e-6, 1), st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 8))
def test_scaled_rates(rate, base, batch, workers):
    linear, root = (learning_rate.Scaling(rule=rule, base_batch_size=base) for rule in ("linear", "sqrt"))
    assert linear.rate(rate, batch) == pytest.approx(rate * batch / base)
    assert root.rate(rate, batch) ** 2 == pytest.approx(rate * linear.rate(rate, batch))
    assert linear.rate(rate, base) == pytest.approx(rate)
    config = {"learning_rate": rate, "batch_size": batch}
    if batch < workers:
        with pytest.raises(ConfigError, match="at least one row for each replica"):
            learning_rate.derived_config(config, linear, workers, 1000)
        return
    found = learning_rate.derived_config(config, linear, workers, 1000)
    assert found["scaled_learning_rate"] == linear.rate(rate, batch)
    assert found["per_replica_batch"] == max(per_replica_batch(batch, workers))
    assert (found["steps_per_epoch"] - 1) * batch < 1000 <= found["steps_per_epoch"] * batch


@pytest.mark.parametrize(("gpus", "replicas"), [(None, 3), (1, 3), (4, 12)])
def test_a_trial_has_a_replica_for_each_gpu(gpus, replicas):
    from ray.train import ScalingConfig

    from raytf.tune.trial import SweepSpec

    of_worker = {"use_gpu": True, "resources_per_worker": {"GPU": gpus}} if gpus else {}
    given = dict.fromkeys(field.name for field in dataclasses.fields(SweepSpec))
    plan = SweepSpec(**given | {"scaling_config": ScalingConfig(num_workers=2, **of_worker)})
    assert plan.replicas({"num_workers": 3}) == replicas


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic", "base_batch_size": 1}, "must be linear, sqrt or None"),
        ({"rule": "linear"}, "belong together"),
        ({"base_batch_size": 32}, "belong together"),
        ({"rule": "sqrt", "base_batch_size": 0}, "base_batch_size must be an integer of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0"),
    ],
)
def test_wrong_scalings(arguments, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate.Scaling(**arguments)


# What the folder of a sweep holds since there are sweeps.
REMEMBERED = (
    '{"metric": "val_loss", "mode": "max", "rule": "sqrt", "base_batch_size": 32, "warmup_steps": 5, '
    '"report_every_steps": 7, "num_samples": 1, "space": {"units": "3"}, "identity": {}, "sample": {"units": 3}}'
)


def test_what_a_sweep_remembers():
    scaling = learning_rate.Scaling(rule="sqrt", base_batch_size=32, warmup_steps=5)
    sample = {"units": 3, "layer": object()}  # what JSON does not have is left out
    own = {"scaling": scaling, "sample": sample, "space": space.describe_space({"units": 3})}
    options = SweepOptions(metric="val_loss", mode="max", report_every_steps=7, **own)
    assert json.dumps(options.content()) == REMEMBERED
    resumed = SweepOptions(num_samples=4, max_concurrent_trials=2, metric="loss").resumed(json.loads(REMEMBERED))
    assert resumed.content() == options.content() | {"num_samples": 4}
    assert (resumed.num_samples, resumed.max_concurrent_trials) == (4, 2), "what is of the call stays"
    for wrong in ({"metric": "loss", "mode": "min"}, json.loads(REMEMBERED) | {"mode": "best"}):
        with pytest.raises(ConfigError, match="settings without 'rule'|mode must be one of min, max"):
            SweepOptions().resumed(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, or -1; received: 0"),
        ({"num_samples": True}, "num_samples must be at least 1, or -1; received: True"),
        ({"metric": None}, "metric must be the name of a metric that the trials report; received: None"),
        ({"mode": "best"}, "mode must be one of min, max; received: 'best'"),
        ({"max_concurrent_trials": 0}, "max_concurrent_trials must be an integer of at least 1"),
        ({"report_every_steps": 0}, "report_every_steps must be an integer of at least 1"),
    ],
)
def test_wrong_options_of_a_sweep(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SweepOptions(**arguments)


def test_too_large_batch_is_reported():
    from raytf.train.worker_group import TrialError
    from raytf.tune.trial import _explained

    error = _explained(TrialError("ResourceExhaustedError: OOM when allocating tensor", "..."), {"batch_size": 4096})
    assert str(error).startswith("config['batch_size']=4096 does not fit into a worker's memory (ResourceExhausted")
    other = TrialError("ValueError: no")
    assert _explained(other, {"batch_size": 4096}) is other


def test_what_trials_have_found_is_logged_by_the_driver(tmp_path):
    """Of each kind the first, also where Ray sends no lines of processes to the driver."""
    from types import SimpleNamespace

    import pyarrow.fs

    from raytf import events
    from raytf.events import Kind, RunEvent
    from raytf.tune.table import SweepTable

    record = events.Recorder(pyarrow.fs.LocalFileSystem(), str(tmp_path))
    for epoch in (1, 2):
        found = {"name": "val_loss", "epoch": epoch}
        record(RunEvent(kind=Kind.VALIDATION_NOT_FINITE, **found))
        record(RunEvent(kind=Kind.WORKERS_STARTED, workers=1))
    storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem())
    trial = SimpleNamespace(trial_id="a", storage=storage, path=str(tmp_path), last_result={}, config={"units": 8})
    with lines_logged() as lines:
        SweepTable("loss", "min", 1, show=False).on_trial_complete(0, [trial], trial)
    assert len(lines) == 1
    assert lines[0].startswith("trial with units=8: val_loss: NaN or infinite in the validation of epoch 1")


def test_the_live_table(tmp_path):
    from types import SimpleNamespace

    import pyarrow.fs
    from rich.console import Console

    from raytf.tune.table import SweepTable

    def trial(name, status, result, **config):
        storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem())
        about = {"storage": storage, "path": str(tmp_path / name)}
        return SimpleNamespace(trial_id=name, status=status, last_result=result, config=config, **about)

    table = SweepTable("loss", "min", 4, show=False)
    trials = [
        trial("aaaaa", "TERMINATED", {"loss": 0.5, "training_iteration": 3, "per_replica_batch": 16}, batch_size=32),
        trial("bbbbb", "RUNNING", {"loss": np.float32(0.25), "training_iteration": 1}, batch_size=64),  # of a loop
        trial("ccccc", "PENDING", {}, batch_size=64),
        trial("ddddd", "ERROR", {"loss": float("nan"), "training_iteration": 1}, batch_size=64),
    ]
    for ended in (trials[0], trials[3]):
        table.on_trial_start(0, trials, ended)
        table._ended(ended, "")
    table.on_step_end(0, trials)
    console = Console(width=120, record=True)
    console.print(table._table())
    text = console.export_text()
    assert "2/4 trials ended, 1 running, best loss 0.25" in text and "left" not in text
    rows = [line.split("│")[1:] for line in text.splitlines() if "│ " in line]
    assert [row[0].strip() for row in rows] == ["bbbbb", "aaaaa", "ddddd"]
    assert rows[0][4].strip() == "0.25 *" and "(16 a replica)" in rows[1][2]
    for spent, title in (([3600.0] * 2, "best loss 0.25, 2:00:00 left"), ([30.0] * 4, "best loss 0.25\n")):
        table._spent = spent
        console.print(table._table())
        assert title in console.export_text()


def test_the_lines_before_the_first_trial_has_ended(monkeypatch, tmp_path):
    """Outside of a terminal, where there is no live table."""
    from types import SimpleNamespace

    from raytf.console import phases
    from raytf.tune import table as table_module
    from tests.unit.test_progress import Output
    from tests.waiting import until

    output = Output()
    monkeypatch.setattr(phases, "console", lambda: output)
    monkeypatch.setattr(phases, "_WORTH_A_LINE", 0.0)
    monkeypatch.setattr(table_module, "_LINE_INTERVAL", 0.0)
    result = {"loss": 0.5, "training_iteration": 1}
    storage = SimpleNamespace(storage_filesystem=pyarrow.fs.LocalFileSystem())
    trial = SimpleNamespace(trial_id="a", status="RUNNING", last_result={}, config={"units": 2}, storage=storage)
    trial.path = str(tmp_path)
    with table_module.SweepTable("loss", "min", 4, show=True) as table:
        until(lambda: output == ["starting workers ..."])
        table.on_trial_start(0, [trial], trial)
        until(lambda: output[1:] == ["compiling and making the first step ..."])
        trial.last_result = result
        table.on_trial_result(0, [trial], trial, result)
        table.on_step_end(0, [trial])
        assert output[2:] == ["0/4 trials ended, 1 running, best loss 0.5"]
        table.on_trial_complete(0, [trial], trial)
        table.on_trial_start(0, [trial], trial)
        table.on_step_end(0, [trial])
    assert len(output) == 4 and output[3].startswith("trial 1/4  units=2  loss 0.5  after 1 report(s)")


def test_a_sweep_whose_trials_all_diverged_names_none_as_the_best():
    import io
    from types import SimpleNamespace

    from ray.tune import ResultGrid
    from rich.console import Console

    from raytf.tune.table import SweepTable

    class Grid(list):
        errors, experiment_path = [], "runs/one"
        get_best_result = ResultGrid.get_best_result

    table = SweepTable("loss", "min", 2, show=False)
    for values, sentence in (([float("nan")] * 2, "no trial is the best: loss is NaN in all of them"), ([], "")):
        table._console = Console(width=120, file=io.StringIO())
        table.print_best(Grid(SimpleNamespace(metrics={"loss": value}) for value in values))
        shown = table._console.file.getvalue()
        assert sentence in shown and f"{len(values)} trials" in shown


def test_named_sweep_resumes_only_unchanged():
    def options(rate, **more):
        return SweepOptions(num_samples=3, space=space.describe_space({"learning_rate": rate, "units": 8}), **more)

    one = options(tune.loguniform(1e-4, 0.1))
    remembered = json.loads(json.dumps(one.content()))
    one.check_same(remembered, "runs/one")
    assert one.resumed(remembered) == one
    old = {key: value for key, value in remembered.items() if key not in ("space", "num_samples")}
    one.resumed(old)
    one.check_same(old, "runs/one")  # of a raytf that did not remember these
    for other in (options(tune.uniform(1e-4, 0.1)), options(tune.loguniform(1e-4, 1.0)), options(0.1)):
        with pytest.raises(ConfigError, match="A sweep of a name that exists resumes as it was; received: 'runs/one'"):
            other.check_same(remembered, "runs/one")
    with pytest.raises(ConfigError, match="metric 'val_loss', which was 'loss'"):
        options(tune.loguniform(1e-4, 0.1), metric="val_loss").check_same(remembered, "runs/one")


def test_a_space_is_described_without_addresses():
    described = space.describe_space(
        {
            "drawn": tune.sample_from(lambda config: 1),
            "choice": tune.choice([1, "a"]),
            "whole": tune.qrandint(2, 8, 2),
            "grid": tune.grid_search([1, 2]),
            "object": object(),
        }
    )
    assert described["choice"] == "Categorical [1, 'a'] _Uniform" and described["grid"] == '{"grid_search": [1, 2]}'
    assert not [text for text in described.values() if "0x" in text], described


def test_a_sweep_of_a_name_is_of_one_loop():
    check = importlib.import_module("raytf.tune.sweep")._check_same
    now = {"train_loop_per_worker": {"code": "1"}, "train_loop_config": {"sizes": [1, 2]}, "data": {}}
    check(json.loads(json.dumps(now)), now, "runs/one")
    check({}, now, "runs/one")  # of a raytf that did not remember it
    with pytest.raises(ConfigError, match="'runs/one' with another code of train_loop_per_worker.*resume='runs/one'"):
        check(now | {"train_loop_per_worker": {"code": "2"}}, now, "runs/one")
    check(now | {"version": 2, "train_loop_per_worker": "of an older raytf"}, now, "runs/one")


def test_a_list_in_a_space_is_warned_of():
    assert space.list_warning({"a": 1, "b": [3], "c": tune.choice([1, 2]), "d": tune.grid_search([1, 2])}) is None
    warning = space.list_warning({"units": [2, 3], "rates": (0.1, 0.2)})
    assert "units=[2, 3], rates=(0.1, 0.2). " in warning and "units=tune.grid_search([2, 3])" in warning
