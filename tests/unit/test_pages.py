"""Files, options and targets that the pages name are there: a page that is wrong sends its reader astray."""

from __future__ import annotations

import pathlib
import re
import subprocess

import click
import pytest

from raytf.cli import main

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/README.md", "cluster/RAY.md"]
FOLDERS = ("raytf", "jobs", "tests", "cluster")


def tracked():
    """Files of the checkout by name, without what was built or installed beside them."""
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {p.name for p in ROOT.iterdir()}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    shown = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
    assert not [path for path in shown if not (ROOT / path).exists()]
    names = re.findall(r"`([\w-]+\.(?:py|md|toml|txt|yaml|svg))`", text)
    assert not set(names) - tracked() - {"train.py"}


def test_options_that_the_readme_names_exist():
    """Of `raytf`; those of Ray's own commands stand in lines of theirs."""
    known = {option for command in main.commands.values() for p in command.params for option in p.opts}
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if not line.startswith("ray start")]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "\n".join(lines)))
    of_others = {"--help", "--address", "--working-dir", "--generate", "--plans"}
    assert named - known <= of_others
    commands = set(re.findall(r"`raytf ([a-z]+)", "\n".join(lines)))
    assert commands and commands <= main.commands.keys() and isinstance(main, click.Group)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_targets_that_a_page_names_exist(page):
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named
    for target in named:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
