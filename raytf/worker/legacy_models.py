"""Loads models of Keras 2 from their files, on request, without running code from them.

The safe mode of `tf_keras` refuses code, but imports any name of any module. A file may name `os.system` as a layer's
function. So every name in a file is checked before `tf_keras` reads it. Allowed are classes and functions in public
modules of `tf_keras`, and those that the caller passes or has registered.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raytf.compat import legacy_keras
from raytf.errors import ConfigError, first_line
from raytf.storage import stored_json

_CLASSES = ("layers", "models", "losses", "metrics", "initializers", "regularizers", "constraints", "optimizers")
_DEEPER = ("optimizers.legacy", "optimizers.schedules", "mixed_precision")
_FUNCTIONS = ("activations", "losses", "metrics", "initializers", "regularizers", "constraints")
# Classes of `tf_keras` that are not public, and only contain others.
_INNER = ("Functional",)
# A public layer that runs code from its config.
_CODE = ("Lambda",)
# How `tf_keras` serializes plain values.
_VALUES = ("__tensor__", "__numpy__", "__tuple__", "__ellipsis__", "TensorShape")
_LONGEST_CONFIG = 1 << 27


def load(file: str, compile: bool, custom_objects: Mapping | None):
    """Returns a `tf_keras.Model` from a file of Keras 2.

    Args:
        file: Path on this machine; the archive is already checked.
        compile: Whether to restore loss, metrics and optimizer too.
        custom_objects: Classes and functions of the caller's, by name.

    Raises:
        ConfigError: tf_keras is not installed, the file names something that could run code, or the model cannot be
            built.
    """
    legacy_keras.check_installed("a model of Keras 2")
    import tf_keras

    given = dict(custom_objects or {})
    for name in _names(file):
        check(name, given)
    try:
        return tf_keras.saving.load_model(file, given, compile, safe_mode=True)
    except Exception as error:  # of Keras, or of the caller's classes
        raise ConfigError(
            "A model of Keras 2 is built from its file where all of its layers are Keras' own, or given",
            f"{file!r} ({type(error).__name__}: {first_line(error)[:300]})",
            "Pass custom_objects=, or build_model= for the weights alone",
        ) from error


def load_weights(file: str, build_model: Callable, config: Mapping | None):
    """Returns a model of `build_model` with the weights of a file of Keras 2; reads nothing else of the file."""
    model = build_model(dict(config or {}))
    model.load_weights(file)
    return model


def refuse_keras_2_file(file: str) -> None:
    """Raises ConfigError for a file of Keras 2 without `legacy_keras=True`."""
    raise ConfigError(
        "A model's file is read as one of Keras 3 unless legacy_keras=True, whatever version the file names",
        f"{file!r}, which Keras 2 has written, as the file states",
        "Pass load_model(..., legacy_keras=True) if you expect that, or build_model= for the weights alone",
    )


def check(description: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that is neither of `tf_keras`, nor passed, nor registered.

    Args:
        description: Object of the config with a "class_name".
        given: Classes and functions of the caller's, by name.
    """
    import tf_keras

    name, module, registered = description["class_name"], description.get("module"), description.get("registered_name")
    inner = description.get("config") if name == "function" else name
    if not isinstance(inner, str) or not isinstance(module, (str, type(None))):
        _raise(description)
    if any(isinstance(key, str) and _is_known(tf_keras, key, given) for key in (inner, registered)):
        return
    if name in _VALUES:
        return
    is_own = module is None or module in ("keras", "tf_keras") or module.startswith(("keras.", "tf_keras."))
    if name == "function":
        if (is_own or module == "builtins") and _is_public(tf_keras, inner, _FUNCTIONS):
            return
    elif is_own and name not in _CODE and (name in _INNER or _is_public(tf_keras, name, (*_CLASSES, *_DEEPER))):
        return
    _raise(description)


def _is_known(tf_keras, name: str, given: Mapping[str, Any]) -> bool:
    return name in given or tf_keras.saving.get_registered_object(name, given) is not None


def _is_public(tf_keras, name: str, modules: tuple[str, ...]) -> bool:
    for path in modules:
        module = tf_keras
        for part in path.split("."):
            module = getattr(module, part)
        if not name.startswith("_") and callable(getattr(module, name, None)):
            return True
    return False


def _raise(description: Mapping[str, Any]) -> None:
    shown = {key: description.get(key) for key in ("module", "class_name", "registered_name")}
    raise ConfigError(
        "A file of Keras 2 names layers, losses, metrics and functions of Keras alone, and those that are given: "
        "others could run code",
        f"{shown}"
        + (f", config {str(description.get('config'))[:80]!r}" if description["class_name"] == "function" else ""),
        "Pass it in custom_objects= if it is yours, or build_model= for the weights alone",
    )


def _names(file: str) -> Iterator[Mapping[str, Any]]:
    """Returns the objects at any depth of a file's config that name a class or function."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open("config.json") as part:
            pending = [stored_json.parse_value(part.read(_LONGEST_CONFIG))]
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            "A model's file holds its config.json", f"{file!r} ({first_line(error)})", "Take another file"
        ) from error
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "class_name" in value:
                yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value
