"""Detects errors from names that only Keras 2 has. On a worker, after the error."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from typing import Any

from raytf.compat import legacy_keras
from raytf.errors import RaytfError, one_line

_TRAINER = "pass tensorflow_config=raytf.TensorflowConfig(legacy_keras=True)"
# Modules in which Keras 3 stores the user's `keras...`, `tf.keras...` or `tensorflow.keras...`.
_KERAS_MODULES = ("keras._tf_keras.keras", "tensorflow.keras", "keras")
# Arguments of Keras 2 that a message of Keras 3 lists in a dict, and no function of Keras 3 has.
_ARGUMENTS = ("lr", "weights", "batch_input_shape", "autocast", "implementation", "input_length")
_UNKNOWN_ARGUMENTS = re.compile(
    r"(?:Argument\(s\) not recognized|Unrecognized keyword arguments passed to \w+): (\{.*\})"
)
_UNKNOWN_ARGUMENT = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
# Messages of Keras 3 about features that it has dropped, and formats in which it no longer saves.
_LEFT_BEHIND = re.compile(
    r"TF_USE_LEGACY_KERAS|(?:not supported|deprecated) in Keras 3|Invalid filepath extension for saving"
    r"|The filename must end in `\.weights\.h5`"
)


class Keras2Error(RaytfError, RuntimeError):
    """A train loop uses a name that only Keras 2 has, and `tf.keras` is Keras 3. The cause is Keras' own error."""


def explain(error: BaseException, way: str = _TRAINER) -> None:
    """Raises Keras2Error, with one sentence, if an error comes from a name of Keras 2.

    Args:
        error: Error of the user's code.
        way: How to continue with Keras 2.
    """
    sentence = hint(error, way)
    if sentence is not None:
        raise Keras2Error(f"{one_line(error).rstrip('.')}; {sentence}") from error


@contextlib.contextmanager
def explaining():
    """Explains errors of a user's train loop from names of Keras 2; other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        explain(error)
        raise


def hint(error: BaseException, way: str = _TRAINER) -> str | None:
    """Returns the sentence without the error, or None; see `explain`."""
    if legacy_keras.is_enabled():
        return None
    name_and_origin = _name(error)
    if name_and_origin is None:
        return None
    name, outside = name_and_origin
    installed = importlib.util.find_spec("tf_keras") is not None
    advice = ", and import tf_keras instead of keras" if outside else ""
    advice += "" if installed else ", for which pip install tf_keras is needed"
    return (
        f"{name} {'is' if installed else 'may be'} Keras 2's, and this is Keras 3: use what Keras 3 has for it, or, "
        f"to stay with Keras 2, {way}{advice}"
    )


def _name(error: BaseException) -> tuple[str, bool] | None:
    """Returns (name that only Keras 2 has, whether it is of `keras` instead of `tf.keras`); None for another error."""
    text = str(error)
    if isinstance(error, AttributeError) and error.name is not None:
        return _of_attribute(error.obj, error.name)
    if isinstance(error, ImportError) and error.name is not None:
        match = re.match(r"cannot import name '(\w+)'", text)
        return _of_path(f"{error.name}.{match[1]}" if match else error.name)
    if _LEFT_BEHIND.search(text):
        return "that", False
    if isinstance(error, ValueError) and (match := _UNKNOWN_ARGUMENTS.search(text)):
        old = next((name for name in _ARGUMENTS if f"'{name}':" in match[1]), None)
        return None if old is None else (f"the argument {old}=", False)
    if isinstance(error, TypeError) and (match := _UNKNOWN_ARGUMENT.search(text)):
        method = getattr(_keras_2("Model"), match[1], None)
        if method is not None and match[2] in inspect.signature(method).parameters:
            return f"the argument {match[2]}= of {match[1]}", False
    return None


def _of_attribute(owner: Any, name: str) -> tuple[str, bool] | None:
    if inspect.ismodule(owner):
        return _of_path(f"{owner.__name__}.{name}")
    kind = type(owner)
    if kind.__module__.partition(".")[0] == "keras" or any(k.__module__.startswith("keras.src.") for k in kind.__mro__):
        from keras.src.api_export import get_name_from_symbol  # the public name of a class; no public API

        for base in kind.__mro__:
            public = get_name_from_symbol(base)
            if public and hasattr(_keras_2(public.partition(".")[2]), name):
                return f"{public.rpartition('.')[2]}.{name}", False
    return None


def _of_path(path: str) -> tuple[str, bool] | None:
    module = next((module for module in _KERAS_MODULES if path.startswith(module + ".")), None)
    if module is None:
        return None
    name = path.removeprefix(module + ".")
    if _keras_2(name) is None and importlib.util.find_spec("tf_keras") is not None:
        return None
    outside = module == "keras"
    return f"{'keras' if outside else 'tf.keras'}.{name}", outside


def _keras_2(name: str) -> Any:
    """Returns the object of Keras 2 with a name below `tf.keras`; None without one, or without Keras 2."""
    try:
        result = importlib.import_module("tf_keras.api._v2.keras")
        for part in name.split("."):
            result = getattr(result, part)
    except Exception:  # one that does not import has no names, and is not the explained error
        return None
    return result
