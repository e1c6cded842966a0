"""What is installed is what is in the checkout: the wheel holds all of raytf, and runs without the checkout."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile

import pytest

from tests import blocks

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]


def run(*command, cwd, **variables):
    """What a command prints, without the checkout on the path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def files_of(folder):
    """Files of the package, as a wheel names them."""
    found = (path for path in (folder / "raytf").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as a build leaves files next to pyproject.toml; with this environment's setuptools."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "raytf", source / "raytf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", built, source, cwd=built)
    (made,) = built.glob("raytf-*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The bin folder of a fresh environment with the wheel; TensorFlow, Ray and the rest are those of this one."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=place)
    (site,) = (place / "lib").glob("python*/site-packages")
    places = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # After the wheel on the path; the checkout's own .pth file is read in no folder that is added so.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in places))
    return place / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert inside == files_of(ROOT)
    assert "raytf/py.typed" in inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_the_wheel_runs_without_the_checkout(environment, tmp_path):
    place = run(environment / "python", "-c", "import raytf; print(raytf.__file__)", cwd=tmp_path)
    assert pathlib.Path(place.strip()).is_relative_to(environment.parent)
    shown = run(environment / "raytf", "--help", cwd=tmp_path)
    for command in ("train", "sweep", "run", "plan", "report"):
        assert re.search(rf"^  {command} ", shown, re.MULTILINE), shown

    example = blocks.named("README.md", "fit").text
    assert "raytf.fit(" in example
    (tmp_path / "example.py").write_text(example)
    with tempfile.TemporaryDirectory(prefix="raytf", ignore_cleanup_errors=True) as short:  # for Ray's sockets
        out = run(environment / "python", "example.py", cwd=tmp_path, RAY_TMPDIR=short, HOME=str(tmp_path))
    losses, *_ = re.findall(r"^\[(.*?)\] \[\[", out, re.MULTILINE)
    assert len(losses.split(",")) == 5, out
