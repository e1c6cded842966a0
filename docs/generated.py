"""The parts of pages that scripts write, between two comments."""

from __future__ import annotations

import re

_END = "<!-- to here -->"


def filled(page: str, script: str, text: str) -> str:
    """The page with this text after the comment that names the script, up to the comment of its end."""
    begin = f"<!-- python docs/{script} writes this -->"
    head, has_begin, remaining = page.partition(begin)
    _, has_end, tail = remaining.partition(_END)
    assert has_begin and has_end, f"the page has no {begin} and {_END}"
    return f"{head}{begin}\n\n{text}\n{_END}{tail}"


# What `api.py` writes: a comment with a public name and the members that are shown with it, and the text up to the end.
API = re.compile(
    rf"(?P<begin><!-- python docs/api\.py writes (?P<name>[\w.]+)(?: with (?P<members>[\w, ]+))? -->)\n.*?{_END}\n",
    re.DOTALL,
)


def members_of(part: re.Match) -> list[str]:
    """The members that a part of the API page shows."""
    return part["members"].split(", ") if part["members"] else []


def api_part(part: re.Match, text: str) -> str:
    """The part with this text between its comments."""
    return f"{part['begin']}\n\n{text}\n{_END}\n"


def directive(part: re.Match) -> str:
    """The part as a directive of mkdocstrings, which renders the same docstrings for the site."""
    return f"::: {part['name']}\n    options: {{members: [{', '.join(members_of(part))}]}}\n"
