"""What type checkers and editors know of raytf: its public names, their arguments, and what they give."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import raytf
from tests import blocks

ROOT = pathlib.Path(__file__).parents[2]

FINE = """
from typing import Any, assert_type

import ray
from ray import tune
from ray.train import Result, RunConfig, ScalingConfig

import raytf


def build_model(config: dict[str, Any]) -> Any: ...


trainer = raytf.KerasTrainer(
    build_model,
    config={"batch_size": 64},
    datasets={"train": ray.data.range(10)},
    features={"a": "a", "b": ["b", raytf.Column("c", fill=0)]},
    labels=raytf.Column("y", pad="batch"),
    materialize={"train": True},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run"),
    tensorflow_config=raytf.TensorflowConfig(gradient_dtype="bfloat16"),
)
result = trainer.fit()
assert_type(result, Result)
assert_type(raytf.plan(trainer).steps_per_epoch, int | None)
grid = raytf.sweep(trainer, {"learning_rate": tune.loguniform(1e-4, 1e-1)}, num_samples=2, scheduler="asha")
assert_type(grid, tune.ResultGrid)
raytf.sweep(raytf.TensorflowTrainer(lambda config: None, train_loop_config={}), resume="/shared/sweep")
raytf.load_model(result), raytf.load_model("/shared/run", compile=False)
raytf.Predictor(result, which="best", keep=["id"]), raytf.Predictor(build_model({}), features={"a": ["b", "c"]})
raytf.show_result(result)
raytf.fit(build_model({}), [1], [2], batch_size=1, validation_freq=[1, 3], num_workers=2).history["loss"]
try:
    raytf.get_dataset("train", batch_size=8, features="a")
except raytf.ConfigError as error:
    print(error)
"""
# Each line is wrong for the reason in its comment.
WRONG = """
import raytf

def build_model(config): ...

trainer = raytf.KerasTrainer(build_model, datasets={}, features="a")
raytf.KerasTrainer(build_model, datasets={}, features="a", strategie="auto")  # call-arg
raytf.KerasTrainer(build_model, datasets={}, features="a", storage="stream")  # call-arg
raytf.KerasTrainer(build_model)  # call-arg
raytf.KerasTrainer(build_model, datasets={}, features=3)  # arg-type
raytf.KerasTrainer(build_model, datasets={}, features="a", seed="7")  # arg-type
raytf.TensorflowConfig(sync_evry=8)  # call-arg
raytf.TensorflowConfig(sync_every="8")  # arg-type
raytf.Column("a", pad=2.5)  # arg-type
raytf.sweep("trainer", {"units": 3})  # arg-type
raytf.sweep(trainer, {"units": 3}, num_samples="2")  # arg-type
raytf.fit(None, [1], [2], num_workers="2")  # arg-type
raytf.fit(None, [1], [2], epoch=2)  # call-arg
raytf.get_dataset("train", features="a")  # call-arg
raytf.load_model(3)  # arg-type
raytf.Predictor("/shared/run", features=3)  # arg-type
raytf.plan("trainer")  # arg-type
raytf.KearsTrainer  # attr-defined
trainer.fit().metric  # attr-defined
"""


def test_checkers_see_the_public_names_where_they_are():
    (block,) = (
        node
        for node in ast.parse((ROOT / "raytf" / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    found = {}
    for node in block.body:
        for alias in node.names:
            assert alias.asname == alias.name, "without `as` a name is not handed on"
            found[alias.name] = node.module
    assert found == raytf._MODULES and sorted(found) == raytf.__all__


@pytest.mark.parametrize("name", [name for name in raytf.__all__ if raytf._MODULES[name].startswith("raytf.")])
def test_every_argument_has_a_type(name):
    """Of functions, and of what can be called of classes; an argument without one takes anything."""
    found = getattr(raytf, name)
    functions = {name: found}
    if inspect.isclass(found):
        functions = {k: f for k, f in vars(found).items() if inspect.isfunction(f) and not k.startswith("_")}
        functions |= {k: f.fget for k, f in vars(found).items() if isinstance(f, property)}
        functions |= {"__init__": found.__init__} if inspect.isfunction(found.__init__) else {}
    for of, function in functions.items():
        signature = inspect.signature(function)
        bare = [k for k, p in signature.parameters.items() if p.annotation is p.empty and k != "self"]
        if signature.return_annotation is signature.empty and of != "__init__":
            bare.append("what it gives")
        assert not bare, f"{of} of raytf.{name}: {bare}"


@pytest.mark.slow
def test_a_users_script_is_checked(tmp_path):
    """With the options and the cache of `make lint`, as what it takes is to read Ray's types."""
    readme = [blocks.named("README.md", name).text for name in ("fit", "trainer")]
    assert "raytf.fit(" in readme[0] and "raytf.KerasTrainer(" in readme[1]
    for name, text in {"fine": FINE, "wrong": WRONG, "readme_fit": readme[0], "readme_trainer": readme[1]}.items():
        (tmp_path / f"{name}.py").write_text(text)
    config = ("--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary", "--hide-error-context")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *config, *map(str, sorted(tmp_path.glob("*.py")))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    found = dict.fromkeys(re.findall(r"^\S*?(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE))
    matches = re.finditer(r"^.*  # ([\w-]+)$", WRONG, re.MULTILINE)
    wanted = {("wrong", str(WRONG[: match.start()].count("\n") + 1), match[1]) for match in matches}
    assert found.keys() == wanted, done.stdout + done.stderr
