"""Docstrings, comments and names of raytf, and texts of its tests and jobs, use standard terms; see CONTRIBUTING.md."""

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
# Code in a text, and the names of arguments.
NAMES = re.compile(r"`[^`]*`|^ *\w+(?=:)", re.MULTILINE)
PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
# Names of locals, parameters, attributes, functions and classes: pronouns, adverbs and prepositions.
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
    name = path.relative_to(FOLDER.parent).as_posix()
    return [
        f"{name}:{line}: {hit.group()!r}; one searches for: {better(hit.group())}"
        for line, text in texts(path)
        for hit in PATTERN.finditer(NAMES.sub("", text))
    ]


def vague(path: pathlib.Path) -> set[tuple[str, str]]:
    """(room, name) of each name that names nothing."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id.strip("_"))
        elif isinstance(node, ast.arg):
            found.add(node.arg.strip("_"))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr.strip("_"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name.strip("_"))
    return {(room(path), name) for name in found & NO_NAMES}


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_words(path):
    assert not wrong(path), "\n".join(wrong(path))


@pytest.mark.parametrize("folder", ["tests", "jobs"])
def test_words_of_tests_and_jobs(folder):
    found = [line for path in sorted((FOLDER.parent / folder).rglob("*.py")) for line in wrong(path)]
    assert not found, "\n".join(found)


def test_names_of_tests():
    found = []
    for path in sorted((FOLDER.parent / "tests").rglob("test_*.py")):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found += [n for n in names if n.startswith("test_") and PATTERN.search(n.replace("_", " "))]
    assert not found, "\n".join(found)


def test_names_name_something():
    found = {pair for path in FILES for pair in vague(path)}
    assert not found, f"pronouns, adverbs and prepositions: {sorted(found)}"
