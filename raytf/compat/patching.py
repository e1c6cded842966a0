"""Replacements in Keras and TensorFlow: said where they belong (`@patch`), made together (`install`), or for a while
(`patched`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A function in the place of another's.

    Args:
        owner: the class or module that has it.
        name: of the attribute.
        function: function(original, *arguments); its docstring begins with why.
    """

    owner: Any
    name: str
    function: Callable

    @property
    def path(self) -> str:
        """ "module:Class.name"."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"
        return f"{self.owner.__name__}:{self.name}"

    def make(self) -> None:
        """Puts it in place; the original is its first argument from then on."""
        original = getattr(self.owner, self.name, None)  # None of what is added
        setattr(self.owner, self.name, replacing(original, self.function))


def replacing(original: Callable | None, function: Callable) -> Callable:
    """A function that calls `function(original, *arguments)`, and looks like the original."""

    @functools.wraps(original or function)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


_said: list[Replacement] = []
_made: list[Replacement] = []


def patch(*places: tuple[Any, str]) -> Callable[[Callable], Callable]:
    """Says that a function stands in the place of others when `install` was called.

    Args:
        places: (class or module, name of the attribute) of each; the function gets its original as first argument.
    """

    def keep(function: Callable) -> Callable:
        _said.extend(Replacement(owner, name, function) for owner, name in places)
        return function

    return keep


def replacements() -> list[Replacement]:
    """All that modules which were imported say, made or not."""
    return list(_said)


def install() -> None:
    """Makes those that are said and not made yet, in this process, until it ends."""
    for one in _said:
        if one not in _made:
            _made.append(one)
            one.make()


@contextlib.contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[Any]:
    """Within it an attribute of a class or module has another value; gives the one before."""
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def patched_of(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Within it a method of one object is function(original, *arguments); threads may be within it at a time.

    Args:
        owner: the object, which keeps attributes in a `__dict__`.
        name: of the method.
        function: the same in all threads, as far as they are within it together.
    """
    with _lock:
        call = vars(owner).get(name)
        if not hasattr(call, "raytf_within"):
            before = call
            call = replacing(getattr(owner, name), function)
            call.raytf_within, call.raytf_before = 0, before
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


@dataclasses.dataclass(frozen=True)
class Override:
    """A method of raytf's that a private class calls by its name, and would not miss.

    Args:
        owner: the class that has the method.
        name: of the method.
    """

    owner: type
    name: str

    @property
    def path(self) -> str:
        """ "module:Class.name"."""
        return f"{self.owner.__module__}:{self.owner.__qualname__}.{self.name}"


_overridden: list[Override] = []


def overrides(owner: type) -> Callable[[Callable], Callable]:
    """Says that a method is called by a class of Ray's or Keras', by a name that is not public."""

    def keep(function: Callable) -> Callable:
        _overridden.append(Override(owner, function.__name__))
        return function

    return keep


def overridden() -> list[Override]:
    """All that modules which were imported say."""
    return list(_overridden)
