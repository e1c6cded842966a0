"""Writes signatures and docstrings of public names into `reference/api.md`, as Markdown that GitHub shows.

    python docs/api.py

`make docs` does it first; a test fails if the page is not current. On the site mkdocstrings shows the same docstrings.
"""

from __future__ import annotations

import doctest
import enum
import inspect
import pathlib
import pkgutil
import re
import textwrap

from generated import API, api_part, members_of

PAGE = pathlib.Path(__file__).parent / "reference" / "api.md"
_WIDTH = 130
_HEADER = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example):$", re.MULTILINE)
_TITLES = {"Args": "Arguments"}
_ITEM = re.compile(r"(?P<name>[*\w., ]+): (?P<text>.*)", re.DOTALL)


def _parameter(parameter: inspect.Parameter) -> str:
    annotation, default = parameter.annotation, parameter.default
    text = str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
    if annotation is not parameter.empty:
        text += f": {annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)}"
    if default is parameter.empty:
        return text
    value = f'"{default}"' if isinstance(default, str) else getattr(default, "__name__", repr(default))
    value = "..." if value.startswith("<") else value  # made by a call, such as the present time
    return f"{text} = {value}" if annotation is not parameter.empty else f"{text}={value}"


def _signature(name: str, shown) -> str:
    """The call, with a line for each parameter where it is long; "" for what has none of its own."""
    inherited = isinstance(shown, type) and (issubclass(shown, enum.Enum) or shown.__init__ is Exception.__init__)
    if isinstance(shown, property) or inherited:
        return ""
    signature = inspect.signature(shown)
    parameters, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            parameters.append("*")
        kind = parameter.kind
        parameters.append(_parameter(parameter))
    returned = signature.return_annotation
    arrow = "" if isinstance(shown, type) or returned is signature.empty else f" -> {returned}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) > 100:
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        line = f"{name}(\n{lines}){arrow}"
    return f"```python\n{line}\n```\n\n"


def _filled(text: str, indent: str = "") -> str:
    """Paragraphs in lines of one width; lists stay as they are."""
    wrap = textwrap.TextWrapper(_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(
        paragraph if re.match(r" *[*-] ", paragraph) else wrap.fill(" ".join(paragraph.split()))
        for paragraph in text.strip().split("\n\n")
    )


def _items(text: str) -> str:
    """A list of the names that a section describes."""
    items = re.split(r"\n(?=\S)", textwrap.dedent(text).strip("\n"))
    found = []
    for item in items:
        match = _ITEM.fullmatch(item)
        names = ", ".join(f"`{name}`" for name in match["name"].split(", "))
        text = _filled(f"{names}: {match['text']}", "  ")
        found.append(f"* {text}\n")
    return "".join(found)


def _example(text: str) -> str:
    """The lines of an example without prompts, and what they print as comments."""
    lines = ""
    for example in doctest.DocTestParser().get_examples(textwrap.dedent(text)):
        is_block = example.source.count("\n") > 1 and example.source.startswith(("def ", "class "))
        lines += f"\n{example.source}\n" if is_block else example.source
        lines += "".join(f"# {line}\n" for line in example.want.splitlines())
    return f"```python\n{lines.strip()}\n```\n"


def _docstring(text: str) -> str:
    """A docstring of Google's style."""
    description, *sections = _HEADER.split(text)
    found = _filled(description) + "\n"
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title == "Example":
            found += f"\n{_example(body)}"
        elif title in ("Returns", "Yields"):
            found += f"\n**{title}:** {_filled(textwrap.dedent(body))}\n"
        else:
            found += f"\n**{_TITLES.get(title, title)}:**\n\n{_items(body)}"
    return found


def _section(name: str, member: str = "") -> str:
    """A heading, the call and the docstring of a public name, or of a member of it."""
    path = f"{name}.{member}" if member else name
    shown = pkgutil.resolve_name(path)
    assert shown.__doc__, f"{path} has no docstring"
    call = f"{name.rpartition('.')[2]}.{member}" if member else name
    head = "####" if member else "###"
    return f"{head} {call}\n\n{_signature(call, shown)}{_docstring(inspect.cleandoc(shown.__doc__))}"


def written(page: str) -> str:
    """The page with the present docstrings, between the comments of each name."""

    def part(found):
        members = [_section(found["name"], member) for member in members_of(found)]
        return api_part(found, "\n".join([_section(found["name"]), *members]))

    return API.sub(part, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
