"""Canonical JSON of values, functions and objects: the same in every process, for any location of the code.

A user's function counts by its bytecode, which every process has (a notebook's cell has no source elsewhere). The
values that it reads by name count, too. Files, lines, comments, docstrings and the order of sets do not count.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from raytf.compat.patching import patched
from raytf.identity.config_keys import AccessTrackingConfig, codes_of, is_filled

# Longer lists and texts become a hash: a vocabulary, a table of constants.
_LONGEST_LIST, _LONGEST_TEXT = 256, 256
_DEEPEST = 24
# Keys of a dict, or of a script's arguments, for how long and where a run trains, not what it trains.
_OF_THE_TRAINER = frozenset(("epochs", "batch_size", "num_workers"))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe(value: Any, left_out: frozenset[str] = frozenset()) -> Any:
    """Returns a value as JSON: numbers and texts as they are, functions and objects by their distinguishing parts.

    Args:
        value: Any value, also as serialized by Keras.
        left_out: Keys of dicts that do not count.
    """
    return _Describer(left_out).describe(value, 0)


def class_code(kind: type) -> dict[str, Any]:
    """Returns {"code", "reads"} of a class and its bases that are the user's; {} if there are none."""
    return _Describer(frozenset()).class_code(kind, 0)


def config_of(value: Any) -> dict[str, Any]:
    """Returns the config of a Keras object, or its attributes with the names of its arguments if it has none.

    Functions and objects of the user are the live ones, not those that Keras has serialized.
    """
    try:
        with _without_sources():
            config = dict(value.get_config())
    except Exception:  # not made to be serialized
        config = {name: getattr(value, name) for name in _arguments(value) if hasattr(value, name)}
    attributes = getattr(value, "__dict__", {})
    for name in config:
        for live in (attributes.get(name), attributes.get(f"_{name}")):
            if is_users_object(live) and not is_part_of_model(live):
                config[name] = live
    return config


def arguments_of(value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes of a user's object with the names of its arguments that its config omits."""
    attributes = {} if is_installed(type(value).__module__) else getattr(value, "__dict__", {})
    return {name: attributes[name] for name in _arguments(value) if name in attributes and name not in config}


def _arguments(value: Any) -> list[str]:
    try:
        return [name for name in inspect.signature(type(value).__init__).parameters if name != "self"]
    except ValueError:  # of a class in C
        return []


@contextlib.contextmanager
def _without_sources():
    """Makes Keras serialize a lambda without its source.

    Keras puts the source into a warning, and a notebook's cell has none in another process.
    """
    from raytf.compat.keras import serialization_lib

    class Sourceless:
        getsource = staticmethod(lambda function: "")

        def __getattr__(self, name):
            return getattr(inspect, name)

    with patched(serialization_lib, "inspect", Sourceless()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fixed_number(value: float) -> Any:
    """Returns a number in float32 precision: float32 and float64 of one number are the same.

    Above 2**24, where float32 skips whole numbers, it keeps float64: two clocks of one minute must differ.
    """
    if not math.isfinite(value):
        return repr(value)
    if 1 << 24 < abs(value) < 1e15:
        return float(value)
    if value and not 1e-37 < abs(value) < 3e38:
        return float(f"{value:.9g}")
    return float(str(np.float32(value)))


def shorten(values: list, longest: int = _LONGEST_LIST) -> Any:
    """Returns a list, or its length and hash if it is long."""
    return values if len(values) <= longest else f"{len(values)} values, {hash_value(dump(values))}"


def dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def hash_value(value: str | bytes) -> str:
    return hashlib.blake2b(value.encode() if isinstance(value, str) else value, digest_size=8).hexdigest()


@functools.cache
def is_installed(module: str | None) -> bool:
    """Returns whether a module belongs to a library or to Python, not to the user."""
    top = (module or "").partition(".")[0]
    if top in ("__main__", "__mp_main__"):  # the user's, though a Ray worker has its own file of this name
        return False
    if top in ("builtins", "raytf", "keras", "tensorflow") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)


def is_users_object(value: Any) -> bool:
    """Returns whether a value is a function or a method of the user, or an object of a user's class."""
    if isinstance(value, types.MethodType):
        return _is_users(value.__func__) or is_users_object(value.__self__)
    if isinstance(value, functools.partial):
        return True
    if isinstance(value, types.FunctionType) or hasattr(value, "python_function"):
        return _is_users(_unwrapped(value))
    return not inspect.isclass(value) and not is_installed(type(value).__module__)


def is_part_of_model(value: Any) -> bool:
    """Returns whether a value is a layer, a model or an optimizer, each of which has its own description."""
    keras = sys.modules.get("keras")
    if keras is None:
        return False
    return isinstance(value, (keras.Layer, keras.KerasTensor, keras.optimizers.Optimizer))


def _is_users(function: Any) -> bool:
    # a decorator sets another function's __module__
    return isinstance(function, types.FunctionType) and not is_installed(
        function.__globals__.get("__name__") or function.__module__
    )


def _unwrapped(function: Any) -> Any:
    """Removes the wrappers of libraries; a user's decorator stays, as it changes the result."""
    for _ in range(_DEEPEST):
        inner = getattr(function, "python_function", None) or getattr(function, "__wrapped__", None)
        if inner is None or _is_users(function):
            break
        function = inner
    return function


class _Describer:
    """Describes values; a repeated function, class or object is only named."""

    def __init__(self, left_out: frozenset[str]):
        self._left_out = left_out
        self._visited: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique

    def describe(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return {"class": type(value).__name__, "value": value.name}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return fixed_number(value)
        if isinstance(value, str):
            value = _ADDRESS.sub("", value)
            return str(value) if len(value) <= _LONGEST_TEXT else f"{len(value)} characters, {hash_value(value)}"
        if isinstance(value, (bytes, bytearray)):
            return f"{len(value)} bytes, {hash_value(bytes(value))}"
        if isinstance(value, np.generic):
            return self.describe(value.item(), depth)
        if isinstance(value, np.ndarray):
            return self._array(value, depth)
        if isinstance(value, AccessTrackingConfig):  # its keys that are read are compared separately
            return {"class": "config"}
        if depth > _DEEPEST or isinstance(value, types.ModuleType):
            return {"class": type(value).__name__}
        return self._container(value, depth + 1)

    def _array(self, value: np.ndarray, depth: int) -> Any:
        """Returns an array's numbers, or dtype, shape and a hash if there are many."""
        if value.size <= 16 and value.dtype.kind in "biuf":
            return self.describe(value.tolist(), depth)
        raw = (
            dump(self.describe(value.tolist(), depth))
            if value.dtype.hasobject
            else np.ascontiguousarray(value).tobytes()
        )
        return f"{value.dtype}{list(value.shape)}, {hash_value(raw)}"

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return self._dict(value, depth)
        if isinstance(value, (list, tuple)):
            return shorten([self.describe(part, depth) for part in value])
        if isinstance(value, (set, frozenset)):
            return shorten(sorted((self.describe(part, depth) for part in value), key=dump))
        if isinstance(value, functools.partial):
            keywords = {str(k): self.describe(v, depth) for k, v in value.keywords.items()}
            return {"partial": self.describe(value.func, depth), "args": self.describe(value.args, depth), **keywords}
        if inspect.isclass(value):
            return {"class": value.__name__, **self.class_code(value, depth)}
        if callable(value) and (hasattr(value, "__name__") or hasattr(value, "python_function")):
            return self._function(value, depth)
        return self._object(value, depth)

    def _dict(self, value: Mapping, depth: int) -> Any:
        kind, config = value.get("class_name"), value.get("config")
        if kind is None or "config" not in value:
            left_out = self._left_out | _OF_THE_TRAINER
            return {str(k): self.describe(v, depth) for k, v in value.items() if k not in left_out}
        # as serialized by Keras
        if kind == "__lambda__":
            return {"function": "<lambda>"}
        if kind == "__keras_tensor__":
            return {"tensor": self.describe([config.get("shape"), config.get("dtype")], depth)}
        if isinstance(config, str):  # a function by its name
            return {"function": config}
        if "DTypePolicy" in kind:
            return self.describe(config.get("name") or config, depth)
        if isinstance(config, Mapping) and "layers" in config:
            return {"class": kind}  # its layers have their own descriptions
        inner = self.describe(config, depth)
        return {"class": kind, **(inner if isinstance(inner, dict) else {"config": inner})}

    def _function(self, function: Any, depth: int) -> dict[str, Any]:
        bound = getattr(function, "__self__", None)
        function = _unwrapped(getattr(_unwrapped(function), "__func__", function))
        description: dict[str, Any] = {"function": getattr(function, "__name__", type(function).__name__)}
        if _is_users(function):
            description |= self._code({"": function}, depth)
        elif (module := getattr(function, "__module__", None) or "").partition(".")[0] not in ("", "builtins", "keras"):
            description["module"] = module
        if bound is not None and not isinstance(bound, types.ModuleType):
            description["self"] = self.describe(bound, depth)
        return description

    def _code(self, functions: dict[str, types.FunctionType], depth: int) -> dict[str, Any]:
        """Returns {"code": a hash of the functions' bytecode, "reads": the values that they use, by name}."""
        reads: dict[str, Any] = {}
        for function in functions.values():
            if id(function) not in self._visited:
                self._visited[id(function)] = function
                for name, value in _read(function):
                    reads.setdefault(name, self.describe(value, depth))
        parts = [[name, _instructions(function.__code__)] for name, function in sorted(functions.items())]
        code = f"{sys.version_info.major}.{sys.version_info.minor} {hash_value(dump(parts))}"
        return {"code": code, **({"reads": reads} if reads else {})}

    def class_code(self, kind: type, depth: int) -> dict[str, Any]:
        users = [base for base in kind.__mro__ if not is_installed(base.__module__)]
        if not users or id(kind) in self._visited:
            return {}
        self._visited[id(kind)] = kind
        functions, constants = {}, {}
        for base in reversed(users):
            for name, member in vars(base).items():
                of_property = getattr(member, "fget", None) or getattr(member, "func", None)
                function = _unwrapped(of_property or getattr(member, "__func__", member))
                if _is_users(function):
                    functions[name] = function
                elif isinstance(member, (bool, int, float, str, tuple, list, dict)) and not name.startswith("__"):
                    constants[name] = self.describe(member, depth)
        description = self._code(functions, depth)
        reads = {**description.get("reads", {}), **constants}
        return {**description, **({"reads": reads} if reads else {})}

    def _object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        description: dict[str, Any] = {"class": kind.__name__}
        if hasattr(value, "numpy") and hasattr(value, "dtype"):
            is_variable = hasattr(value, "assign")  # a variable's value changes in training
            return description if is_variable else self._array(np.asarray(value), depth)
        if is_part_of_model(value) or kind.__name__ == "SeedGenerator" or id(value) in self._visited:
            return description
        self._visited[id(value)] = value
        if isinstance(value, types.SimpleNamespace) or (kind.__module__, kind.__name__) == ("argparse", "Namespace"):
            return description | self._dict(vars(value), depth)
        if hasattr(value, "get_config") or not is_installed(kind.__module__):
            config = config_of(value)
            config |= arguments_of(value, config)
            description |= {
                str(k): self.describe(v, depth) for k, v in config.items() if k not in self._left_out | {"name"}
            }
        return description | self.class_code(kind, depth)


def _read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of a function's defaults, and of variables of its closure and module that it only reads."""
    code, spaces = function.__code__, function.__globals__
    steps = [step for inner in codes_of(code) for step in dis.get_instructions(inner)]
    changed = {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "STORE_DEREF")} - set(code.co_cellvars)
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from sorted((function.__kwdefaults__ or {}).items())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if is_filled(cell) and name not in changed | {"__class__"}:
            yield name, cell.cell_contents
    for name in sorted({step.argval for step in steps if step.opname == "LOAD_GLOBAL"} - changed):
        if name in spaces and not isinstance(spaces[name], types.ModuleType):
            yield name, spaces[name]


def _instructions(code: types.CodeType) -> list:
    """Returns the instructions of a code object, without file, lines and docstring."""
    instructions: list = [code.co_flags & 0x2F, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    for step in dis.get_instructions(code):
        if step.opname not in ("NOP", "EXTENDED_ARG"):
            is_constant = step.opcode in dis.hasconst
            instructions.append([step.opname, _constant(step.argval) if is_constant else step.argrepr or step.arg])
    return instructions


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _instructions(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(part) for part in value]
        return parts if isinstance(value, tuple) else sorted(parts, key=dump)
    # the outer names in a qualified name change when a function is moved
    return value.rpartition("<locals>.")[2] if isinstance(value, str) else repr(value)
