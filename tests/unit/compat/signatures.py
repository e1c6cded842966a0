"""Signatures of the private functions and classes that raytf calls, replaces or overrides, against those recorded."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable

from raytf.compat import patching
from tests.unit.compat import names
from tests.unit.compat.recorded import SIGNATURES

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
    functions = [one.function for one in patching.replacements()]
    found = {}
    for path in dict.fromkeys(paths):
        try:
            value = names.resolve(path)
        except (ImportError, AttributeError):
            continue
        signature = None if inspect.unwrap(value) in functions else _of(value)  # what raytf has added itself has none
        if signature is not None:
            found[path] = signature
    return found


def _of(value: object) -> str | None:
    # each Python has another one for the kinds of classes that raytf only compares with
    if not callable(value) or (isinstance(value, type) and issubclass(value, (BaseException, enum.Enum))):
        return None
    return shown(inspect.unwrap(value))


def changed() -> list[str]:
    """What is not as recorded, a clause each."""
    found = {path: (signature, SIGNATURES.get(path, ())) for path, signature in current().items()}
    return [f"{path} has {s}, not {' or '.join(k) or 'recorded'}" for path, (s, k) in found.items() if s not in k]
