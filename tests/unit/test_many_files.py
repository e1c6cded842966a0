"""A process with more than 1,024 open files keeps checkpoints, and tries models, as any other. No Ray."""

import contextlib
import os
import pathlib
import resource
import subprocess
import sys

import pyarrow.fs
import pytest

from raytf.storage.snapshots import SnapshotWriter
from raytf.storage.step_folders import folder_name
from raytf.train import dry_run
from tests.unit.test_snapshots import check, is_gone, parts_of
from tests.waiting import until


@pytest.fixture
def many_files():
    """In the test the next file that is opened has a number above 1,023."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 1400:
        pytest.skip("this user may not open so many")
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1400), before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        while True:
            number = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, number)
            if number > 1100:
                break
        yield


def test_a_checkpoint_is_kept(many_files, tmp_path):
    writer = SnapshotWriter(pyarrow.fs.LocalFileSystem(), str(tmp_path / "run"))
    try:
        writer.write(folder_name(1), parts_of(1))
        writer.finish(60.0)
    finally:
        writer.close()
    until(lambda: is_gone(writer.pid))
    check(tmp_path / "run" / folder_name(1), 1)


def test_a_model_is_tried(many_files):
    assert dry_run._in_a_copy(lambda: "tried") == "tried"


def test_a_call_that_takes_no_such_file_is_refused_by_the_lint(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    module = tmp_path / "module.py"
    module.write_text("import select\n\nselect.select([], [], [], 0.0)\n")
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--config",
        str(root / "pyproject.toml"),
        str(module),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "TID251" in done.stdout, done.stdout + done.stderr
