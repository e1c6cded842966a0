"""Files, commands, options and targets that the pages name are there: a page that is wrong sends its reader astray."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess

import click
import pytest

from raytf.cli import main
from tests import blocks

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*blocks.pages(), "CHANGELOG.md"]
FOLDERS = ("raytf", "jobs", "tests", "cluster", "docs")
# Files that are named in an example, or that a run writes.
EXAMPLES = {"train.py", "mymodels.py", "model_def.py", "run.py", "dist_mnist.py", "mnist_utils.py", "simple.yaml"}


def tracked():
    """Returns files of the checkout by name, without what was built or installed next to them."""
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {p.name for p in ROOT.iterdir()}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    if page == "CHANGELOG.md":  # of older versions it names what was there
        text = text.partition("## [0.1.0]")[0]
    shown = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
    assert not [path for path in shown if not (ROOT / path).exists()]
    names = re.findall(r"`([\w-]+\.(?:py|md|toml|txt|yaml|svg))`", text)
    assert not set(names) - tracked() - EXAMPLES


@pytest.mark.parametrize("page", blocks.pages())
def test_commands_and_options_that_a_page_names_exist(page):
    """In the text, in `code`; blocks are parsed by `test_docs.py`."""
    text = blocks.prose(page)
    for command in re.findall(r"`raytf ([a-z][^`]*)`", text):
        name, *rest = command.split()
        assert name in main.commands and isinstance(main, click.Group), command
        known = {option for p in main.commands[name].params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        words_of_raytf = itertools.takewhile(lambda word: not word.endswith(".py"), rest)
        assert {word for word in words_of_raytf if word.startswith("--")} <= known, command


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_targets_that_a_page_names_exist(page):
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named
    for target in named:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
