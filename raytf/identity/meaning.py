"""What a value, a function or an object means, in JSON that is the same in every process.

Of the user's functions and classes all counts that changes what they compute: instructions, constants, defaults, what
they caught and what they read of their module, and so on from there. Files, lines, comments, docstrings, modules,
addresses and the order of sets do not. What belongs to a library is known by its name.
"""

from __future__ import annotations

import codecs
import contextlib
import dis
import enum
import functools
import hashlib
import inspect
import json
import marshal
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from raytf.compat.patching import patched
from raytf.identity.config_keys import AccessTrackingConfig

# Longer lists, texts and descriptions are kept as a hash: a vocabulary, a table of constants.
_LONGEST_LIST, _LONGEST_TEXT, _LONGEST_INNER = 256, 256, 4000
_DEEPEST = 24
# Of a dict, or of a script's arguments: what says how long and where a run trains, not what.
_OF_THE_TRAINER = frozenset(("epochs", "batch_size", "num_workers"))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# Names of a class' body that say where it stands.
_OF_PLACE = ("__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__")
# What training calls: attributes that these set are counters and caches, not what was asked for.
_CALLED_IN_TRAINING = (
    *("call", "__call__", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"),
    *("update_state", "reset_state", "result", "update_step"),
)


def described(value: Any, left_out: frozenset[str] = frozenset(), tensors: bool = True) -> Any:
    """A value as JSON: numbers and texts as they are, functions and objects by what tells them apart.

    Args:
        value: anything, also as Keras serializes it.
        left_out: keys of dicts that do not count.
        tensors: whether the numbers of tensors count that objects have as attributes.
    """
    return ValueDescriber(left_out, tensors).of(value)


def number(value: float) -> Any:
    """A number as far as float32 goes: float32 and float64 of one number are the same.

    Above 2**24 float32 leaves out whole units: two clocks of one minute would be one number there, and are not.
    """
    if not math.isfinite(value):
        return repr(value)
    if 1 << 24 < abs(value) < 1e15:
        return float(value)
    if value and not 1e-37 < abs(value) < 3e38:
        return float(f"{value:.9g}")
    return float(str(np.float32(value)))


def shortened(values: list, longest: int = _LONGEST_LIST) -> Any:
    """A list, or its length and hash where it is long."""
    return values if len(values) <= longest else f"{len(values)} values, {hashed(dumped(values))}"


def dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def hashed(value: str | bytes) -> str:
    return hashlib.blake2b(value.encode() if isinstance(value, str) else value, digest_size=8).hexdigest()


def versioned(parts: Any) -> str:
    """A hash that says of which Python it is, as bytecode differs between these."""
    return f"{sys.version_info.major}.{sys.version_info.minor} {hashed(dumped(parts))}"


def described_array(value: np.ndarray) -> Any:
    """An array by its numbers, or by dtype, shape and a hash where they are many."""
    if value.size <= 16 and value.dtype.kind in "biuf":
        return described(value.tolist())
    if value.dtype.hasobject:
        raw = dumped([described(part) for part in value.ravel().tolist()])
    else:
        raw = np.ascontiguousarray(value).tobytes()
    return f"{value.dtype}{list(value.shape)}, {hashed(raw)}"


def is_users(function: Callable) -> bool:
    """Whether a function of Python is the user's, not a library's."""
    if not isinstance(function, types.FunctionType):
        return False
    # a decorator gives its function another's __module__
    return not is_installed(function.__globals__.get("__name__") or function.__module__)


def is_users_object(value: Any) -> bool:
    """Whether a value is a function or a method of the user's, or an object of the user's class."""
    if isinstance(value, types.MethodType):
        return is_users(value.__func__) or is_users_object(value.__self__)
    if isinstance(value, functools.partial):
        return True
    if isinstance(value, types.FunctionType) or hasattr(value, "python_function"):
        return is_users(_unwrapped(value))
    return not inspect.isclass(value) and not is_installed(type(value).__module__)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module is a library's or Python's own, not the user's."""
    top = (module or "").partition(".")[0]
    if top in ("__main__", "__mp_main__"):  # the user's, though a worker of Ray has a file of its own by this name
        return False
    if top in ("builtins", "raytf", "keras", "tensorflow") or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and ("site-packages" in file or "dist-packages" in file)


def _unwrapped(function: Any) -> Any:
    """A function without the wrappers of libraries; a decorator of the user's changes what it does."""
    for _ in range(_DEEPEST):
        inner = getattr(function, "python_function", None) or getattr(function, "__wrapped__", None)
        if inner is None or is_users(function):
            break
        function = inner
    return function


# ------------------------------------------------------------------------------------------------------------ a reader


class ValueDescriber:
    """Describes values; one that is come upon within itself is named by how far up it stands.

    Args:
        left_out, tensors: see `described`.
    """

    def __init__(self, left_out: frozenset[str] = frozenset(), tensors: bool = True):
        self._left_out, self._tensors = left_out, tensors
        self._above: list[int] = []
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """See `described`."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, enum.Enum):
            return {"class": type(value).__name__, "value": value.name}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return number(value)
        if isinstance(value, complex):
            return repr(value)
        if isinstance(value, str):
            value = _ADDRESS.sub("", value)
            return str(value) if len(value) <= _LONGEST_TEXT else f"{len(value)} characters, {hashed(value)}"
        if isinstance(value, (bytes, bytearray)):
            return f"{len(value)} bytes, {hashed(bytes(value))}"
        if isinstance(value, np.generic):
            return self.of(value.item())
        if isinstance(value, np.ndarray):
            return described_array(value)
        if isinstance(value, AccessTrackingConfig):  # which of its keys are read is known, and compared by itself
            return {"class": "config"}
        return self._inside(value)

    def _inside(self, value: Any) -> Any:
        """What holds other values, each described once."""
        key = id(value)
        if key in self._known:
            return self._known[key][1]
        if key in self._above:
            return {"again": len(self._above) - self._above.index(key)}
        if len(self._above) >= _DEEPEST:
            return {"class": type(value).__name__}
        self._above.append(key)
        try:
            found = self._container(value)
        finally:
            self._above.pop()
        self._known[key] = value, found
        return found

    def _container(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._dict(value)
        if isinstance(value, (list, tuple)):
            return shortened([self.of(part) for part in value])
        if isinstance(value, (set, frozenset)):
            return shortened(sorted((self.of(part) for part in value), key=dumped))
        if isinstance(value, functools.partial):
            given = {str(k): self.of(v) for k, v in value.keywords.items()}
            return {"partial": self.of(value.func), "args": self.of(value.args), **given}
        if inspect.isclass(value):
            return {"class": value.__name__, **self.code_of_class(value, values=True)}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__} if is_installed(value.__name__) else {"class": "module"}
        if callable(value) and (hasattr(value, "__name__") or hasattr(value, "python_function")):
            return self._function(value)
        return self._object(value)

    def _dict(self, value: Mapping) -> Any:
        kind, config = value.get("class_name"), value.get("config")
        if _is_dump(value):
            return {"function": "<lambda>", "code": _code_of_dump(value)}
        if kind is None or "config" not in value:
            return {str(k): self.of(v) for k, v in value.items() if k not in self._left_out | _OF_THE_TRAINER}
        # as Keras serializes an object
        if kind == "__lambda__":
            return {"function": "<lambda>", "code": _code_of_dump(config)}
        if kind == "__keras_tensor__":
            return {"tensor": self.of([config.get("shape"), config.get("dtype")])}
        if isinstance(config, str):  # a function by its name
            return {"function": config}
        if "DTypePolicy" in kind:
            return self.of(config.get("name") or config)
        if isinstance(config, Mapping) and "layers" in config:
            return {"class": kind}  # its layers are described each by itself
        inner = self.of(config)
        return {"class": kind, **(inner if isinstance(inner, dict) else {"config": inner})}

    # --------------------------------------------------------------------------------------------------- functions

    def _function(self, function: Any) -> dict[str, Any]:
        function = _unwrapped(function)
        bound = getattr(function, "__self__", None) if isinstance(function, types.MethodType) else None
        function = _unwrapped(getattr(function, "__func__", function))
        found: dict[str, Any] = {"function": getattr(function, "__name__", type(function).__name__)}
        if is_users(function):
            found |= self._code([function])
        else:
            module = getattr(function, "__module__", None) or ""
            found |= {"module": module} if module.partition(".")[0] not in ("", "builtins", "keras") else {}
        if bound is not None and not isinstance(bound, types.ModuleType):
            found["self"] = self.of(bound)
        return found

    def _code(self, functions: list[types.FunctionType], parts: Any = None) -> dict[str, Any]:
        """{"code": a hash of what functions do, "reads": the values that they use, by name}."""
        reads: dict[str, Any] = {}
        for function in functions:
            for name, value in self._read(function):
                found = self._compact(value)
                while name in reads and reads[name] != found:
                    name += "'"
                reads[name] = found
        code = versioned([parts, [_hash_of(function.__code__) for function in functions]])
        return {"code": code, **({"reads": reads} if reads else {})}

    def _compact(self, value: Any) -> Any:
        found = self.of(value)
        text = dumped(found)
        if len(text) <= _LONGEST_INNER:
            return found
        name = (found.get("function") or found.get("class")) if isinstance(found, dict) else None
        return {"function": name, "code": versioned(text)} if name else f"{type(value).__name__}, {hashed(text)}"

    def _read(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """(name, value) of defaults, of what a function caught and of what it reads of its module."""
        code = function.__code__
        changed = _stored(code)
        names = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from sorted((function.__kwdefaults__ or {}).items())
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if isinstance(value, AccessTrackingConfig):
                value.note(_texts(code))
            elif name not in changed and name != "__class__":
                yield name, value
        spaces = function.__globals__
        for name, attributes in sorted(_globals(code).items()):
            if name in changed or name not in spaces:
                continue
            value = spaces[name]
            if not isinstance(value, types.ModuleType):
                yield name, value
            elif not is_installed(value.__name__):
                yield from ((f"{name}.{a}", vars(value)[a]) for a in sorted(attributes) if a in vars(value))

    # ----------------------------------------------------------------------------------------- classes and objects

    def code_of_class(self, kind: type, values: bool = False) -> dict[str, Any]:
        """{"code", "reads"} of a class and its bases, as far as they are the user's; {} where they are not.

        Args:
            kind: the class.
            values: whether plain attributes of the class are among "reads"; see `attributes`.
        """
        users = [base for base in kind.__mro__ if not is_installed(base.__module__)]
        if not users:
            return {}
        names, functions = [], []
        for base in users:
            for name, member in sorted(vars(base).items()):
                found = [f for f in map(_unwrapped, _functions_of(member)) if is_users(f)]
                names += [name] * len(found)
                functions += found
        found = self._code(functions, names)
        given = self._of_class(kind) if values else {}
        return found | ({"reads": {**found.get("reads", {}), **given}} if given else {})

    def _of_class(self, kind: type) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for base in reversed([base for base in kind.__mro__ if not is_installed(base.__module__)]):
            for name, member in vars(base).items():
                dunder = name.startswith("__") and name.endswith("__")
                if not dunder and not name.startswith("_abc") and not _functions_of(member) and _is_plain(member):
                    given[name] = self._compact(member)
        return given

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes of an object of the user's class: those that its library's bases do not set.

        Those that training changes, what a class has and an instance does not overwrite included.
        """
        kind = type(value)
        if is_installed(kind.__module__):
            return {}
        own = dict(getattr(value, "__dict__", {}))
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ()) if not is_installed(base.__module__) else ()
            for name in [slots] if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    own[name] = getattr(value, name)
        skipped = _set_by_library(kind) | _set_in_training(kind)
        found = {k: v for k, v in self._of_class(kind).items() if k not in skipped}
        for name in sorted(own):
            if isinstance(own[name], AccessTrackingConfig):
                own[name].note(_texts_of_class(kind))
            elif name in skipped or name.startswith(("_self_", "_tf_", "__")) or _only_parts(own[name]):
                continue
            else:
                found[name] = self._attribute(own[name])
        return {k: v for k, v in found.items() if k not in self._left_out}

    def _attribute(self, value: Any) -> Any:
        is_tensor = (
            hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (np.ndarray, np.generic))
        )
        if is_tensor and (_is_variable(value) or not self._tensors):
            return {"class": "tensor"}
        return self._compact(value)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        found: dict[str, Any] = {"class": kind.__name__}
        if hasattr(value, "numpy") and hasattr(value, "dtype"):  # a tensor or a variable
            return self._tensor(value)
        if _is_part_of_model(value) or kind.__name__ == "SeedGenerator":
            return found
        if isinstance(value, types.SimpleNamespace) or (kind.__module__, kind.__name__) == ("argparse", "Namespace"):
            return found | self._dict(vars(value))
        if hasattr(value, "get_config"):
            found |= self._config(value)
        return {**self.attributes(value), **found, **self.code_of_class(kind)}

    def _config(self, value: Any) -> dict[str, Any]:
        """The config of an object, with live functions and objects in the place of their names."""
        return live_config(value, config_of(value), self, self._left_out | {"name"})

    def _tensor(self, value: Any) -> Any:
        if _is_variable(value) and not self._tensors:
            return {"class": "tensor"}
        try:
            return described_array(np.asarray(value))
        except Exception:  # a symbolic one has no values
            return {"tensor": str(getattr(value, "shape", ""))}


def config_of(value: Any) -> dict[str, Any]:
    """The config of an object of Keras, or its attributes by the names of its arguments where it gives none."""
    try:
        with _without_sources():
            return dict(value.get_config())
    except Exception:  # it was not made to be serialized
        names = inspect.signature(type(value).__init__).parameters
        return {name: getattr(value, name) for name in names if name != "self" and hasattr(value, name)}


@contextlib.contextmanager
def _without_sources():
    """Lets Keras serialize a lambda without its source, which it puts into a warning, and which a notebook's cell that
    was sent to another process does not have."""
    from raytf.compat.keras import serialization_lib

    class Sourceless:
        getsource = staticmethod(lambda function: "")

        def __getattr__(self, name):
            return getattr(inspect, name)

    with patched(serialization_lib, "inspect", Sourceless()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def live_config(
    value: Any, config: Mapping, reader: ValueDescriber, left_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """A config that an object gave, described, with the user's functions and objects as the object holds them."""
    found = {}
    for key, part in config.items():
        if key in left_out:
            continue
        held = [_held(value, name) for name in (key, f"_{key}")] if isinstance(key, str) else []
        part = next((one for one in held if one is not None), part)
        found[str(key)] = reader.of(part)
    return found


def _held(value: Any, name: str) -> Any:
    """The user's function or object that an object has as an attribute; not its own methods."""
    try:
        held = getattr(value, name, None)
    except Exception:  # of a property that is not there yet
        return None
    users = callable(held) and is_users_object(held) and not _is_part_of_model(held)
    return held if users and getattr(held, "__self__", None) is not value else None


def _is_part_of_model(value: Any) -> bool:
    """Whether a value is a layer, a model or an optimizer, which are described each by itself."""
    keras = sys.modules.get("keras")
    if keras is None:
        return False
    return isinstance(value, (keras.Layer, keras.KerasTensor, keras.optimizers.Optimizer))


def _only_parts(value: Any) -> bool:
    """Whether a value is a layer or an optimizer, or holds nothing else."""
    if isinstance(value, (list, tuple, Mapping)) and value:
        return all(map(_only_parts, value.values() if isinstance(value, Mapping) else value))
    return _is_part_of_model(value)


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign")


def _is_plain(member: Any) -> bool:
    """Whether an attribute of a class is a value, not a descriptor."""
    return not hasattr(type(member), "__get__") and not isinstance(member, (property, types.MemberDescriptorType))


def _functions_of(member: Any) -> list:
    """The functions of what stands in a class."""
    if isinstance(member, property):
        return [f for f in (member.fget, member.fset, member.fdel) if f is not None]
    if isinstance(member, (staticmethod, classmethod)):
        return _functions_of(member.__func__)
    if isinstance(member, functools.cached_property):
        return [member.func]
    if isinstance(member, functools.partialmethod):
        return _functions_of(member.func)
    return [member] if isinstance(_unwrapped(member), types.FunctionType) and not inspect.isclass(member) else []


# ------------------------------------------------------------------------------------------------------------ bytecode


@functools.lru_cache(4096)
def _hash_of(code: types.CodeType) -> str:
    return hashed(dumped(_instructions(code)))


def _instructions(code: types.CodeType) -> list:
    """What a code object does, without file, lines and docstrings."""
    found: list = [
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount],
        list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]),
        code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR),
        getattr(code, "co_exceptiontable", b"").hex(),
    ]
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("NOP", "EXTENDED_ARG")]
    for i, step in enumerate(steps):
        if step.opcode in dis.hasconst:
            stored = steps[i + 1] if i + 1 < len(steps) else None
            if stored is not None and stored.opname == "STORE_NAME" and stored.argval in _OF_PLACE:
                continue
            found.append([step.opname, _constant(step.argval)])
        elif step.opname == "STORE_NAME" and step.argval in _OF_PLACE:
            continue
        else:
            found.append([step.opname, step.argrepr or step.arg])
    return found


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _instructions(value)
    if isinstance(value, (tuple, frozenset)):
        parts = [_constant(part) for part in value]
        return parts if isinstance(value, tuple) else sorted(parts, key=dumped)
    if value is Ellipsis or isinstance(value, complex):
        return repr(value)
    # names within a qualified name change when a function is moved
    return value.rpartition("<locals>.")[2] if isinstance(value, str) else described(value)


def _is_dump(value: Mapping) -> bool:
    """Whether a dict is a function that Keras has serialized by its code."""
    return {"code", "defaults", "closure"} <= set(value) or (
        set(value) == {"value"} and isinstance(value["value"], Mapping) and "code" in value["value"]
    )


def _code_of_dump(config: Any) -> str:
    """The code of a function that Keras has serialized in this process; what it caught is not known here."""
    dump = config.get("value", config) if isinstance(config, Mapping) else config
    text = dump.get("code") if isinstance(dump, Mapping) else dump[0]
    return versioned([None, [_hash_of(marshal.loads(codecs.decode(text.encode(), "base64")))]])


@functools.lru_cache(4096)
def _globals(code: types.CodeType) -> dict[str, frozenset[str]]:
    """The names that code reads of its module, and all attributes that it reads of anything."""
    names, attributes = set(), set()
    for inner in _nested(code):
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(step.argval)
    return dict.fromkeys(names, frozenset(attributes))


def _texts(code: types.CodeType) -> set[str]:
    """The texts within code: keys that it may read."""
    return {part for inner in _nested(code) for part in inner.co_consts if isinstance(part, str)}


def _texts_of_class(kind: type) -> set[str]:
    users = [base for base in kind.__mro__ if not is_installed(base.__module__)]
    functions = [f for base in users for member in vars(base).values() for f in _code_holders(member)]
    return set().union(*(_texts(function.__code__) for function in functions))


@functools.lru_cache(4096)
def _stored(code: types.CodeType) -> frozenset[str]:
    """The names outside it that code sets: a counter."""
    return frozenset(
        step.argval
        for inner in _nested(code)
        for step in dis.get_instructions(inner)
        if step.opname == "STORE_GLOBAL" or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
    )


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


@functools.lru_cache(4096)
def _set_on_self(code: types.CodeType) -> frozenset[str]:
    """The attributes that code sets on what it calls self."""
    found = set()
    for inner in _nested(code):
        steps = list(dis.get_instructions(inner))
        for before, step in zip(steps, steps[1:], strict=False):
            if step.opname == "STORE_ATTR" and before.opname.startswith("LOAD_"):
                # Keras sets some in __new__
                target = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
                found |= {step.argval} if target in ("self", "obj", "instance") else set()
            elif step.opname == "STORE_ATTR" and before.opname == "SWAP":  # self.n += 1
                found.add(step.argval)
    return frozenset(found)


@functools.lru_cache(1024)
def _set_by_library(kind: type) -> frozenset[str]:
    """The attributes that functions of a class' installed bases set."""
    found: set[str] = set()
    for base in kind.__mro__:
        if is_installed(base.__module__):
            for member in vars(base).values():
                found.update(*(_set_on_self(inspect.unwrap(f).__code__) for f in _code_holders(member)))
    return frozenset(found)


def _set_in_training(kind: type) -> frozenset[str]:
    """The attributes that the user's functions set which training calls."""
    found: set[str] = set()
    for base in kind.__mro__:
        if not is_installed(base.__module__):
            for name in _CALLED_IN_TRAINING:
                found.update(*(_set_on_self(f.__code__) for f in _code_holders(vars(base).get(name))))
    return frozenset(found)


def _code_holders(member: Any) -> list[types.FunctionType]:
    found = [inspect.unwrap(getattr(f, "python_function", f)) for f in _functions_of(member)]
    return [f for f in found if isinstance(f, types.FunctionType)]
