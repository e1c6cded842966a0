"""Which keys of a config build_model and callbacks read, noted while the model is tried: a key that none does is likely
misspelt."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

# In a process that tries a model: where a copy of it writes the keys that nothing read.
_pipe: int | None = None


class Noted(dict):
    """A config that notes which keys are read; whoever goes through it, or copies it, may read all.

    Attributes:
        read: keys that were read.
        whole: whether all may have been.
        defaults: what was read in the place of keys that are not there.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()
        self.whole = False
        self.defaults: dict[str, Any] = {}

    def _noted(self, key, default=None):
        self.read.add(key)
        if not dict.__contains__(self, key):
            self.defaults.setdefault(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self._noted(key, default)
        return super().get(key, default)

    def pop(self, key, *default):
        self._noted(key, *default)
        return super().pop(key, *default)

    def setdefault(self, key, default=None):
        self._noted(key, default)
        return super().setdefault(key, default)

    def _all(self):
        self.whole = True
        return super()

    # `**config`, `dict(config)` and `{**config}` come here, too: CPython passes a subclass by that iterates as a dict
    def __iter__(self):
        return self._all().__iter__()

    def __reversed__(self):
        return self._all().__reversed__()

    def keys(self):
        return self._all().keys()

    def values(self):
        return self._all().values()

    def items(self):
        return self._all().items()

    def copy(self):
        return dict(self._all().items())

    def note(self, keys: Collection) -> None:
        """Keys of the config among these count as read."""
        self.read |= {key for key in keys if dict.__contains__(self, key)}

    def popitem(self):
        return self._all().popitem()

    def __or__(self, other):
        return self.copy() | other

    def __ror__(self, other):
        return other | self.copy()

    def __eq__(self, other):
        return self.copy() == other

    __hash__ = None

    def __reduce__(self):
        return dict, (self.copy(),)


def unread(names: Collection[str], config: Mapping[str, Any], functions: Collection[Callable]) -> tuple[Any, list[str]]:
    """Calls functions with a config; (what the first returned, those of `names` that none of them read).

    A function that keeps the config may read it later, so that all counts as read. The functions after the first are
    called only while a key is unread.
    """
    noted = Noted(config)
    first, *others = functions
    result = first(noted)
    kept = [result]
    for function in others:
        if _unread(names, noted):
            kept.append(function(noted))
    if _unread(names, noted):
        gc.collect()
        noted.whole = noted.whole or sys.getrefcount(noted) > 2
    return result, _unread(names, noted)


def _unread(names: Collection[str], noted: Noted) -> list[str]:
    return [] if noted.whole else sorted(set(names) - noted.read)


@dataclasses.dataclass(frozen=True)
class Noting:
    """A build_model that tells, where `ask` listens, which keys neither it nor callbacks read."""

    build_model: Callable
    callbacks: Callable | None
    names: tuple[str, ...]

    def __call__(self, config):
        global _pipe
        functions = [self.build_model, *([_quiet(self.callbacks)] if self.callbacks else [])]
        model, missing = unread(self.names, config, functions)
        if _pipe is not None:
            os.write(_pipe, json.dumps(missing).encode())
            _pipe = None  # of this fork, which may build the model once more
        return model


def _quiet(callbacks: Callable) -> Callable:
    """Callbacks, of which one that cannot be made here says nothing of the keys: a trial shows what is wrong."""

    def call(config):
        try:
            return callbacks(config)
        except Exception:
            return [config, dict(config)]

    return call


def ask(function: Callable, *arguments) -> tuple[Any, list[str]]:
    """(What `function(*arguments)` returns, what a `Noting` tells that it calls in a fork of this process)."""
    global _pipe
    reader, _pipe = os.pipe()
    try:
        answer = function(*arguments)
    finally:
        os.close(_pipe)
        _pipe = None
        with os.fdopen(reader, "rb") as file:
            told = file.read()
    return answer, json.loads(told) if told else []


class Asker:
    """Stands for `processes.WarmPool` where a model is tried.

    Args:
        processes: that are asked.

    Attributes:
        unread: keys that a `Noting` told.
    """

    def __init__(self, processes):
        self._processes = processes
        self.unread: list[str] = []

    def ask(self, function: Callable, *arguments):
        answer, self.unread = self._processes.ask(ask, function, *arguments)
        return answer

    def __getattr__(self, name: str):
        return getattr(self._processes, name)
