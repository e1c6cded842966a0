"""`python -m tests.unit.compat`: every private name and every replacement, and whether they are as recorded.

`--record` writes the signatures of the installed versions next to those that are known.
"""

from __future__ import annotations

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click

from raytf.compat import patching, versions
from tests.unit.compat import names, recorded, signatures


def write(found: dict[str, str], path: str) -> None:
    """Adds signatures to those that are recorded in a file."""
    both = {key: tuple(dict.fromkeys((*recorded.SIGNATURES.get(key, ()), value))) for key, value in found.items()}
    both = recorded.SIGNATURES | both
    lines = [f'"""{recorded.__doc__}"""', "", "# ruff: noqa: E501", "", "SIGNATURES: dict[str, tuple[str, ...]] = {"]
    for key in sorted(both):
        lines.append(f'    "{key}": (')
        lines += [f'        "{one}",' for one in both[key]]
        lines.append("    ),")
    pathlib.Path(path).write_text("\n".join([*lines, "}", ""]))


@click.command(help=__doc__)
@click.option("--record", is_flag=True, help="Add the signatures of what is installed to recorded.py.")
def main(record: bool) -> None:
    found = names.listed()
    names.import_all()
    if record:
        write(signatures.current(), recorded.__file__)
        return
    wrong = [*names.unresolved(found), *signatures.changed()]
    installed = {package: versions.installed_version(package) for package in versions.TESTED}
    click.echo(f"{versions.describe_versions(installed)}; tested with {versions.describe_tested()}\n")
    click.echo(f"Replacements ({len(patching.replacements())})")
    for one in patching.replacements():
        click.echo(f"  {one.path}\n      {_first(one.function)}")
    click.echo(f"\nOverrides of methods that are called by name ({len(patching.overridden())})")
    for one in patching.overridden():
        click.echo(f"  {one.path}")
    click.echo(f"\nPrivate names ({len(found)})")
    for name in found:
        click.echo(f"  {name.path}  [{name.place}]\n      {name.why}")
    click.echo("\nAll are where they should be." if not wrong else "\nNot as recorded:\n  " + "\n  ".join(wrong))
    sys.exit(bool(wrong))


def _first(function) -> str:
    return (function.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip()


if __name__ == "__main__":
    main()
