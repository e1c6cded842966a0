"""Each message that a run can print is listed in the troubleshooting page, by its text."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
PAGE = FOLDER.parent / "docs" / "troubleshooting.md"
# What is called with a message for the user.
CALLS = {"_print", "_log", "warn", "print", "info", "warning", "error", "exception"}
# What these print is the answer to a command, a table, or the output of others.
ANSWERS = {
    "cli.py": "the output of commands",
    "console/output.py": "passes on what it is given",
    "console/progress.py": "progress lines",
    "doctor/examination.py": "findings, each with its fix",
    "train/results.py": "the result of a run",
    "tune/table.py": "the table of a sweep",
}
# Shorter ones are the glue between what is filled in.
LEAST_LETTERS = 10


def _literals(node: ast.expr) -> list[str]:
    """The parts of a text that are written out, as far as they can be read."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp):
        return _literals(node.left) + _literals(node.right)
    return []


def messages():
    """(place, the longest written part) of each message in the source."""
    for path in sorted(FOLDER.rglob("*.py")):
        name = path.relative_to(FOLDER).as_posix()
        if name in ANSWERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called not in CALLS:
                continue
            parts = [part for argument in node.args for part in _literals(argument)]
            longest = max(parts, key=len, default="").strip(" .:;,()'\n")
            if len(longest) >= LEAST_LETTERS:
                yield f"raytf/{name}:{node.lineno}", longest


def _plain(text: str) -> str:
    """Without marks of Markdown, with single spaces."""
    return re.sub(r"\s+", " ", text.replace("`", ""))


@pytest.mark.parametrize("answered", ANSWERS)
def test_files_that_print_answers_are_there(answered):
    assert (FOLDER / answered).is_file()


def test_each_message_is_in_the_troubleshooting_page():
    page = _plain(PAGE.read_text())
    found = list(messages())
    assert len(found) > 50
    missing = [f"{place}: {text}" for place, text in found if _plain(text) not in page]
    assert not missing, "add to docs/troubleshooting.md, with what it means and what to do:\n" + "\n".join(missing)
