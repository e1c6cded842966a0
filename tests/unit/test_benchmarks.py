"""What benchmarks print, and that the ways they compare train alike; the training is mocked."""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
import tempfile
import types
from unittest import mock

import pytest
import ray.train.tensorflow
import ray.tune

import raytf

BENCHMARKS = pathlib.Path(__file__).parents[2] / "jobs" / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


def rows(shown: str) -> dict[str, list[str]]:
    """The lines of a printed table, by their first cell."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in lines}


def test_a_trial_more_of_a_sweep_costs_a_training_and_a_whole_pause(benchmark, monkeypatch, capsys):
    """Trials of 10 s with pauses of 20 s are two a minute, however many were measured."""
    sweep, common = benchmark("sweep"), benchmark("common")
    given, clock = [], [1000]

    def training(folder, trials, warm=None):
        def run():
            for name, after in (("first", 0), ("last", 10)):
                times = [clock[0] + 30 * trial + after for trial in range(trials)]
                pathlib.Path(folder, name).write_text("".join(f"{at}\n" for at in times))
            clock[0] = times[-1]

        return run

    def measure(script, flag, way, address, trials, timeout):
        sweep.once(way, address, trials)
        return given.pop()

    monkeypatch.setattr(sweep, "time", types.SimpleNamespace(time=lambda: clock[0]))
    monkeypatch.setattr(sweep, "_raytf", training)
    monkeypatch.setattr(sweep, "_ray", training)
    monkeypatch.setattr(common, "connect", lambda address: None)
    monkeypatch.setattr(common, "give", given.append)
    monkeypatch.setattr(common, "measure", measure)
    monkeypatch.setattr(common, "ray_cluster", lambda: contextlib.nullcontext("address"))
    sweep.main(["--repeats", "1"])
    shown = rows(capsys.readouterr().out)
    assert {way: shown[way][2] for way in sweep.TRIALS} == dict.fromkeys(sweep.TRIALS, "2")


RAYS = {
    "start": lambda way: way("", "/").fit(),
    "sweep": lambda way: way("/", 1)(),
    "resume": lambda way: way("/"),
}


@pytest.mark.parametrize("name", RAYS)
def test_steps_of_rays_trainer_have_as_many_rows_as_those_of_raytf(benchmark, monkeypatch, name):
    """raytf's batch of 128 is of both workers, Ray's of one."""
    module, common = benchmark(name), benchmark("common")
    shard, config = mock.MagicMock(), {"batch_size": 128, "learning_rate": 0.1}
    trainer = lambda loop, **rest: mock.Mock(fit=lambda: loop(config))
    monkeypatch.setattr(ray.train.tensorflow, "TensorflowTrainer", trainer)
    monkeypatch.setattr(ray.tune, "Tuner", lambda trial, **rest: mock.Mock(fit=lambda: trial(config)))
    for called, value in {"dataset_shard": shard, "context": mock.Mock(), "checkpoint": None}.items():
        monkeypatch.setattr(ray.train, f"get_{called}", lambda *_, value=value: value)
    monkeypatch.setattr(ray.train, "report", mock.Mock())
    monkeypatch.setattr(common, "vectors", mock.Mock())
    monkeypatch.setattr(module, "_watch" if name == "resume" else "_mark", mock.Mock())
    for library in ("tensorflow", "tf_keras"):
        monkeypatch.setitem(sys.modules, library, mock.MagicMock())
    RAYS[name](module._ray)
    assert shard.to_tf.call_args.kwargs["batch_size"] == 64


def test_a_way_without_an_update_is_not_raytfs_best(benchmark, monkeypatch, capsys):
    step, common = benchmark("step"), benchmark("common")
    seconds = {"by hand": 0.4, "raytf": 0.2, "raytf no-update": 0.1}
    measured = lambda script, flag, way, *rest, **given: [(seconds[way], seconds[way])]
    monkeypatch.setattr(common, "measure_group", measured)
    step.main(["--smoke", "--models", "mlp", "--ways", *seconds])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| mlp ")]
    assert [line.split("|")[-2].strip() for line in shown] == ["2.00x", "1.00x", "0.50x"]


def test_hangs_leave_nothing_in_the_temporary_folder(benchmark, monkeypatch, tmp_path):
    hangs = benchmark("hangs")
    trainers = mock.Mock()
    monkeypatch.setattr(raytf, "KerasTrainer", trainers)
    monkeypatch.setattr(ray, "init", mock.Mock())
    monkeypatch.setattr(ray.data, "from_items", mock.Mock())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit):  # no hang was seen
        hangs.main(["--seeds", "2"])
    folders = {call.kwargs["config"]["folder"] for call in trainers.call_args_list}
    assert len(folders) == 2 and all(folder.startswith(str(tmp_path)) for folder in folders)
    assert not list(tmp_path.iterdir())
