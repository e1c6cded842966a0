"""Finds unused keys of a config, which are likely misspelt: records which ones build_model and callbacks read."""

from __future__ import annotations

import difflib
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any


class AccessTrackingConfig(dict):
    """A config that records which keys are read; iterating over it, or copying it, counts as reading all.

    Attributes:
        read: Keys that were read.
        requested: Keys that were read by themselves, and not by an iteration or a copy.
        whole: Whether all keys may have been read.
        defaults: Values read instead of missing keys.
        missing: Missing keys that were read without a default.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()
        self.requested: set[str] = set()
        self.whole = False
        self.defaults: dict[str, Any] = {}
        self.missing: set[str] = set()

    def _request(self, key):
        self.read.add(key)
        self.requested.add(key)

    def _record(self, key, default=None):
        self._request(key)
        if not dict.__contains__(self, key):
            self.defaults.setdefault(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        if not self.whole:  # CPython copies a mapping by `keys` and then `__getitem__`
            self.requested.add(key)
        if not dict.__contains__(self, key):
            self.missing.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self._request(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self._record(key, default)
        return super().get(key, default)

    def pop(self, key, *default):
        self._record(key, *default)
        return super().pop(key, *default)

    def setdefault(self, key, default=None):
        self._record(key, default)
        return super().setdefault(key, default)

    def __reduce__(self):
        return dict, (self.copy(),)


def _reads_all(name: str) -> Callable:
    def call(self, *arguments):
        self.whole = True
        return getattr(dict, name)(self, *arguments)

    return call


# CPython also calls these for `**config`, `dict(config)` and `{**config}`, as the class overrides `__iter__`
for _name in ("__iter__", "__reversed__", "__or__", "__ror__", "__eq__", "keys", "values", "items", "copy", "popitem"):
    setattr(AccessTrackingConfig, _name, _reads_all(_name))


def unread_keys(
    names: Collection[str], noted: AccessTrackingConfig, functions: Collection[Callable], references: int
) -> dict[str, str]:
    """Returns those of `names` that were not read, each with a similar key that was requested, or "".

    If a function keeps the config, it may read it later, so all keys count as read. A key that looks like one of the
    trainer's own must be named in the user's code; others need not. Keys in the source of a function count, too: it may
    read them at another time. `functions` are called only while a key is unread.

    Args:
        names: Keys that the user has given.
        noted: The config, after a model was built with it.
        functions: Functions of the config: first the one that has built the model, then those of callbacks. The first
            is not called.
        references: `sys.getrefcount(noted)` in the calling function, before other references existed.
    """
    requested = set(noted.requested)
    read_keys = {*noted.read, *noted.defaults, *noted.missing} - set(names) | TRAINER_KEYS
    unread_names = lambda: [] if noted.whole else sorted(set(names) - noted.read)
    for function in functions:
        noted.read |= mentioned_keys(function).intersection(dict.keys(noted)) if unread_names() else set()
    results = [_quiet(function)(noted) for function in list(functions)[1:] if unread_names()]
    if unread_names():
        gc.collect()
        # the additional reference is this function's
        noted.whole = noted.whole or sys.getrefcount(noted) > references + 1
    del results
    meant = {name: key for name in names if name not in requested and (key := _own_key(name))}
    if noted.whole and meant:
        try:
            named: set[str] = set().union(*map(_named_words, functions))
        except Exception:  # of a user's object whose attributes cannot be read
            return {}
        read_keys |= named & {"learning_rate"} - set(names)
        return {name: key for name, key in sorted(meant.items()) if name not in named and key in read_keys}
    close = {name: difflib.get_close_matches(name, sorted(map(str, read_keys)), 1) for name in unread_names()}
    hints = {name: next(iter(matches), "") for name, matches in close.items()}
    return {name: key if (key := meant.get(name)) in read_keys else hint for name, hint in hints.items()}


# Keys that the trainer reads whatever the model function does, and other words for them and for the learning rate.
TRAINER_KEYS = frozenset(("batch_size", "epochs"))
_OTHER_WORDS = {
    "epochs": ("numepochs", "nepochs", "nbepochs", "nbepoch", "maxepochs", "numberofepochs"),
    "batch_size": ("batch", "bs", "globalbatchsize", "trainbatchsize"),
    "learning_rate": ("lr", "learnrate"),
}


def _own_key(name: str) -> str:
    """Returns the well-known key that another one may mean, or ""."""
    word = str(name).lower().replace("_", "").replace("-", "")
    for key, others in _OTHER_WORDS.items():
        if name != key and (word in others or difflib.get_close_matches(word, [key.replace("_", "")], 1, 0.85)):
            return key
    return ""


def unread_warning(unread: Mapping[str, str]) -> str:
    """Returns the warning about keys that were not read, see `unread_keys`."""
    hints = {name: f" (did you mean {close!r}?)" if close else "" for name, close in unread.items()}
    keys = ", ".join(f"config[{name!r}]{hint}" for name, hint in hints.items())
    return f"Nothing read {keys} when the model was tried. Is a key misspelt?"


def _quiet(callbacks: Callable) -> Callable:
    """Returns `callbacks` without errors: keys count as read if it fails here, and a trial shows the error."""

    def call(config):
        try:
            return callbacks(config)
        except Exception:
            return [config, dict(config)]

    return call


def mentioned_keys(function: Callable) -> set[str]:
    """Returns the string constants of a function, and of the functions and classes of its package that it names."""
    package = _package(_unwrapped(function))
    is_own = lambda value: isinstance(value, FunctionType | type) and _package(value) == package
    codes = (code for value in _reached(function, is_own) for code in _codes(value))
    return {const for code in codes for const in _strings(code.co_consts)}


def _named_words(function: Callable) -> set[str]:
    """Returns all words by which code can read a key: constants, attributes, parameters and fields.

    It reads the user's code, with the contents of its modules, containers, objects and base classes. It also reads the
    parameters of functions and classes of other packages that this code names.
    """
    package = _package(_unwrapped(function))
    is_own = lambda value: _package(value) == package or _is_users(value)
    words: set[str] = set()
    for value in _reached(function, is_own, _parts):
        if isinstance(value, str):
            words.add(value)
        elif isinstance(value, type):
            words |= {*vars(value), *vars(value).get("__annotations__", ())}
        for code in _codes(value):
            words |= {*_strings(code.co_consts), *code.co_names, *_parameters(code)}
        for part in map(_unwrapped, _parts(value)):
            code = getattr(vars(part).get("__init__") if isinstance(part, type) else part, "__code__", None)
            words |= {*_parameters(code)} if code is not None else set()
    return words


def _parameters(code: CodeType) -> tuple[str, ...]:
    """Returns a function's parameters; Keras passes its own values to a callback's methods and to lambdas."""
    is_own = not code.co_name.startswith(("on_", "<"))
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if is_own else ()


def _reached(
    function: Callable, belongs: Callable[[Any], bool], parts: Callable[[Any], list] = lambda value: []
) -> Iterator[Any]:
    """Yields a function, and the values that its code names, and so on.

    Args:
        function: The function.
        belongs: Whether a value is to be followed.
        parts: Other values that follow from one.
    """
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function]
    while waiting:
        value = _unwrapped(waiting.pop())
        if id(value) in seen or not belongs(value):
            continue
        seen[id(value)] = value  # a reference, so that no later value has its id
        yield value
        if isinstance(value, type):
            waiting += vars(value).values()
        elif isinstance(value, FunctionType):
            names = [name for code in _codes(value) for name in code.co_names]
            waiting += [value.__globals__[name] for name in names if name in value.__globals__]
            waiting += [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
            waiting += value.__defaults__ or ()
        waiting += parts(value)


# Length of a container, above which it is data.
_MOST_PARTS = 1000


def _parts(value: Any) -> list[Any]:
    """Returns values to which a value leads, in addition to the names of functions and attributes of classes."""
    if isinstance(value, type):
        return list(value.__bases__)
    if isinstance(value, (dict, list, tuple, set, frozenset)) and len(value) > _MOST_PARTS:
        return []
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, property):
        return [value.fget]
    if not isinstance(value, FunctionType):
        return [type(value)]
    names = {name for code in _codes(value) for name in code.co_names}
    # also modules that are imported within the function
    waiting = [value.__globals__.get(name, sys.modules.get(name)) for name in names]
    resolved = {}
    while waiting:
        part = waiting.pop()
        if isinstance(part, ModuleType) and id(part) not in resolved:
            waiting += [vars(part)[name] for name in names & vars(part).keys()]
        resolved[id(part)] = part
    return [part for part in resolved.values() if part is not None and not isinstance(part, ModuleType)]


def _is_users(value: Any) -> bool:
    """Returns whether a value is of no installed package, as far as it has a module."""
    module, path = getattr(value, "__module__", None), ""
    if isinstance(value, FunctionType):
        path = value.__code__.co_filename
    elif isinstance(module, str) and module != "__main__":  # in another process that is another module
        path = getattr(sys.modules.get(module), "__file__", None) or ""
    return "/site-packages/" not in path and _package(value) not in {*sys.stdlib_module_names, "raytf"} - {"__main__"}


def _codes(value: Any) -> list[CodeType]:
    return list(codes_of(value.__code__)) if isinstance(value, FunctionType) else []


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function, and of those that are defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_of(const)


def is_filled(cell) -> bool:
    """Returns whether a closure's cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _unwrapped(value: Any) -> Any:
    while isinstance(value, (functools.partial, MethodType, staticmethod, classmethod)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    call = vars(type(value)).get("__call__")  # of a user's object that is called as a function
    return call if isinstance(call, FunctionType) else value


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _strings(constants: Any) -> Iterator[str]:
    for const in constants:
        if isinstance(const, str):
            yield const
        elif isinstance(const, tuple | frozenset):
            yield from _strings(const)
