"""What is wrong with the options of `raytf run` and `raytf report` is reported before Ray is imported."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import raytf
from tests.logged import without_status

ROOT = pathlib.Path(raytf.__file__).parents[1]
WRONG = {
    "run nothere.py": "The script must be a file that exists; received: 'nothere.py' (no such file)",
    "run broken.py": "The script must be Python; received: broken.py, line 2: '(' was never closed",
    "run --nworkers 2 look.py": "No such option '--nworkers'. (Did you mean one of: '--network', '--num-workers'?)",
    "run folder": "The script must be a file that exists; received: 'folder' (a folder)",
    "run --num-workers 0 look.py": "num_workers must be an integer of at least 1; received: 0",
    "run --num-ps -1 look.py": "num_ps must be an integer of at least 0; received: -1",
    "run --num-ps 1 --chief look.py": "Parameter servers bring a chief that coordinates",
    "run --ports 20000 look.py": "--ports takes FIRST-LAST, the smaller one first; received: '20000'",
    "run --ports 30000-20000 look.py": "--ports takes FIRST-LAST, the smaller one first; received: '30000-20000'",
    "run --ports 80-20000 look.py": "ports must be the first and the last port of a range within 1024 to 65535",
    "run --cpus-per-worker 0 look.py": "cpus_per_worker must be more than 0",
    "run --cpus-per-worker nan look.py": "cpus_per_worker must be more than 0",
    "run --gpus-per-worker -1 look.py": "gpus_per_worker must be an integer of at least 0",
    "run --max-restarts -1 look.py": "max_restarts must be an integer of at least 0",
    "run --frozen-after -1 look.py": "frozen_after must be at least 0 seconds",
    "run --env NOBODY_SETS_THIS look.py": "--env takes NAME=VALUE",
    "run --module look.py": "received: 'look.py'. Leave out --module for a file",
    "run --module nowhere": "the script is a module that can be imported from the current folder; received: 'nowhere'",
    "run --module package.nothere": "can be imported from the current folder; received: 'package.nothere'",
    "report nothere": "Runs are in a folder that exists; received: 'nothere'",
    "report folder": "A report is about the folder of a run or of a sweep; received: 'folder'",
    "report folder -o nothere/page.html": "The page is written into a folder that exists",
}


# What ends the command afterwards, as Ray is not there.
AFTER_SCRIPT = "run look.py --num-workers 2 --ports=1-2 --epochs 3"


@pytest.fixture
def folder(tmp_path):
    """A user's folder, in which an import of Ray, or of the user's own modules, ends the process in another way."""
    for name in ("ray", "package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.py").write_text("raise SystemExit\nprint((1\n")
    (tmp_path / "look.py").write_text("raise SystemExit('look was imported')")
    return tmp_path


@pytest.mark.sampled(6)
@pytest.mark.parametrize("command", WRONG)
def test_wrong_options_are_reported_before_ray_is_imported(folder, command):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "raytf.cli", *command.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    usage, *_, message = without_status(done.stderr)
    assert done.returncode == 2 and message.startswith("Error: ") and WRONG[command] in message, done.stderr
    assert usage.startswith(f"Usage: python -m raytf.cli {command.split()[0]} ")


def test_what_is_right_is_taken(folder, monkeypatch):
    from raytf.launch.spec import LaunchSpec

    monkeypatch.chdir(folder)
    (folder / "package" / "inner.py").write_text("")
    assert LaunchSpec(script="package.inner", module=True, num_workers=2, cpus_per_worker=0.5).bundle(
        LaunchSpec(script="look.py").tasks()[0]
    ) == {"CPU": 0.5}


def test_options_of_raytf_after_the_script_are_the_scripts_and_a_hint_is_printed(folder):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "raytf.cli", *AFTER_SCRIPT.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    hint, *rest = without_status(done.stderr)
    assert hint.startswith("raytf: --num-workers, --ports after the script: the script receives them")
    assert "epochs" not in hint and rest == ["ray was imported"]
