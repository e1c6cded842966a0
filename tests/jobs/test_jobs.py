"""The examples, the command line and the README's snippet, run as a user runs them."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import ray

import raytf

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROOT = pathlib.Path(__file__).parents[2]


def run(*command, cwd=ROOT, code=0):
    """Runs a Python program on the test session's cluster; returns what it printed."""
    address = ray.get_runtime_context().gcs_address
    environment = os.environ | {"RAY_ADDRESS": address, "COLUMNS": "140"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout, done.stderr


def test_the_example_of_the_readme(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 15
    (tmp_path / "example.py").write_text(code)
    out, _ = run("example.py", cwd=tmp_path)
    assert "loss" in out


MODULE = """
def build_model(config):
    import keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(config["units"]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(config["learning_rate"]), "mse")
    return model
"""


def test_the_command_train(tmp_path):
    import pandas as pd

    (tmp_path / "mymodels.py").write_text(MODULE)
    (tmp_path / "data").mkdir()
    pd.DataFrame({"a": range(40), "b": 1.0, "y": 2.0}).to_parquet(tmp_path / "data" / "part.parquet")
    command = ["-m", "raytf.cli", "train", "mymodels:build_model", "--data", "data", "--features", "a,b"]
    command += ["--labels", "y", "--num-workers", "2", "--batch-size", "10", "--epochs", "2"]
    command += ["--learning-rate", "1e-4", "--set", "units=3", "--storage", "runs"]
    out, _ = run(*command, cwd=tmp_path)
    assert "epoch 2/2" in out and "raytf.load_model" in out
    assert raytf.load_model(re.search(r'load_model\("(.*)"\)', out)[1]).layers[0].units == 3


def test_the_command_sweep(tmp_path):
    import pandas as pd

    (tmp_path / "mymodels.py").write_text(MODULE)
    (tmp_path / "data").mkdir()
    pd.DataFrame({"a": range(40), "b": 1.0, "y": 2.0}).to_parquet(tmp_path / "data" / "part.parquet")
    (tmp_path / "space.yaml").write_text("units: [2, 3]\nlearning_rate: loguniform(1.0e-5, 1.0e-4)\n")
    command = ["-m", "raytf.cli", "sweep", "mymodels:build_model", "batch_size=choice([10, 20])", "--data", "data"]
    command += ["--space", "space.yaml", "--features", "a,b", "--labels", "y", "--num-samples", "2"]
    command += ["--search", "optuna", "--scheduler", "median", "--storage", "runs", "--name", "search"]
    out, _ = run(*command, cwd=tmp_path)
    assert "trial 2/2" in out and "best loss" in out
    model = raytf.load_model(re.search(r'load_model\("(.*)"\)', out)[1])
    assert model.layers[0].units in (2, 3)
    out, _ = run("-m", "raytf.cli", "report", "runs/search", "-o", "page.html", cwd=tmp_path)
    assert out.strip() == "page.html" and (tmp_path / "page.html").read_text().count("<svg") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere:build", "--data", "x", "--features", "a"], "MODULE must be a module"),
        (["train", "json:build", "--data", "x", "--features", "a"], "FUNCTION must be a function of MODULE"),
        (["train", "json", "--data", "x", "--features", "a"], "named as MODULE:FUNCTION"),
        (["report", "."], "The folder of a sweep holds sweep.json"),
        (["train", "json:dumps", "--data", "x", "--features", "a", "--set", "units"], "--set takes NAME=VALUE"),
    ],
)
def test_wrong_commands_say_why(tmp_path, arguments, message):
    _, err = run("-m", "raytf.cli", *arguments, cwd=tmp_path, code=1)
    assert err.startswith("Error: ") and message in err and len(err.splitlines()) == 1
