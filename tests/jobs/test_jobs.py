"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import ray

import raytf

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROOT = pathlib.Path(__file__).parents[2]
RAYTF = shutil.which("raytf", path=os.path.dirname(sys.executable))


def run(*command, cwd=ROOT, code=0, program=sys.executable):
    """Runs a program, by default Python, on the test session's cluster; returns its output."""
    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "COLUMNS": "140"}
    done = subprocess.run([program, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout, done.stderr


MODULE = """
def build_model(config):
    import keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(config["units"]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(config["learning_rate"]), "mse")
    return model
"""


# What the three commands that build a trainer share; every option of each command is given once, see the last test.
TRAINING = "--data data --validation data --features a,b --labels y --sample-weights w --num-workers 2"
TRAINING += " --gpus-per-worker 0 --cpus-per-worker 0.5 --batch-size 10 --epochs 2 --learning-rate 1e-4 --set units=3"
TRAINING += " --strategy multi_worker_mirrored --num-ps 0 --seed 3 --storage runs --max-failures 1 --nan stop"
TRAINING += " --verify error --ports 20000-31999 --network 0.0.0.0/0"
COMMANDS = {
    "train": f"train mymodels:build_model {TRAINING} --name first --resume auto --checkpoint-every 30s "
    "--memory-every 2steps",
    "plan": f"plan mymodels:build_model {TRAINING}",
    "sweep": "sweep mymodels:build_model batch_size=choice([10,20]) --data data --validation data --features a,b"
    " --labels y --sample-weights w --num-workers 1 --gpus-per-worker 0 --cpus-per-worker 1 --batch-size 10 --epochs 2"
    " --learning-rate 1e-4 --set depth=1 --strategy auto --num-ps 0 --seed 3 --storage runs --max-failures 0"
    " --space space.yaml --num-samples 2 --metric val_loss --mode min --scheduler median --search optuna"
    " --max-concurrent-trials 2 --cold --scale-learning-rate linear --base-batch-size 10 --warmup-steps 2"
    " --name search --checkpoint-every 30s --nan warn --verify off --ports 20000-31999 --network 0.0.0.0/0",
    "resume": "sweep mymodels:build_model --resume runs/search --data data --features a,b --labels y --storage runs",
    "report": "report runs/search -o page.html",
    "export": "export runs/first --output served --format saved_model --which best --metric val_loss --mode min"
    " --model mymodels:build_model",
    "mean": "export runs/first -o mean.keras --format keras --average 2",
    "runs": "runs runs --metric loss --mode min",
    "predict": "predict runs/first --data data --features a,b -o predicted --which best --metric loss --mode min"
    " --batch-size 10 --num-workers 1 --cpus-per-worker 1 --gpus-per-worker 0 --model mymodels:build_model",
    "evaluate": "evaluate runs/first --data data --features a,b --labels y --sample-weights w --json --which best"
    " --metric loss --mode min --batch-size 10 --num-workers 1 --cpus-per-worker 1 --gpus-per-worker 0"
    " --model mymodels:build_model",
    "completion": "completion bash",
    "run": "run --num-workers 2 --num-ps 0 --chief --evaluator --cpus-per-worker 1 --gpus-per-worker 0 --max-restarts 0"
    " --ports 20000-31999 --frozen-after 10 --hang-timeout 10 --pin-cpus --env COLOR=green --network 0.0.0.0/0"
    " --quiet look.py --epochs 3",
    "doctor": "doctor --address local --storage data --ports 20000-31999 --network 0.0.0.0/0 --seconds 120"
    " --no-training --json",
}


@pytest.fixture
def folder(tmp_path):
    """A user's folder: a module with a model, and data."""
    import pandas as pd

    (tmp_path / "mymodels.py").write_text(MODULE)
    (tmp_path / "data").mkdir()
    rows = pd.DataFrame({"a": range(40), "b": 1.0, "y": 2.0, "w": 1.0})
    rows.to_parquet(tmp_path / "data" / "part.parquet")
    (tmp_path / "space.yaml").write_text("units: [2, 3]\nlearning_rate: loguniform(1.0e-5, 1.0e-4)\n")
    return tmp_path


def command(name, folder):
    """Runs a command's console script, as it is typed."""
    return run(*COMMANDS[name].split(), cwd=folder, program=RAYTF)


def test_the_command_train(folder):
    out, _ = command("train", folder)
    (served, _), (averaged, _) = (command(name, folder) for name in ("export", "mean"))
    assert "epoch 2/2" in out and "raytf.load_model" in out
    assert raytf.load_model(re.search(r'load_model\("(.*)"\)', out)[1]).layers[0].units == 3
    assert served == f"{folder / 'served'}\n" and (folder / "served" / "saved_model.pb").exists()
    assert averaged == f"{folder / 'mean.keras'}\n"
    kept = [raytf.load_model(path).get_weights() for path in (folder / "runs" / "first").glob("checkpoint_2*")]
    for mean, *each in zip(raytf.load_model(folder / "mean.keras").get_weights(), *kept, strict=True):
        assert len(each) == 2 and abs(mean - sum(each) / 2).max() < 1e-6


def test_the_commands_of_a_run_that_is_there(folder):
    import pandas as pd

    command("train", folder)
    (listed, _), (made, _), (values, _) = (command(name, folder) for name in ("runs", "predict", "evaluate"))
    header, line = (row.split("\t") for row in listed.splitlines())
    assert header == ["name", "state", "epochs", "best", "when"] and line[:3] == ["first", "finished", "2/2"]
    assert line[3].startswith("loss ")
    predicted = pd.read_parquet(folder / "predicted")
    assert (
        made.splitlines()[-1] == str(folder / "predicted")
        and list(predicted) == ["predictions"]
        and len(predicted) == 40
    )
    found = json.loads(values.splitlines()[-1])
    rows = pd.read_parquet(folder / "data")
    error = [np.ravel(value).item() - y for value, y in zip(predicted["predictions"], rows["y"], strict=True)]
    assert found["loss"] == pytest.approx(sum(e * e for e in error) / 40, rel=1e-4)


def test_the_command_plan(folder):
    out, err = command("plan", folder)
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert fields["strategy"] == "multi_worker_mirrored: as requested" and fields["workers"] == "2, 1 device(s) each"
    assert fields["rows of a step on a replica"] == "5" and fields["parameters"] == "13" and "Traceback" not in err
    assert not (folder / "runs").exists()


def test_the_command_sweep(folder):
    (out, _), (resumed, _), (page, _) = (command(name, folder) for name in ("sweep", "resume", "report"))
    assert "trial 2/2" in out and "best val_loss" in out and "best val_loss" in resumed and page.strip() == "page.html"
    model = raytf.load_model(re.search(r'load_model\("(.*)"\)', out)[1])
    assert model.layers[0].units in (2, 3)
    assert (folder / "page.html").read_text().count("<svg") == 3


def test_the_command_run(folder):
    (folder / "look.py").write_text(
        "import json, os, sys\nprint(json.loads(os.environ['TF_CONFIG'])['task'], os.environ['COLOR'], sys.argv[1:])\n"
    )
    out, _ = command("run", folder)
    assert out == "[chief 0]     {'type': 'chief', 'index': 0} green ['--epochs', '3']\n"


def test_the_command_doctor(folder):
    out, _ = command("doctor", folder)
    report = json.loads(out)
    assert report["findings"] == [] and report["left_out"] == [] and len(report["nodes"]) == 1


def test_more_processes_than_cores_share_them(tmp_path):
    """A Ray that raytf starts has the CPUs that the run asks for; `local` means to start one."""
    (tmp_path / "look.py").write_text("print('here')\n")
    many = (os.cpu_count() or 1) + 1
    command = [RAYTF, "run", "--num-workers", str(many), "look.py"]
    environment = os.environ | {"RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"raytf: {many} processes share the {many - 1} core(s) of this machine\n" in done.stderr
    assert done.stdout.count("] here") + done.stdout.count("]  here") == many


def test_every_option_is_run():
    """An option that no test gives is one that nobody has seen work."""
    from raytf.cli import main
    from tests.jobs import test_formats

    folder = pathlib.Path(__file__).parent
    commands = [*COMMANDS.values(), *test_formats.COMMANDS.values()]
    texts = {name: " ".join(t for t in commands if t.startswith(name + " ")) for name in main.commands}
    texts["run"] += (folder / "test_run.py").read_text().replace('"', " ")
    for name, made in main.commands.items():
        for option in made.params:
            if option.param_type_name == "option":
                assert any(f" {way} " in texts[name] + " " for way in option.opts), f"raytf {name} {option.opts}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere:build_model --data data --features a", "MODULE must be a module"),
        ("json:build_model --data data --features a", "FUNCTION must be a function of MODULE"),
        ("json --data data --features a", "named as MODULE:FUNCTION"),
        ("json:dumps --data data --features a --set units", "--set takes NAME=VALUE"),
        ("mymodels:build_model --data nowhere --features a", "must be a folder or file that exists"),
        ("mymodels:build_model --data . --features a,x", "features must name columns .* received: 'x'"),
        ("mymodels:build_model --data empty --features a", "There must be a file to read; received: 'empty'"),
        ("mymodels:build_model --data space.yaml --features a", "files of one format.*'space.yaml' with none of these"),
        ("mymodels:build_model --data space.yaml --features a --format parquet", "must hold Parquet files"),
        ("mymodels:build_model --data data --types a=", "'a=' is not COLUMN=TYPE"),
        ("mymodels:build_model --data data --image-size 3", "'3' is not HEIGHTxWIDTH"),
        (
            "mymodels:build_model --data data --features a --strategy foo",
            "Invalid value for '--strategy': 'foo' is not one of 'auto'",
        ),
        ("mymodels:build_model --data data --features a --strategy mirrored --num-workers 2", "trains in one process"),
        (
            "mymodels:build_model --data data --features a --epochs 0",
            "Invalid value for '--epochs': 0 is not in the range x>=1",
        ),
        (
            "mymodels:build_model --data data --features a --learning-rate nan",
            "Invalid value for '--learning-rate': 'nan' is not a finite number",
        ),
        (
            "mymodels:build_model --data data --features a --num-workers 0",
            "Invalid value for '--num-workers': 0 is not in the range",
        ),
        (
            "mymodels:build_model --data data --features a --cpus-per-worker 0",
            "Invalid value for '--cpus-per-worker': 0.0 is not in the range",
        ),
        ("mymodels:build_model --data data --features a --num-ps 1", "belong to strategy 'parameter_server'"),
        ("mymodels:build_model --data data --features a --batch-size 1 --num-workers 2", "one row for each replica"),
        (
            "mymodels:build_model --data data --features a --seed -1",
            "Invalid value for '--seed': -1 is not in the range",
        ),
    ],
)
def test_wrong_commands_fail_with_the_reason_before_anything_starts(folder, arguments, message):
    """Neither Ray nor the user's module is imported: the latter would end the command in another way."""
    (folder / "mymodels.py").write_text("raise SystemExit('imported')")
    (folder / "empty").mkdir()
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").write_text("raise SystemExit('Ray was imported')")
    _wrong(["train", *arguments.split()], message, folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("report .", "A report is about the folder of a run or of a sweep"),
        ("sweep mymodels:build_model units --data data --features a", "written as NAME=DOMAIN; received: 'units'"),
        ("sweep mymodels:build_model --data data --features a", "compares values of the config; received: no domain"),
        (
            "sweep mymodels:build_model units=1 --data data --features a --mode big",
            "Invalid value for '--mode': 'big' is not one of 'min', 'max'",
        ),
        (
            "sweep mymodels:build_model units=1 --data data --features a --scheduler x",
            "Invalid value for '--scheduler': 'x' is not one of 'fifo'",
        ),
        ("sweep mymodels:build_model units=1 --data data --features a --resume no", "resumed from a path that exists"),
    ],
)
def test_wrong_sweeps_fail_with_the_reason(folder, arguments, message):
    _wrong(arguments.split(), message, folder)


def _wrong(command, message, folder):
    _, err = run(*command, cwd=folder, code=2, program=RAYTF)
    usage, *_, sentence = err.splitlines()
    assert usage.startswith("Usage: raytf ") and sentence.startswith("Error: ") and re.search(message, sentence), err
