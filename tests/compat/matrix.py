"""`make compat`: what raytf does with the versions that people have, each set in an environment of its own.

python -m tests.compat.matrix                    all sets, all checks; writes the table into docs/reference/versions.md
python -m tests.compat.matrix --set oldest --check sweep --environment oldest=/path/of/a/venv
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np

from tests.processes.groups import LOCAL, processes

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
PAGE, BEGIN, END = ROOT / "docs/reference/versions.md", "<!-- make compat writes this -->\n", "<!-- to here -->\n"
SECONDS = 3000
# In addition to what raytf needs: what its tests do.
ALSO = ("pytest", "pytest-timeout", "hypothesis")
# A scenario of each kind: what all of Keras' replacements, and both ways of summing, are needed for.
PARITY = (
    *("kinds_sgd", "kinds_adam", "kinds_adamw", "masked_tokens", "class_weight", "batch_normalization"),
    *("batch_normalization_synchronized_uneven", "last_batch_of_one_row", "steps_per_execution", "run_eagerly"),
    *("global_clipnorm_and_ema", "gradient_accumulation", "clipnorm_ema_overwrite_and_weight_decay", "mixed_float16"),
    *("predict_all_rows_in_order", "on_batch", "several_inputs_and_outputs", "metrics_that_are_no_averages", "losses"),
    *("train_step_OwnStep", "gan_dcgan", "gan_in_conditions", "vae_with_add_loss", "custom_loop"),
)
# Of these, for another Python with versions that all were run with.
FEW = ("kinds_sgd", "kinds_adam", "kinds_adamw", "batch_normalization", "train_step_OwnStep")
TOLERANCE = 1e-9
# What of Keras' own tests raytf's replacements reach.
KERAS_TESTS = ("trainers", "losses", "metrics", "optimizers", "callbacks", "models", "backend/tensorflow")
# Tests of Keras in which raytf differs on purpose; see docs/reference/versions.md.
DIFFER = ("test_ema", "test_gradient_accumulation")


@dataclasses.dataclass(frozen=True)
class Versions:
    """A set of versions.

    Args:
        title: in the table.
        pinned: versions of packages by name, without the last part.
        constraints: file of all versions, or None.
        python: "3.12"; None takes the Python that runs this.
        scenarios: of parity.
    """

    title: str
    pinned: dict[str, str]
    constraints: str | None = None
    python: str | None = None
    scenarios: tuple[str, ...] = PARITY


_OLD_KERAS, _NEW_KERAS = {"keras": "3.12"}, {"keras": "3.15"}
_OLD_TENSORFLOW = {"tensorflow": "2.20", "tensorboard": "2.20", "tf_keras": "2.20"}
_NEW_TENSORFLOW = {"tensorflow": "2.21", "tensorboard": "2.21", "tf_keras": "2.21"}
_NEWEST = {"ray": "2.60"} | _NEW_KERAS | _NEW_TENSORFLOW
SETS = {
    "newest": Versions("newest", _NEWEST, "constraints.txt"),
    "oldest": Versions("oldest", {"ray": "2.57"} | _OLD_KERAS | _OLD_TENSORFLOW, "constraints-oldest.txt"),
    "older-ray": Versions("older Ray, newest Keras", {"ray": "2.58"} | _NEW_KERAS | _NEW_TENSORFLOW),
    "oldest-keras": Versions("newest Ray, oldest Keras", {"ray": "2.60"} | _OLD_KERAS | _NEW_TENSORFLOW),
    "python-3.12": Versions("newest", _NEWEST, "constraints.txt", "3.12", FEW),
    "python-3.13": Versions("newest", _NEWEST, "constraints.txt", "3.13", FEW),
}
SMOKES = ("trainer", "stream", "sweep", "run")
CHECKS = ("names", "unit", "parity", *SMOKES, "keras")
# Columns of the page's table.
HEADS = {kind: kind for kind in CHECKS[1:]} | {"unit": "`tests/unit/compat`", "keras": "Keras' own tests"}


def environment(name: str) -> str:
    """The Python of a set's environment, which is made if it is not there."""
    folder = FOLDER / name
    python = str(folder / "bin" / "python")
    if (folder / "made").exists():
        return python
    chosen = SETS[name]
    base = sys.executable if chosen.python is None else shutil.which(f"python{chosen.python}")
    assert base, f"no python{chosen.python} on the PATH; --environment {name}=FOLDER takes a venv that is there"
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    wanted = [f"{package}[data,train,tune,default]" if package == "ray" else package for package in chosen.pinned]
    wanted = [f"{one}=={version}.*" for one, version in zip(wanted, chosen.pinned.values(), strict=True)]
    pinned = ["--constraint", chosen.constraints] if chosen.constraints else []
    pip = [python, "-m", "pip", "install", "--quiet", *pinned]
    subprocess.run([*pip, *wanted, *ALSO, "--editable", "."], check=True, cwd=ROOT)
    (folder / "made").touch()
    return python


def call(python: str, *arguments: str, seconds: float = SECONDS) -> str:
    """What a command of an environment printed; raises AssertionError with its last lines if it failed."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run([python, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return ran.stdout


def check_names(python: str, folder: str) -> str:
    found = call(python, "-m", "tests.unit.compat")
    return found.rpartition("Private names (")[2].partition(")")[0] + " names"


def check_unit(python: str, folder: str) -> str:
    """Runs the tests of `raytf/compat`: overrides are called, replacements are installed, a version is checked."""
    options = ("-q", "-p", "no:cacheprovider", "--durations", "0", "-o", "timeout=600")
    output = call(python, "-m", "pytest", *options, str(ROOT / "tests" / "unit" / "compat"))
    return output.strip().splitlines()[-1].partition(" in ")[0].strip("= ")


def check_smoke(kind: str):
    return lambda python, folder: call(python, "-m", "tests.compat.smoke", kind, folder).strip().splitlines()[-1]


def check_parity(python: str, folder: str, scenarios: Sequence[str]) -> str:
    """Two processes equal one for each of the scenarios, and so do two devices of one for what `LOCAL` has of them."""
    wanted = {"1": scenarios, "2": scenarios, "mirrored": [name for name in scenarios if name in LOCAL]}
    groups = []
    for place, names in wanted.items():
        where = pathlib.Path(folder) / place
        where.mkdir()
        how = {"dtype": "float64", "place": place, "world": processes(place), "communication": "auto"}
        groups.append({"folder": str(where), "scenarios": names, **how})
    call(python, "-m", "tests.processes.worker", json.dumps(groups))
    for place in wanted:
        codes = json.loads((pathlib.Path(folder) / place / "codes.json").read_text())
        assert not any(codes.values()), (pathlib.Path(folder) / place / "log.0").read_text()[-3000:]
    compared = [(place, name) for place, names in wanted.items() if place != "1" for name in names]
    wrong = [f"{name} ({place})" for place, name in compared if not _equal(folder, place, name)]
    assert not wrong, f"not equal: {', '.join(wrong)}"
    return f"{len(compared)} scenarios"


def _equal(folder: str, place: str, name: str) -> bool:
    one, many = (pickle.loads((pathlib.Path(folder) / p / f"{name}.0.pkl").read_bytes()) for p in ("1", place))
    if isinstance(one, str) or isinstance(many, str):
        print(f"{name}: {one if isinstance(one, str) else many}"[:500])
        return False
    keys = [key for key in one if not key.startswith(("bits:", "chief:"))]
    return all(np.allclose(many[key], one[key], rtol=0, atol=TOLERANCE) for key in keys)


def check_keras(python: str, folder: str) -> str:
    """Keras' own tests pass with raytf's replacements where they pass without, but for those of `DIFFER`."""
    where = call(python, "-c", "import keras.src; print(keras.src.__path__[0])").strip().splitlines()[-1]
    alone, with_raytf = (_keras_tests(python, folder, where, plugin) for plugin in (None, "tests.compat.keras_plugin"))
    passed = {name for name, outcome in alone.items() if outcome == "passed"}
    lost = sorted(name for name in passed if with_raytf.get(name) != "passed")
    unexpected = [name for name in lost if name.rpartition("::")[2] not in DIFFER]
    assert passed and not unexpected, f"fail with raytf alone: {', '.join(unexpected)}"
    return f"{len(passed) - len(lost)} of {len(passed)}"


def _keras_tests(python: str, folder: str, where: str, plugin: str | None) -> dict[str, str]:
    report = os.path.join(folder, f"{plugin}.xml")
    more = ["-p", plugin] if plugin else []
    places = [os.path.join(where, place) for place in KERAS_TESTS]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--continue-on-collection-errors",
        "--junitxml",
        report,
    ]
    command = [python, "-m", "pytest", *options, "-o", "python_files=*_test.py", "--rootdir", where, *more, *places]
    subprocess.run(command, env=variables, cwd=folder, capture_output=True, timeout=SECONDS)
    found = {}
    # its own report of its own tests
    for case in ElementTree.parse(report).iter("testcase"):
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = bad.pop() if bad else "passed"
    return found


def check(kind: str, chosen: Versions, python: str) -> str:
    """What a check found, in a few words."""
    functions = {"names": check_names, "unit": check_unit, "keras": check_keras}
    with tempfile.TemporaryDirectory() as folder:
        if kind == "parity":
            return check_parity(python, folder, chosen.scenarios)
        return functions.get(kind, check_smoke(kind))(python, folder)


def table(found: dict[str, dict[str, str]]) -> str:
    """The table of the page."""
    heads = ["", "Python", "Ray", "Keras", "TensorFlow", *HEADS.values()]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, chosen in SETS.items():
        outcomes = found.get(name, {})
        pinned = (chosen.pinned[package] for package in ("ray", "keras", "tensorflow"))
        found_out = (outcomes.get(kind, "not run") for kind in HEADS)
        row = [chosen.title, outcomes.get("python", chosen.python or ""), *pinned, *found_out]
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows) + "\n"


def write_table(found: dict[str, dict[str, str]]) -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table(found) + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", choices=SETS, help="all unless it is given")
    parser.add_argument("--check", action="append", choices=CHECKS, help="all unless it is given")
    parser.add_argument("--environment", action="append", default=[], metavar="SET=FOLDER", help="a venv that is there")
    options = parser.parse_args()
    variables = dict(one.split("=", 1) for one in options.environment)
    FOLDER.mkdir(parents=True, exist_ok=True)
    notes = FOLDER / "found.json"
    failed = False
    for name in options.set or SETS:
        python = os.path.join(variables[name], "bin", "python") if name in variables else environment(name)
        version = call(python, "-c", "import platform; print(platform.python_version())").strip()
        for kind in options.check or CHECKS:
            began = time.monotonic()
            try:
                outcome = check(kind, SETS[name], python)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(error)
                outcome, failed = "fails", True
            print(f"{name}: {kind}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
            found = json.loads(notes.read_text()) if notes.exists() else {}
            found.setdefault(name, {}).update({"python": version, kind: outcome})
            notes.write_text(json.dumps(found))
            write_table(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
