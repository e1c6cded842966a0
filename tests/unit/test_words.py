"""Docstrings, comments and names of raytf use the words that one searches for; see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
BANNED = {
    "told": "sent, reported, known",
    "tells?": "sends, reports",
    "anew": "again, from scratch",
    "goes on": "continues, resumes",
    "go on": "continue, resume",
    "went on": "continued, resumed",
    "stands?": "is, is stored",
    "lies?": "is, is stored",
    "behind": "after",
    "beside": "in addition to, next to",
    "whoever": "the process that",
    "in the place of": "instead of",
    "takes? the place": "replaces",
    "hears?": "receives",
    "said": "logged, given",
    "says": "logs, returns, contains",
}
PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
# Names of locals, functions and classes: pronouns, adverbs and prepositions.
NO_NAMES = {
    "its",
    "anew",
    "here",
    "there",
    "mine",
    "theirs",
    "ours",
    "told",
    "around",
    "beside",
    "behind",
    "within",
    "apart",
}
# Rooms that are not rewritten so far.
NOT_YET = {
    "activity",
    "errors",
    "liveness",
    "timeouts",
    "collectives",
    "compat",
    "console",
    "data",
    "doctor",
    "fitting",
    "identity",
    "launch",
    "parallel",
    "runtime",
    "train",
    "tune",
    "worker",
}
FILES = sorted(FOLDER.rglob("*.py"))


def room(path: pathlib.Path) -> str:
    return path.relative_to(FOLDER).parts[0].removesuffix(".py")


@functools.cache
def texts(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, text) of each docstring and comment."""
    source = path.read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            found.append((getattr(node, "lineno", 1), text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string))
    return found


def better(word: str) -> str:
    return next(words for banned, words in BANNED.items() if re.fullmatch(banned, word, re.IGNORECASE))


def wrong(path: pathlib.Path) -> list[str]:
    name = path.relative_to(FOLDER).as_posix()
    lines = [
        f"{name}:{line}: {hit.group()!r}; one searches for: {better(hit.group())}"
        for line, text in texts(path)
        for hit in PATTERN.finditer(text)
    ]
    for node in ast.walk(ast.parse(path.read_text())):
        named = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named = node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named = node.name
        if named is not None and named.strip("_") in NO_NAMES:
            lines.append(f"{name}:{node.lineno}: {named!r} names nothing")
    return lines


@pytest.mark.parametrize("path", [f for f in FILES if room(f) not in NOT_YET], ids=lambda f: f.name)
def test_words(path):
    assert not wrong(path), "\n".join(wrong(path))


def test_rooms_that_are_rewritten_are_tested():
    """A room leaves the list when it has no such word."""
    clean = {name for name in NOT_YET if not any(wrong(f) for f in FILES if room(f) == name)}
    assert not clean, f"remove from NOT_YET: {sorted(clean)}"
