"""The part of a page that a script writes, between two comments."""

from __future__ import annotations


def filled(page: str, script: str, text: str) -> str:
    """The page with this text after the comment that names the script, up to the comment of its end."""
    begin, end = f"<!-- python docs/{script} writes this -->", "<!-- to here -->"
    head, has_begin, remaining = page.partition(begin)
    _, has_end, tail = remaining.partition(end)
    assert has_begin and has_end, f"the page has no {begin} and {end}"
    return f"{head}{begin}\n\n{text}\n{end}{tail}"
