"""Transfers changes of an importable class since its import to the process that imports it again.

Such a class is sent by its name. A constructor may have changed it. Keras gives a functional-style subclass of
`keras.Model` other bases. Other constructors count or register their instances in the class or its module. So the class
is sent with its bases and values. Module variables that its code uses, and some code changes, are sent, too. A value
that does not pickle (a lock, a logger), or is as large as data, is not sent.
"""

from __future__ import annotations

import collections
import dis
import importlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from ray import cloudpickle

# These change their own classes only at import.
_LIBRARIES = frozenset(("keras", "tensorflow", "raytf", "builtins", "abc", "typing"))
_CHANGEABLE = (dict, list, set, bytearray, collections.deque)


def may_change(kind: type) -> bool:
    """Returns whether a class is a user's or another library's, related to Keras, and importable by name."""
    kinds = (keras.Operation, keras.metrics.Metric, keras.Loss, keras.optimizers.Optimizer, keras.callbacks.Callback)
    if not issubclass(kind, kinds) or kind.__module__.split(".")[0] in _LIBRARIES:
        return False
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__" or _by_value(kind.__module__):
        return False
    try:
        return operator.attrgetter(kind.__qualname__)(module) is kind
    except AttributeError:  # a local class of a function
        return False


def _by_value(module: str) -> bool:
    """Returns whether the user has registered a module, or its package, for pickling by value with cloudpickle."""
    parts = module.split(".")
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(".".join(parts[:end]) in registered for end in range(1, len(parts) + 1))


def class_changes(kind: type, pickles: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the changes that `apply_changes` applies to the class in another process.

    Args:
        kind: The class.
        pickles: Returns whether a value can be sent.
    """
    values = {k: v for k, v in vars(kind).items() if not _is_definition(kind, k, v)}
    module = vars(sys.modules[kind.__module__])
    variables = {name: module[name] for name in sorted(_changeable(kind, module))}
    return {
        "bases": kind.__bases__,
        "values": {k: v for k, v in values.items() if pickles(v)},
        "variables": {k: v for k, v in variables.items() if pickles(v)},
    }


def _is_definition(kind: type, name: str, value) -> bool:
    """Returns whether an import defines this attribute of a class, or it cannot be sent."""
    if name.startswith("__") or name.startswith("_abc_"):
        return True
    if isinstance(value, types.FunctionType):
        return (value.__module__, value.__qualname__) == (kind.__module__, f"{kind.__qualname__}.{name}")
    return hasattr(value, "__get__") or isinstance(value, type)


def _changeable(kind: type, module: dict[str, Any]) -> set[str]:
    """Returns the names of module variables that code of a class uses and that may have changed."""
    used, stored, visited = set(), set(), set()
    pending = list(_functions(vars(kind).values()))
    while pending:
        function = pending.pop()
        if function in visited or function.__globals__ is not module:
            continue
        visited.add(function)
        for code in _codes(function.__code__):
            used |= set(code.co_names) & module.keys()
            stored |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
        pending += _functions(module[name] for name in used)
    unchanged_kinds = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return {
        name
        for name in used
        if not isinstance(module[name], unchanged_kinds) and (name in stored or isinstance(module[name], _CHANGEABLE))
    }


def _functions(values: Iterable) -> Iterator[types.FunctionType]:
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for part in parts:
            if isinstance(part, types.FunctionType):
                yield inspect.unwrap(part)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def import_class(module: str, name: str) -> type:
    """Imports a class by name."""
    return operator.attrgetter(name)(importlib.import_module(module))


def apply_changes(kind: type, changes: dict[str, Any]) -> None:
    """Applies the changes from `class_changes` in another process to a class and its module."""
    if kind.__bases__ != changes["bases"]:
        kind.__bases__ = changes["bases"]
    for name, value in changes["values"].items():
        setattr(kind, name, value)
    module = sys.modules[kind.__module__]
    for name, value in changes["variables"].items():
        _set(module, name, value)


def _set(module: types.ModuleType, name: str, value) -> None:
    """Sets a variable; updates a container in place, as other modules may have imported it."""
    present = getattr(module, name, None)
    if type(present) is not type(value) or not isinstance(present, _CHANGEABLE):
        setattr(module, name, value)
    elif present is not value:
        copied_items = dict(value) if isinstance(value, dict) else list(value)
        present.clear()
        (present.update if isinstance(present, (dict, set)) else present.extend)(copied_items)
