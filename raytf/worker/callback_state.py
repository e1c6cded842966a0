"""Saves and restores the state of the user's callbacks.

State is what training changed: plain attributes (`plain_values.py`), such as counters, best values and saved weights.
A callback with `get_state()` and `set_state(state)` defines its own state, as a plain value.
"""

from __future__ import annotations

import collections
import inspect
import os
from collections.abc import Callable, Mapping, Sequence

from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.storage import plain_values

# Attributes that Keras itself sets on each callback.
_OF_KERAS = ("params", "_params", "_model", "validation_data")
_MANY = (list, tuple, set, frozenset, collections.deque)


class CallbackStates:
    """Tracks the state of callbacks from their construction.

    The state consists of attributes that differ from what the constructor set, except for these:

    * Arguments: attributes with the name of a constructor's parameter (`patience`, or `_patience`). A changed one is
      restored only if the next run passes the same argument.
    * Values that `set_model` or `on_train_begin` derived and nothing changed since. Strings are never saved
      (`TensorBoard` derives folders). Others are restored only if all arguments are equal. So a base learning rate is
      restored, but not a number of steps for other epochs.
    * Paths outside of the run's folder, on any worker. Workers other than the chief write elsewhere: they restore no
      string with a separator.

    Each checkpoint calls `get_state()`. If workers can be replaced in place, every worker also calls it after the last
    step of an epoch. `set_state` is called after `on_train_begin`. If a run resumes within an epoch, it is called again
    after that epoch's `on_epoch_begin`, which may have reset counters.

    Args:
        callbacks: Sequence of Keras callbacks that were just built.
    """

    def __init__(self, callbacks: Sequence):
        self.callbacks = list(callbacks)
        self._built = [_digests(c) for c in self.callbacks]
        self._begun: list[dict] | None = None

    def begin(self) -> None:
        """Records the digests after `on_train_begin` of all callbacks, before a restore; later calls do nothing."""
        if self._begun is None:
            self._begun = [_digests(c) for c in self.callbacks]

    def end(self) -> None:
        """Marks the end of the training."""
        self._begun = None

    def state(self) -> tuple[list[dict], list]:
        """Returns one JSON-serializable entry for each callback, and the arrays that the entries refer to.

        Raises:
            ConfigError: `get_state` of a callback returns a value that is not plain.
        """
        arrays: list = []
        begun = self._begun if self._begun is not None else self._built
        entries = [_state(*args, arrays) for args in zip(self.callbacks, self._built, begun, strict=True)]
        return entries, arrays

    def copy_states(self) -> list[tuple]:
        """Returns copies of the current state of the callbacks, for `restore_copies` in this process."""
        return [_copy_state(callback) for callback in self.callbacks]

    def restore_copies(self, copies: Sequence[tuple]) -> None:
        """Restores the attributes of callbacks that changed since `copies`.

        Args:
            copies: Result of `copy_states()`.
        """
        for callback, (state_copy, digests, values) in zip(self.callbacks, copies, strict=True):
            if state_copy is not None:
                callback.set_state(_copied(*state_copy))
                continue
            current = _digests(callback)
            for key, digest in digests.items():
                if current.get(key) != digest:
                    vars(callback)[key] = _copied(*values[key])

    def restore(self, entries: Sequence[Mapping], arrays: Mapping, chief: bool) -> None:
        """Restores the callbacks from a checkpoint; callbacks without an entry start from scratch.

        Callbacks match by the name of their class, and within one class by their order.

        Args:
            entries: Entries that `state` returned.
            arrays: Arrays that `state` returned, by name.
            chief: Whether this worker is the chief, which writes the files.

        Raises:
            ValueError: The entries are not a result of `state`.
        """
        self.begin()
        if not all(map(_is_entry, entries)):
            raise ValueError("an entry that is no state of a callback")
        unmatched = list(entries)
        unrestored = []
        for callback, built in zip(self.callbacks, self._built, strict=True):
            name = type(callback).__name__
            entry = next((e for e in unmatched if e["class"] == name), None)
            if entry is not None:
                unmatched.remove(entry)
            if entry is None or not _restore(callback, built, entry, arrays, chief):
                unrestored.append(name)
        _warn_of_unrestored(unrestored, [e["class"] for e in unmatched if e.get("attributes") or "own" in e], chief)


def _warn_of_unrestored(new: list[str], dropped: list[str], chief: bool) -> None:
    if chief and new:
        warn_user(f"Callbacks that the checkpoint does not know start from scratch: {', '.join(new)}")
    if chief and dropped:
        warn_user(f"The state of callbacks that the run has no longer is dropped: {', '.join(dropped)}")


def _is_entry(entry) -> bool:
    if type(entry) is not dict or type(entry.get("class")) is not str:
        return False
    attributes = entry.get("attributes")
    whole = type(attributes) is type(entry.get("arguments")) is dict
    return "own" in entry or (
        whole and all(type(a) is dict and {"value", "derived"} <= a.keys() for a in attributes.values())
    )


def _has_own_state(callback) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def _state(callback, built: dict, begun: dict, arrays: list) -> dict:
    name = type(callback).__name__
    if _has_own_state(callback):
        try:
            return {"class": name, "own": plain_values.encode(callback.get_state(), arrays)}
        except TypeError as error:
            raise ConfigError(
                "get_state() of a callback must give plain values: numbers, texts, arrays, lists and dicts of these",
                f"{name}: {error}",
                "Give such values, and recompute the rest in set_state",
            ) from error
    arguments = _arguments(callback)
    digests, attributes = _digests(callback), {}
    for key, digest in digests.items():
        derived = key in begun and digest == begun[key]
        if derived and (digest == built.get(key) or isinstance(vars(callback)[key], str)):
            continue
        if _names(vars(callback)[key], _is_outside):
            continue
        value = plain_values.encode(vars(callback)[key], arrays)
        attributes[key] = {"value": value, "derived": derived}
    # folders may differ at each start, and derived values do not depend on them
    saved_arguments = {k: built[k] for k in sorted(arguments & built.keys()) if not _names(vars(callback)[k], _is_path)}
    return {"class": name, "arguments": saved_arguments, "attributes": attributes}


def _copy_state(callback) -> tuple:
    """Returns (state from `get_state`, or None; digests and values of the attributes of other callbacks)."""
    if _has_own_state(callback):
        return _plain(callback.get_state()), {}, {}
    digests = _digests(callback)
    return None, digests, {key: _plain(vars(callback)[key]) for key in digests}


def _plain(value) -> tuple:
    arrays: list = []
    encoded = plain_values.encode(value, arrays)
    return encoded, [array.copy() for array in arrays]


def _copied(encoded, arrays: list):
    return plain_values.decode(encoded, {str(i): array for i, array in enumerate(arrays)})


def _restore(callback, built: dict, entry: Mapping, arrays: Mapping, chief: bool) -> bool:
    """Restores one callback, and returns whether the entry matches it."""
    if _has_own_state(callback) != ("own" in entry):
        return False
    if _has_own_state(callback):
        callback.set_state(plain_values.decode(entry["own"], arrays))
        return True
    arguments, saved_arguments = _arguments(callback), entry["arguments"]
    same = all(built.get(key) == digest for key, digest in saved_arguments.items())
    for key, saved in entry["attributes"].items():
        if (key in arguments and built.get(key) != saved_arguments.get(key)) or (saved["derived"] and not same):
            continue
        value = plain_values.decode(saved["value"], arrays)
        if key not in _OF_KERAS and not _names(value, _is_outside if chief else _is_path):
            vars(callback)[key] = value
    return True


def _digests(callback) -> dict[str, str]:
    """Returns the digest of each plain attribute, by name."""
    digests = {k: plain_values.digest(v) for k, v in vars(callback).items() if k not in _OF_KERAS}
    if "monitor_op" in vars(callback):
        digests.pop("min_delta", None)  # Keras flips its sign when it chooses `monitor_op`, in each run
    return {k: v for k, v in digests.items() if v is not None}


def _arguments(callback) -> set[str]:
    """Returns the attributes that are named as constructor parameters of the callback's class and its bases."""
    names = set()
    for kind in type(callback).__mro__[:-1]:
        if "__init__" in vars(kind):
            names |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return {key for key in vars(callback) if key.lstrip("_") in names}


def _names(value, is_one: Callable[[str], bool]) -> bool:
    """Returns whether a plain value contains a string for which `is_one` holds, keys of dicts (metrics) apart."""
    if isinstance(value, str):
        return is_one(value)
    if isinstance(value, Mapping):
        return any(_names(v, is_one) for v in value.values())
    return isinstance(value, _MANY) and any(_names(v, is_one) for v in value)


def _is_path(text: str) -> bool:
    return os.sep in text


def _is_outside(text: str) -> bool:
    return os.path.isabs(text) or "://" in text or os.pardir in text.split(os.sep) or text.startswith("~")
