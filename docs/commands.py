"""Writes the options of each command into `reference/cli.md`, as `raytf COMMAND --help` prints them.

    python docs/commands.py

`make docs` does it first; a test fails if the page is not current.
"""

from __future__ import annotations

import copy
import pathlib

import click
from generated import filled

from raytf.cli import main

PAGE = pathlib.Path(__file__).parent / "reference" / "cli.md"


def sections() -> str:
    """A section for each command with its help, in the order of their names."""
    found = []
    width = main.context_settings["max_content_width"]
    with click.Context(main, info_name="raytf", **main.context_settings) as group:
        for name, original in sorted(main.commands.items()):
            command = copy.copy(original)
            command.add_help_option = False  # click keeps the one of the first context that wants it
            settings = command.context_settings | {"terminal_width": width}  # not that of the terminal
            with click.Context(command, info_name=name, parent=group, **settings) as context:
                found.append(f"## raytf {name}\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(found)


def written(page: str) -> str:
    """The page with the present options, between its two comments."""
    return filled(page, "commands.py", sections())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
