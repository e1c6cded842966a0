"""Replacements in Keras and TensorFlow: declared at their concept (`@patch`), installed together (`install`).

`patched` replaces an attribute for a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class FunctionPatch:
    """A function that replaces another one; or a method that overrides another one, which is not installed.

    Args:
        owner: Class or module of the attribute.
        name: Name of the attribute.
        function: function(original, *arguments); its docstring begins with the reason.
    """

    owner: Any
    name: str
    function: Callable

    @property
    def path(self) -> str:
        """Returns "module:Class.name"."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}:{self.name}"

    def install(self) -> None:
        """Installs it; the original is its first argument from then on."""
        original = getattr(self.owner, self.name, None)  # None for a new attribute
        setattr(self.owner, self.name, replacing(original, self.function))


def replacing(original: Callable | None, function: Callable) -> Callable:
    """Returns a function that calls `function(original, *arguments)`, with the original's name and docstring."""

    @functools.wraps(original or function)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


_warned_patches: list[FunctionPatch] = []
_replaced: list[FunctionPatch] = []


def patch(*targets: tuple[Any, str]) -> Callable[[Callable], Callable]:
    """Declares that a function replaces others after `install`.

    Args:
        targets: (class or module, name of the attribute) of each; the function gets its original as first argument.
    """

    def keep(function: Callable) -> Callable:
        _warned_patches.extend(FunctionPatch(owner, name, function) for owner, name in targets)
        return function

    return keep


def replacements() -> list[FunctionPatch]:
    """Returns all replacements that imported modules declare, installed or not."""
    return list(_warned_patches)


def install() -> None:
    """Installs all declared replacements in this process, each once."""
    for replacement in _warned_patches:
        if replacement not in _replaced:
            _replaced.append(replacement)
            replacement.install()


@contextlib.contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[Any]:
    """Replaces an attribute of a class or module for a while; yields the previous value."""
    previous = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield previous
    finally:
        setattr(owner, name, previous)


@contextlib.contextmanager
def patched_of(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Replaces a method of one object by function(original, *arguments) for a while; threads may overlap.

    Args:
        owner: The object, which keeps attributes in a `__dict__`.
        name: Name of the method.
        function: The replacement, the same in threads that overlap.
    """
    with _lock:
        call = vars(owner).get(name)
        if not hasattr(call, "raytf_within"):
            previous = call
            call = replacing(getattr(owner, name), function)
            call.raytf_within, call.raytf_before = 0, previous
            vars(owner)[name] = call
        call.raytf_within += 1
    try:
        yield
    finally:
        with _lock:
            call.raytf_within -= 1
            if not call.raytf_within:
                if call.raytf_before is None:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = call.raytf_before


_lock = threading.Lock()


_overridden: list[FunctionPatch] = []


def overrides(owner: type) -> Callable[[Callable], Callable]:
    """Declares that a class of Ray or Keras calls a method by a private name; a missing one raises nothing."""

    def keep(function: Callable) -> Callable:
        _overridden.append(FunctionPatch(owner, function.__name__, function))
        return function

    return keep


def overridden() -> list[FunctionPatch]:
    """Returns all overrides that imported modules declare."""
    return list(_overridden)
