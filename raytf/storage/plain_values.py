"""Converts plain values to JSON and arrays, and back with the same types, without pickle."""

from __future__ import annotations

import base64
import collections
import json
import re
import zlib
from collections.abc import Mapping

import numpy as np

# The key of an object that represents a type without JSON equivalent.
_TAG = "$"
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
# NumPy's types of a fixed size, and Keras's additional types, which NumPy's own files do not name.
_NUMPY = re.compile(r"[<>|=]?([biufcSU]\d+|[mM]8(\[\w+\])?|\?)")
_BROUGHT = re.compile(r"bfloat16|float8_\w+|u?int[124]")


def encode(value, arrays: list | None = None):
    """Converts a value for `json.dumps`.

    Args:
        value: None, bool, a number, text, bytes, or a NumPy scalar. Or a list, tuple, set, frozenset, deque or dict of
            these. NumPy arrays are allowed if `arrays` is a list.
        arrays: Receives the arrays, or None.

    Raises:
        TypeError: The value holds another type; the message names its location.
    """
    try:
        return _encode(value, arrays, "the value")
    except RecursionError:
        raise TypeError("the value holds itself, or is nested too deeply") from None


def _encode(value, arrays, path: str):
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(v, arrays, f"{path}[{i}]") for i, v in enumerate(value)]
    if kind is dict:
        if _TAG not in value and all(type(k) is str for k in value):
            return {k: _encode(v, arrays, f"{path}[{k!r}]") for k, v in value.items()}
        pairs = [[_encode(k, None, f"a key of {path}"), _encode(v, arrays, f"{path}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "items": pairs}
    if kind in _SEQUENCES.values():
        items = [_encode(v, arrays, f"an item of {path}") for v in value]
        # the iteration order of a set differs between processes
        return {_TAG: kind.__name__, "items": items if kind is tuple else sorted(items, key=json.dumps)}
    if kind is collections.deque:
        return {
            _TAG: "deque",
            "items": [_encode(v, arrays, f"an item of {path}") for v in value],
            "most": value.maxlen,
        }
    if kind is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if kind is complex:
        return {_TAG: "complex", "parts": [value.real, value.imag]}
    if isinstance(value, np.generic) and _name(value.dtype):
        return {_TAG: "scalar", "dtype": _name(value.dtype), "base64": base64.b64encode(value.tobytes()).decode()}
    if kind is np.ndarray and arrays is not None and _name(value.dtype):
        arrays.append(value.view(f"u{value.itemsize}") if _BROUGHT.fullmatch(_name(value.dtype)) else value)
        return {_TAG: "array", "index": len(arrays) - 1, "dtype": _name(value.dtype)}
    raise TypeError(f"{path} is of type {kind.__module__}.{kind.__qualname__}")


def _name(dtype: np.dtype) -> str | None:
    """Returns the text form of a dtype, or None if it is not a plain one."""
    if (_BROUGHT.fullmatch(dtype.name) and dtype.kind in "Vf") or dtype.name in ("int2", "int4", "uint2", "uint4"):
        return dtype.name
    return dtype.str if _NUMPY.fullmatch(dtype.str) else None


def decode(value, arrays: Mapping[str, np.ndarray] | None = None):
    """Converts a value back to what `encode` received.

    Args:
        value: Output of `json.loads`.
        arrays: Arrays by the text of their index, such as an open npz.

    Raises:
        ValueError: `encode` never wrote this.
    """
    try:
        return _decode(value, arrays or {})
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a value that was written as such ({type(error).__name__}: {error})") from error


def _decode(value, arrays):
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {k: _decode(v, arrays) for k, v in value.items()}
    kind = value[_TAG]
    if kind == "dict":
        return {_decode(k, {}): _decode(v, arrays) for k, v in value["items"]}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(v, arrays) for v in value["items"])
    if kind == "deque":
        return collections.deque((_decode(v, arrays) for v in value["items"]), value["most"])
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind == "complex":
        return complex(*value["parts"])
    dtype = _dtype(value["dtype"])
    if kind == "scalar":
        return np.frombuffer(base64.b64decode(value["base64"]), dtype, 1)[0]
    if kind == "array":
        array = arrays[str(int(value["index"]))]
        array = array.view(dtype) if _BROUGHT.fullmatch(dtype.name) else array
        if array.dtype != dtype:
            raise ValueError(f"an array of type {array.dtype} that was one of {dtype}")
        return array
    raise ValueError(f"a value of kind {kind!r}")


def _dtype(name) -> np.dtype:
    if not isinstance(name, str) or not (_NUMPY.fullmatch(name) or _BROUGHT.fullmatch(name)):
        raise ValueError(f"a value of dtype {name!r}")
    return np.dtype(name)


def digest(value) -> str | None:
    """Returns a short text that differs if the value differs; None if the value is not plain."""
    arrays: list[np.ndarray] = []
    try:
        text = json.dumps(encode(value, arrays))
    except TypeError:
        return None
    sums = [(zlib.crc32(np.ascontiguousarray(a).view(np.uint8).data if a.size else b""), a.shape) for a in arrays]
    return f"{text if len(text) < 200 else zlib.crc32(text.encode()):}{sums or ''}"
