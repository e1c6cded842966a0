"""Files of AutoGraph: none is left, and those of a killed process go with the next one. No Ray."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import pytest
import tensorflow as tf

from raytf.storage import autograph_files, scratch


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def convert():
    """What a function gives that AutoGraph converts."""
    return tf.autograph.to_graph(_some)(tf.constant(3))


def _some(x):
    if x > 0:
        x = x * 2
    return x


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.py"))


def test_files_are_removed_behind(temporary):
    with autograph_files.removed(), autograph_files.removed():
        assert int(convert()) == 6
        (found,) = files(temporary)
        assert found.startswith("__autograph_generated_file") and found not in os.listdir(temporary)
    assert not os.listdir(temporary)


CHILD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from raytf.storage import autograph_files
from tests.unit import test_autograph_files as tests
with autograph_files.removed():
    tests.convert()
    print("written", flush=True)
    sys.stdin.read()
"""


def test_those_of_a_killed_process_go_with_the_next_one(temporary):
    command = [sys.executable, "-c", CHILD, str(temporary)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "written\n" and files(temporary)
    assert scratch.clean() == 0, "it lives"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert scratch.clean() == 1 and not os.listdir(temporary)
