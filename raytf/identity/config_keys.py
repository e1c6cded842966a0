"""Finds unused keys of a config, which are likely misspelt: records which ones build_model and callbacks read."""

from __future__ import annotations

import ast
import difflib
import functools
import gc
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any


class AccessTrackingConfig(dict):
    """A config that records which keys are read; iterating over it, or copying it, counts as reading all.

    Attributes:
        read: Keys that were read.
        whole: Whether all keys may have been read.
        defaults: Values read instead of missing keys.
        missing: Missing keys that were read without a default.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.read: set[str] = set()
        self.whole = False
        self.defaults: dict[str, Any] = {}
        self.missing: set[str] = set()

    def _record(self, key, default=None):
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

    If a function keeps the config, it may read it later, so all keys count as read. Keys in the source of a function
    count, too: it may read them at another time. `functions` are called only while a key is unread.

    Args:
        names: Keys that the user has given.
        noted: The config, after a model was built with it.
        functions: Functions of the config: first the one that has built the model, which is not called; then those of
            callbacks.
        references: `sys.getrefcount(noted)` in the calling function, before other references existed.
    """
    read_keys = {*noted.read, *noted.defaults, *noted.missing} - set(names) | {"batch_size", "epochs"}
    unread_names = lambda: [] if noted.whole else sorted(set(names) - noted.read)
    for function in functions:
        noted.read |= mentioned_keys(function).intersection(dict.keys(noted)) if unread_names() else set()
    results = [_quiet(function)(noted) for function in list(functions)[1:] if unread_names()]
    if unread_names():
        gc.collect()
        # the additional reference is this function's
        noted.whole = noted.whole or sys.getrefcount(noted) > references + 1
    del results
    close = {name: difflib.get_close_matches(name, sorted(map(str, read_keys)), 1) for name in unread_names()}
    return {name: next(iter(matches), "") for name, matches in close.items()}


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
    constants: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [function]
    package = _package(_unwrapped(function))
    while waiting:
        value = _unwrapped(waiting.pop())
        if id(value) in seen or not isinstance(value, FunctionType | type) or _package(value) != package:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            waiting += vars(value).values()
            continue
        inner = list(codes_of(value.__code__))
        constants |= {const for code in inner for const in _strings(code.co_consts)}
        waiting += [value.__globals__[n] for code in inner for n in code.co_names if n in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        waiting += value.__defaults__ or ()
    return constants


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
        elif isinstance(const, (tuple, frozenset)):
            yield from _strings(const)


_PLAIN = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return, ast.Import, ast.ImportFrom)
# Nodes that evaluate parts later, or conditionally.
_MAYBE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp)


def required_keys(function: Callable) -> dict[str, int]:
    """Returns the keys that a function of a config reads unconditionally at its beginning, and their lines.

    It parses plain statements up to the first branch, or the first use of the config except `config[key]` and
    `config.get`: later statements may have another config. Without a source it returns {}.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
        config = (tree.args.posonlyargs + tree.args.args)[0].arg
    except (OSError, TypeError, SyntaxError, ValueError, AttributeError, IndexError):
        return {}
    lines_by_key: dict[str, int] = {}
    for statement in tree.body:
        nodes = list(ast.walk(statement))
        reads = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)]
        gets = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "get"]
        known = {id(node.value) for node in reads + gets}
        other_uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == config and id(n) not in known]
        if other_uses or not isinstance(statement, _PLAIN) or any(isinstance(node, _MAYBE) for node in nodes):
            break
        for read in reads:
            if isinstance(read.value, ast.Name) and read.value.id == config and isinstance(read.slice, ast.Constant):
                lines_by_key.setdefault(str(read.slice.value), first + read.lineno - 1)
    return lines_by_key
