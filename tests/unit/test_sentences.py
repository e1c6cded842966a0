"""Sentences of docstrings and pages have at most 20 words."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import raytf

FOLDER = pathlib.Path(raytf.__file__).parent
ROOT = pathlib.Path(__file__).parents[2]
MOST = 20
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Where a sentence of a docstring begins on a line of its own: an argument, an item, a heading such as "Args:".
BEGINS = re.compile(r"\*?\*?[\w.]+( \([^)]*\))?: |[*-] |\d+\. |\w+:$")
# Pages that scripts write from docstrings and messages.
GENERATED = {"docs/reference/api.md", "docs/reference/cli.md", "docs/reference/errors.md"}
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = [p for p in [*TEXTS, *sorted((ROOT / "docs").rglob("*.md"))] if p.relative_to(ROOT).as_posix() not in GENERATED]


def paragraphs(text: str, page: bool) -> Iterator[str]:
    """Returns prose without code: paragraphs, items of lists, arguments, and cells of tables."""
    lines: list[str] = []
    in_code = False
    for line in [*map(str.strip, text.splitlines()), ""]:
        fence = line.startswith("```")
        in_code ^= fence
        no_prose = fence or in_code or not line or line.startswith((">>>", "|", "<!--", "#") if page else ">>>")
        if lines and (no_prose or re.match(r"[*-] |\d+\. ", line) or (not page and BEGINS.match(line))):
            yield " ".join(lines)
            lines = []
        if line.startswith("|") and not in_code:
            yield from (cell.strip() for cell in line.strip("|").split("|"))
        elif not no_prose:
            lines.append(line)


def long_sentences(text: str, page: bool = False) -> list[str]:
    """Returns the sentences of more than `MOST` words; code between backticks counts as a word."""
    found = []
    for paragraph in paragraphs(text, page):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "X", paragraph))
        for sentence in re.split(r"(?<=[.!?])\s+", plain):
            if len([word for word in sentence.split() if re.search(r"\w", word)]) > MOST:
                found.append(sentence)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_docstrings_have_short_sentences(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
    found = [long_sentences(ast.get_docstring(node, clean=False) or "") for node in nodes]
    assert not any(found), f"split these: {[sentence for sentences in found for sentence in sentences]}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_have_short_sentences(path):
    found = long_sentences(path.read_text(), page=True)
    assert not found, f"split these: {found}"


def test_what_is_a_sentence():
    words = "word " * MOST
    assert long_sentences(f"{words}more.") == [f"{words}more."] and not long_sentences(f"{words.strip()}. more words")
    assert not long_sentences(f"Args:\n    x: {words[5:]}\n    y: more\n\n    {words}\n    >>> {words} {words}")
    assert long_sentences(f"# {words} more\n\n| {words} more | x |\n\n```\n{words} {words}\n```", page=True)
    assert not long_sentences(f"`{words} {words}` and [{'word ' * 9}]({words})", page=True)
