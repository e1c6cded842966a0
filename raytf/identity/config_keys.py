"""Which keys of a config build_model and callbacks read, noted while the model is tried: a key that none does is likely
misspelt."""

from __future__ import annotations

import difflib
import gc
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from raytf.identity import config_reads


class AccessTrackingConfig(dict):
    """A config that notes which keys are read; whoever goes through it, or copies it, may read all.

    Attributes:
        read: keys that were read.
        whole: whether all may have been.
        defaults: what was read in the place of keys that are not there.
        missing: keys that are not there and were read without a default.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()
        self.whole = False
        self.defaults: dict[str, Any] = {}
        self.missing: set[str] = set()

    def _noted(self, key, default=None):
        self.read.add(key)
        if not dict.__contains__(self, key):
            self.defaults.setdefault(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        if not dict.__contains__(self, key):
            self.missing.add(key)
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


def unread(
    names: Collection[str], noted: AccessTrackingConfig, functions: Collection[Callable], references: int
) -> dict[str, str]:
    """Returns those of `names` that nothing has read, with the key that each may be meant for, or "".

    A function that keeps the config may read it later, so that all counts as read. What the source of a function
    mentions counts as read, too: it may do so at another time. `functions` are called only while a key is left.

    Args:
        names: keys that the user has given.
        noted: the config, after a model was built with it.
        functions: of the config: the one that has built the model, which is not called, and those of callbacks.
        references: `sys.getrefcount(noted)` in the calling function, before anything had the config.
    """
    asked = {*noted.read, *noted.defaults, *noted.missing} - set(names) | {"batch_size", "epochs"}
    for function in functions:
        if _unread(names, noted):
            noted.note(config_reads.mentioned(function))
    kept = [_quiet(function)(noted) for function in list(functions)[1:] if _unread(names, noted)]
    if _unread(names, noted):
        gc.collect()
        noted.whole = noted.whole or sys.getrefcount(noted) > references + 1  # the one of this function
    del kept
    close = {name: difflib.get_close_matches(name, sorted(map(str, asked)), 1) for name in _unread(names, noted)}
    return {name: next(iter(found), "") for name, found in close.items()}


def _unread(names: Collection[str], noted: AccessTrackingConfig) -> list[str]:
    return [] if noted.whole else sorted(set(names) - noted.read)


def warning(unread: Mapping[str, str]) -> str:
    """Returns the sentence about keys that nothing read, see `unread`."""
    hints = {name: f" (did you mean {close!r}?)" if close else "" for name, close in unread.items()}
    keys = ", ".join(f"config[{name!r}]{hint}" for name, hint in hints.items())
    return f"Nothing read {keys} when the model was tried. Is a key misspelt?"


def _quiet(callbacks: Callable) -> Callable:
    """Callbacks, of which one that cannot be made here says nothing of the keys: a trial shows what is wrong."""

    def call(config):
        try:
            return callbacks(config)
        except Exception:
            return [config, dict(config)]

    return call
