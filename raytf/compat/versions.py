"""Versions of Ray, Keras and TensorFlow: tested ones, and installed ones.

`tests/unit/compat` checks the private names that raytf uses.
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
def installed_version(package: str) -> str:
    """Imports a package, and returns its version."""
    return importlib.import_module(package).__version__


def at_least(package: str, *version: int) -> bool:
    """Returns whether the installed version is at least the given one.

    Args:
        package: "ray", "keras" or "tensorflow".
        version: Major, minor.
    """
    return _minor(installed_version(package)) >= version


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def untested_versions() -> dict[str, str]:
    """Returns installed versions that are not in `TESTED`, by package."""
    versions = {package: installed_version(package) for package in TESTED}
    return {p: v for p, v in versions.items() if ".".join(v.split(".")[:2]) not in TESTED[p]}


def describe_versions(installed: dict[str, str]) -> str:
    """Returns packages with versions, as a clause."""
    return ", ".join(f"{package} {version}" for package, version in installed.items())


def describe_tested() -> str:
    """Returns the tested versions, as a clause."""
    return ", ".join(f"{package} {versions[0]} to {versions[-1]}" for package, versions in TESTED.items())


def uses_private(*paths: str, added_in: tuple | None = None) -> Callable:
    """Declares the private names that a function uses, for the tests; its docstring states the purpose.

    Args:
        paths: "module:attribute", or "module:Class.attribute" for attributes of a class' objects.
        added_in: ("ray", 2, 60): the first version that has them.
    """

    def keep(function):
        return function

    return keep


def misfit_error(difference: str) -> UnsupportedVersionError:
    """Returns the error for a misfit of the installed versions, given as a clause."""
    return UnsupportedVersionError(
        f"raytf is tested with {describe_tested()}, and does not fit {describe_versions(untested_versions())}: "
        f"{difference}. Install versions that are tested."
    )


def explain_import_error(error: ImportError) -> None:
    """Raises UnsupportedVersionError for an import that failed because an untested version has moved its target."""
    if error.name is not None and "." in error.name and error.name.split(".")[0] in TESTED and untested_versions():
        raise misfit_error(str(error)) from error


def untested_warning() -> str:
    """Returns the warning about untested versions."""
    clause = describe_versions(untested_versions())
    return (
        f"{clause} is not tested with raytf ({describe_tested()} are). "
        "It was checked here, and training continues. Install tested versions to be sure"
    )
