"""What of a callback is the state of a training, and what is the user's or this process' own.

State is what the training made: plain attributes (`plain_values.py`) that are no longer what the constructor left, such
as counters, best values and weights put aside. It is none of these:

* An argument: an attribute named as a parameter of a constructor (`patience`, or `_patience`). A change of it is kept
  only while the next run passes the same; then the argument that is passed holds.
* What `set_model` and `on_train_begin` derived and nothing changed since: texts never (`TensorBoard` derives folders),
  other values only while all arguments are the same (a base learning rate is kept, steps for other epochs are not).
* A path: what names a place outside the folder in which the run stands, on any worker; on others than the chief, which
  write elsewhere, any text with a separator.

A callback that defines `get_state()` and `set_state(state)` says for itself: a plain value, asked for at each
checkpoint, on every worker behind the last step of an epoch where a lost one may be replaced, and given back after
`on_train_begin`; in an epoch that goes on after some of its steps, after its `on_epoch_begin` once more, which may have
begun to count anew.
"""

from __future__ import annotations

import collections
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence

from raytf.errors import ConfigError
from raytf.storage import plain_values

# What Keras itself sets on each callback.
_OF_KERAS = ("params", "_params", "_model", "validation_data")
_MANY = (list, tuple, set, frozenset, collections.deque)


class CallbackStates:
    """Follows callbacks from their construction.

    Args:
        callbacks: just built.
    """

    def __init__(self, callbacks: Sequence):
        self.callbacks = list(callbacks)
        self._built = [_digests(c) for c in self.callbacks]
        self._begun: list[dict] | None = None

    def begin(self) -> None:
        """Call after the `on_train_begin` of all, before any state is given back; a second call changes nothing."""
        if self._begun is None:
            self._begun = [_digests(c) for c in self.callbacks]

    def end(self) -> None:
        """Call when the training has ended."""
        self._begun = None

    def state(self) -> tuple[list[dict], list]:
        """(an entry for `json.dumps` for each callback, the arrays that they name).

        Raises:
            ConfigError: the `get_state` of a callback gives what is no plain value.
        """
        arrays: list = []
        begun = self._begun if self._begun is not None else self._built
        entries = [_state(*each, arrays) for each in zip(self.callbacks, self._built, begun, strict=True)]
        return entries, arrays

    def held(self) -> list[tuple]:
        """What the callbacks hold now, as copies, for `put_back` in this process."""
        return [_held(callback) for callback in self.callbacks]

    def put_back(self, held: Sequence[tuple]) -> None:
        """Gives the callbacks what they held, as far as it has changed.

        Args:
            held: what `held` gave.
        """
        for callback, (own, digests, values) in zip(self.callbacks, held, strict=True):
            if own is not None:
                callback.set_state(_copied(*own))
                continue
            now = _digests(callback)
            for key, digest in digests.items():
                if now.get(key) != digest:
                    vars(callback)[key] = _copied(*values[key])

    def restore(self, entries: Sequence[Mapping], arrays: Mapping, chief: bool) -> None:
        """Gives the callbacks the state that they had; those that had none start anew.

        Callbacks are known by the name of their class, and among those of one class by their order.

        Args:
            entries, arrays: what `state` gave.
            chief: whether this worker writes the files.

        Raises:
            ValueError: `state` never gave these.
        """
        self.begin()
        if not all(map(_is_entry, entries)):
            raise ValueError("an entry that is no state of a callback")
        left = list(entries)
        new = []
        for callback, built in zip(self.callbacks, self._built, strict=True):
            name = type(callback).__name__
            entry = next((e for e in left if e["class"] == name), None)
            if entry is not None:
                left.remove(entry)
            if entry is None or not _restore(callback, built, entry, arrays, chief):
                new.append(name)
        _tell(new, [e["class"] for e in left if e.get("attributes") or "own" in e], chief)


def _tell(new: list[str], gone: list[str], chief: bool) -> None:
    if chief and new:
        warnings.warn(f"Callbacks that the checkpoint does not know start from scratch: {', '.join(new)}", stacklevel=2)
    if chief and gone:
        warnings.warn(f"Callbacks of the checkpoint that the run has no longer: {', '.join(gone)}", stacklevel=2)


def _is_entry(entry) -> bool:
    if type(entry) is not dict or type(entry.get("class")) is not str:
        return False
    attributes = entry.get("attributes")
    whole = type(attributes) is type(entry.get("arguments")) is dict
    return "own" in entry or (
        whole and all(type(a) is dict and {"value", "derived"} <= a.keys() for a in attributes.values())
    )


def _own(callback) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def _state(callback, built: dict, begun: dict, arrays: list) -> dict:
    name = type(callback).__name__
    if _own(callback):
        try:
            return {"class": name, "own": plain_values.encode(callback.get_state(), arrays)}
        except TypeError as error:
            raise ConfigError(
                "get_state() of a callback must give plain values: numbers, texts, arrays, lists and dicts of these",
                f"{name}: {error}",
                "Give such values, and recompute the rest in set_state",
            ) from error
    arguments = _arguments(callback)
    now, attributes = _digests(callback), {}
    for key, digest in now.items():
        derived = key in begun and digest == begun[key]
        if derived and (digest == built.get(key) or isinstance(vars(callback)[key], str)):
            continue
        if _names(vars(callback)[key], _is_outside):
            continue
        value = plain_values.encode(vars(callback)[key], arrays)
        attributes[key] = {"value": value, "derived": derived}
    # folders may be others at each start, and say nothing of what was derived
    told = {k: built[k] for k in sorted(arguments & built.keys()) if not _names(vars(callback)[k], _is_path)}
    return {"class": name, "arguments": told, "attributes": attributes}


def _held(callback) -> tuple:
    """(of a callback that says for itself, what that is; digests and values of the attributes of others)."""
    if _own(callback):
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
    """Whether the entry was one for this callback."""
    if _own(callback) != ("own" in entry):
        return False
    if _own(callback):
        callback.set_state(plain_values.decode(entry["own"], arrays))
        return True
    arguments, before = _arguments(callback), entry["arguments"]
    same = all(built.get(key) == digest for key, digest in before.items())
    for key, saved in entry["attributes"].items():
        if (key in arguments and built.get(key) != before.get(key)) or (saved["derived"] and not same):
            continue
        value = plain_values.decode(saved["value"], arrays)
        if key not in _OF_KERAS and not _names(value, _is_outside if chief else _is_path):
            vars(callback)[key] = value
    return True


def _digests(callback) -> dict[str, str]:
    """The digest of each plain attribute."""
    found = {k: plain_values.digest(v) for k, v in vars(callback).items() if k not in _OF_KERAS}
    if "monitor_op" in vars(callback):
        found.pop("min_delta", None)  # Keras flips its sign when it chooses `monitor_op`, which it does anew
    return {k: v for k, v in found.items() if v is not None}


def _arguments(callback) -> set[str]:
    """Attributes that are named as parameters of the constructors of a callback's class and of its bases."""
    names = set()
    for kind in type(callback).__mro__[:-1]:
        if "__init__" in vars(kind):
            names |= set(inspect.signature(vars(kind)["__init__"]).parameters)
    return {key for key in vars(callback) if key.lstrip("_") in names}


def _names(value, is_one: Callable[[str], bool]) -> bool:
    """Whether a text in a plain value is one of some kind; keys of dicts are names of metrics and the like."""
    if isinstance(value, str):
        return is_one(value)
    if isinstance(value, Mapping):
        return any(_names(v, is_one) for v in value.values())
    return isinstance(value, _MANY) and any(_names(v, is_one) for v in value)


def _is_path(text: str) -> bool:
    return os.sep in text


def _is_outside(text: str) -> bool:
    return os.path.isabs(text) or "://" in text or os.pardir in text.split(os.sep) or text.startswith("~")
