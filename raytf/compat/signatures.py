"""Signatures of the private functions and classes that raytf calls, replaces or overrides, against those recorded."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable

from raytf.compat import names, patching
from raytf.compat.recorded import SIGNATURES

# Ray gives it to the methods of a class that has become an actor's in this process.
_OF_ACTORS = "_ray_trace_ctx"


def shown(function: Callable) -> str | None:
    """Names, kinds and defaults of parameters: "(self, x, y=, *, z=, **more)"; None of what has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return f"({', '.join(_shown([one for one in parameters if one.name != _OF_ACTORS]))})"


def _shown(parameters: list[inspect.Parameter]) -> Iterable[str]:
    starred = False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            starred = True
        elif one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        yield f"{star}{one.name}{'=' if one.default is not one.empty else ''}"


def current() -> dict[str, str]:
    """The signatures of all that is touched and can be called, by path."""
    paths = [name.path for name in names.listed()]
    paths += [one.path for one in (*patching.replacements(), *patching.overridden())]
    ours = [one.function for one in patching.replacements()]
    found = {}
    for path in dict.fromkeys(paths):
        try:
            value = names.resolve(path)
        except (ImportError, AttributeError):
            continue
        signature = None if inspect.unwrap(value) in ours else _of(value)  # what raytf has added itself has none
        if signature is not None:
            found[path] = signature
    return found


def _of(value: object) -> str | None:
    # each Python has another one for the kinds of classes that raytf only compares with
    if not callable(value) or (isinstance(value, type) and issubclass(value, (BaseException, enum.Enum))):
        return None
    return shown(inspect.unwrap(value))


def changed(strict: bool = True) -> list[str]:
    """What is not as recorded, a clause each.

    Args:
        strict: any difference; else a new parameter that has a default is none, unless raytf replaces or overrides the
            function: its own would not know it.
    """
    exact = {one.path for one in (*patching.replacements(), *patching.overridden())}
    found = []
    for path, signature in current().items():
        known = SIGNATURES.get(path, ())
        if signature in known or (not strict and path not in exact and _fits(signature, known)):
            continue
        found.append(f"{path} has {signature}, not {' or '.join(known) or 'recorded'}")
    return found


def _fits(signature: str, known: Iterable[str]) -> bool:
    """Whether calls that fit one of the known signatures fit another."""
    now = _parts(signature)
    for one in known:
        before = _parts(one)
        kept = [part for part in now if part in before]
        added = [part for part in now if part not in before]
        if kept == before and all(part.endswith("=") or part.startswith("*") for part in added):
            return True
    return False


def _parts(signature: str) -> list[str]:
    return [part for part in signature[1:-1].split(", ") if part]
