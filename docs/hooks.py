"""What the site needs beside the pages: the files of the repository that they link to, and the command line.

A link that leaves `docs/` leads to a copy of that file; a dead one fails the build. `reference/cli.md` gets a section
for each command, from click.
"""

from __future__ import annotations

import inspect
import os
import pathlib
import re

import click
from mkdocs.structure.files import File

from raytf.cli import main

_ROOT = pathlib.Path(__file__).parents[1]
_COMMANDS = "<!-- the commands -->"
_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """Path from the repository's root of what a link leads to, or None where that is a page of the site."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
    return None if path.split(os.sep)[0] in ("docs", "..") else path


def _copy(path: str) -> str:
    """Place of a file's copy: pictures as they are, all else as text, which browsers show instead of saving it."""
    return f"repository/{path}" if path.endswith((".svg", ".png")) else f"repository/{path}.txt"


def on_files(files, config):
    wanted = set()
    for file in files.documentation_pages():
        for link in _LINK.finditer(file.content_string):
            if path := _outside(file.src_uri, link["target"]):
                wanted.add(path)
    for path in sorted(wanted):
        if (_ROOT / path).is_file():
            files.append(File.generated(config, _copy(path), abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    def moved(link):
        path = _outside(page.file.src_uri, link["target"])
        if path is None:
            return link[0]
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{_copy(path)})"

    return _LINK.sub(moved, markdown.replace(_COMMANDS, _commands()) if _COMMANDS in markdown else markdown)


def _commands() -> str:
    """A section for each command: how it is called, what it does, and its options."""
    sections = []
    with click.Context(main, info_name="raytf") as group:
        for name, command in sorted(main.commands.items()):
            with click.Context(command, info_name=name, parent=group) as context:
                sections.append(_section(name, command, context))
    return "\n".join(sections)


def _section(name: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    records = [option.get_help_record(context) for option in command.get_params(context)]
    rows = [f"| `{names}` | {_cell(text)} |" for names, text in filter(None, records)]
    about = inspect.cleandoc(command.help or "")
    head = [f"## raytf {name}", f"```text\nraytf {name} {usage}\n```", about.replace("<", "&lt;")]
    return "\n\n".join([*head, "\n".join(["| option | what it does |", "|---|---|", *rows])]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;").replace("<", "&lt;").replace("[", "\\[")
