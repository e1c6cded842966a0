"""Models of Keras 2, from their files: where that is asked for, and nothing in them can run code.

The safe mode of `tf_keras` refuses code, but takes any name of any module that can be imported: a file may name
`os.system` as a layer's function. So every name in a file is looked at before `tf_keras` sees it: only classes and
functions that `tf_keras` has in its public modules are taken, and those that the caller gives or has registered.
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
# Classes of `tf_keras` that are not public, and only hold others.
_INNER = ("Functional",)
# A public layer that runs what its config says.
_CODE = ("Lambda",)
# How `tf_keras` writes plain values.
_VALUES = ("__tensor__", "__numpy__", "__tuple__", "__ellipsis__", "TensorShape")
_LONGEST_CONFIG = 1 << 27


def load(file: str, compile: bool, custom_objects: Mapping | None):
    """A `tf_keras.Model` from a file of Keras 2.

    Args:
        file: on this machine, whose archive was checked.
        compile: whether to restore loss, metrics and optimizer too.
        custom_objects: classes and functions by name, of the caller's.

    Raises:
        ConfigError: tf_keras is not installed, the file names what could run code, or cannot be built.
    """
    legacy_keras.check_installed("a model of Keras 2")
    import tf_keras

    given = dict(custom_objects or {})
    for name in _names(file):
        check(name, given)
    try:
        return tf_keras.saving.load_model(file, given, compile, safe_mode=True)
    except Exception as error:  # of Keras, and of the classes of the caller's
        raise ConfigError(
            "A model of Keras 2 is built from its file where all of its layers are Keras' own, or given",
            f"{file!r} ({type(error).__name__}: {first_line(error)[:300]})",
            "Pass custom_objects=, or build_model= for the weights alone",
        ) from error


def load_weights(file: str, build_model: Callable, config: Mapping | None):
    """A model that `build_model` builds, with the weights of a file of Keras 2; nothing else of the file is read."""
    model = build_model(dict(config or {}))
    model.load_weights(file)
    return model


def refuse(file: str) -> None:
    """Raises ConfigError for a file of Keras 2 that nobody has said to be one."""
    raise ConfigError(
        "A model's file is read as one of Keras 3 unless legacy_keras=True, whatever the file says",
        f"{file!r}, which says that Keras 2 has written it",
        "Pass load_model(..., legacy_keras=True) if you expect that, or build_model= for the weights alone",
    )


def check(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that is neither of `tf_keras`, nor given, nor registered.

    Args:
        found: an object of the config with a "class_name".
        given: classes and functions by name, of the caller's.
    """
    import tf_keras

    name, module, registered = found["class_name"], found.get("module"), found.get("registered_name")
    inner = found.get("config") if name == "function" else name
    if not isinstance(inner, str) or not isinstance(module, (str, type(None))):
        _raise(found)
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
    _raise(found)


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


def _raise(found: Mapping[str, Any]) -> None:
    shown = {key: found.get(key) for key in ("module", "class_name", "registered_name")}
    raise ConfigError(
        "A file of Keras 2 names layers, losses, metrics and functions of Keras alone, and those that are given: "
        "others could run code",
        f"{shown}" + (f", config {str(found.get('config'))[:80]!r}" if found["class_name"] == "function" else ""),
        "Pass it in custom_objects= if it is yours, or build_model= for the weights alone",
    )


def _names(file: str) -> Iterator[Mapping[str, Any]]:
    """The objects in a file's config that name a class or function, however deep."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open("config.json") as part:
            left = [stored_json.value(part.read(_LONGEST_CONFIG))]
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(
            "A model's file holds its config.json", f"{file!r} ({first_line(error)})", "Take another file"
        ) from error
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "class_name" in value:
                yield value
            left += value.values()
        elif isinstance(value, list):
            left += value
