"""Versions of Ray, Keras and TensorFlow: those that the tests run with, and those that are installed.

What raytf uses of them that is not public is checked by `tests/unit/compat`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from raytf.errors import UnsupportedVersionError

# `make compat` runs the oldest and the newest of each, and two mixed sets; see `docs/reference/versions.md`.
TESTED = {
    "ray": ("2.57", "2.58", "2.59", "2.60"),
    "keras": ("3.12", "3.13", "3.14", "3.15"),
    "tensorflow": ("2.20", "2.21"),
}


@functools.cache
def installed(package: str) -> str:
    """The version of a package, which is imported for that."""
    return importlib.import_module(package).__version__


def at_least(package: str, *version: int) -> bool:
    """Whether the installed version is this one or a later one.

    Args:
        package: "ray", "keras" or "tensorflow".
        version: major, minor.
    """
    return _minor(installed(package)) >= version


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def untested(*packages: str) -> dict[str, str]:
    """Installed versions that are not in `TESTED`, by package; of all packages, or of these."""
    found = {package: installed(package) for package in packages or TESTED}
    return {p: v for p, v in found.items() if ".".join(v.split(".")[:2]) not in TESTED[p]}


def shown(found: dict[str, str]) -> str:
    """Packages with versions, in a clause."""
    return ", ".join(f"{package} {version}" for package, version in found.items())


def tested() -> str:
    """What the tests run with, in a clause."""
    return ", ".join(f"{package} {versions[0]} to {versions[-1]}" for package, versions in TESTED.items())


def uses(*paths: str, since: tuple | None = None, until: tuple | None = None) -> Callable:
    """Says which private names a function touches, for the tests; its docstring says what for.

    Args:
        paths: "module:attribute", or "module:Class.attribute" for what objects of a class have.
        since, until: ("ray", 2, 60): the first version that has them, the first that has not.
    """

    def keep(function):
        return function

    return keep


def misfit(found: str) -> UnsupportedVersionError:
    """Returns the error for what does not fit the installed versions, a clause."""
    return UnsupportedVersionError(
        f"raytf is tested with {tested()}, and does not fit {shown(untested())}: {found}. "
        "Install versions that are tested."
    )


def explain(error: ImportError) -> None:
    """Raises UnsupportedVersionError for an import of what a version that is not tested has elsewhere."""
    if error.name is not None and "." in error.name and error.name.split(".")[0] in TESTED and untested():
        raise misfit(str(error)) from error


def warning() -> str:
    """The line that says that versions are used which are not tested."""
    found = shown(untested())
    return f"raytf: {found} is not tested with raytf ({tested()} are); it was checked here, and training continues"
