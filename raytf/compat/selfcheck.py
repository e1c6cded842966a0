"""The check of versions that are not in the table: whether what is private is where it was, and has the same shape."""

from __future__ import annotations

import importlib
import pathlib

from raytf.compat import names, signatures, versions
from raytf.errors import UnsupportedVersionError

_ROOT = pathlib.Path(__file__).parents[1]


def import_all() -> None:
    """Imports the modules of raytf that say replacements or overrides."""
    for file in sorted(_ROOT.rglob("*.py")):
        text = file.read_text()
        if file.stem != "__main__" and ("\n@patch(" in text or "    @overrides(" in text):
            importlib.import_module(".".join(("raytf", *file.relative_to(_ROOT).with_suffix("").parts)))


def differences() -> list[str]:
    """What of the installed versions is not as in those that are tested, a clause each; [] where raytf fits them.

    Replacements and overrides are looked at as far as the modules that say them were imported.
    """
    return [*names.unresolved(names.listed()), *signatures.changed(strict=False)]


def refuse(found: list[str]) -> None:
    """Raises UnsupportedVersionError if anything was found."""
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise UnsupportedVersionError(
            f"raytf is tested with {versions.tested()}, and does not fit {versions.shown(versions.untested())}: "
            f"{'; '.join(found[:3])}{more}. Install versions that are tested; `python -m raytf.compat` lists it all."
        )


def explain(error: ImportError) -> None:
    """Raises UnsupportedVersionError for an import of what a version that is not tested has elsewhere."""
    if error.name is not None and names.is_private(error.name) and versions.untested():
        try:
            refuse([str(error)])
        except UnsupportedVersionError as explained:
            raise explained from error


def warning() -> str:
    """The line that says that versions are used which are not tested."""
    return (
        f"raytf: {versions.shown(versions.untested())} is not tested with raytf ({versions.tested()} are); it was "
        "checked here, and training continues"
    )
