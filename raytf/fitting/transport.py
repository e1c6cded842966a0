"""Sends a compiled model and its callbacks to another process, exactly: every object by value, with its references.

Keras's own pickles use its file format, which loses unregistered objects. This module uses cloudpickle, so classes and
functions of a notebook are sent, too. The data passes only through Ray, never through a storage. An object is written
without its attributes, which follow later. Else a chain of 1,000 layers would make a pickle too deep. Objects keep
their numbers on the way back: variables' values and callbacks find the original objects.

Over 500 lines: the pickler next to the unpickler, for each kind of object.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import ray.cloudpickle
import tensorflow as tf

from raytf.compat import keras_objects
from raytf.compat.keras import TRACKED, BaseOptimizer, DynamicBackend, as_array, make_node_key, tracking
from raytf.compat.tensorflow import DistributedVariable
from raytf.errors import ConfigError, one_line
from raytf.fitting import changed_classes, tensorflow_objects
from raytf.logs import warn_user

# Attributes that each process creates itself: of all objects, of layers and of models.
_REBUILT = ("_self_saveable_object_factories", "_self_update_uid", "_exclude_from_weight_decay_cache")
_REBUILT_OF_LAYERS = ("_losses", "_loss_ids", "build", "quantize")
_REBUILT_OF_MODELS = ("train_function", "test_function", "predict_function", "_eval_epoch_iterator", "stop_training")
_REBUILT_OF_MODELS += (
    "_distribute_strategy",
    "_raytf_last",
    "_raytf_notes",
    "_raytf_sync_batches",
    "_raytf_synchronize",
)
_PREDICATES = {
    "variables": lambda x: isinstance(x, keras.Variable),
    "trainable_variables": lambda x: isinstance(x, keras.Variable) and x.trainable,
    "non_trainable_variables": lambda x: isinstance(x, keras.Variable) and not x.trainable,
    "metrics": lambda x: isinstance(x, keras.metrics.Metric),
    "layers": lambda x: isinstance(x, keras.layers.Layer) and not isinstance(x, keras.metrics.Metric),
    "seed_generators": lambda x: isinstance(x, keras.random.SeedGenerator),
}
# Attributes of a callback that Keras sets in each training.
_OF_A_TRAINING = ("_model", "params", "_params", "validation_data")
# Largest value, in bytes, of an importable class or its module that is sent with it.
_MOST_OF_A_CLASS = 16 << 20
# Flag of a class defined in Python code (Py_TPFLAGS_HEAPTYPE), see `type.__flags__`.
_OF_PYTHON = 1 << 9
_reading = threading.local()


class ObjectTable:
    """Objects that were sent or received, by number.

    Attributes:
        objects: Variables, layers, models, optimizers, losses and metrics.
        numbers: The number of each, by its id.
    """

    def __init__(self):
        self.objects: list = []
        self.numbers: dict[int, int] = {}

    def add(self, value) -> int:
        self.numbers[id(value)] = number = len(self.objects)
        self.objects.append(value)
        return number

    def variables(self) -> dict[int, Any]:
        """Returns the variables that have values, by their numbers."""
        return {
            number: value
            for number, value in enumerate(self.objects)
            if isinstance(value, tf.Variable)
            or (isinstance(value, keras.Variable) and keras_objects.variable_of(value) is not None)
        }

    def values(self) -> dict[int, np.ndarray]:
        """Returns the values of all variables by number, in TensorFlow's memory: send them before the next step."""
        return {number: value_of(variable) for number, variable in self.variables().items()}

    def assign(self, values: dict[int, np.ndarray]) -> None:
        """Assigns the values that another process has read from the variables."""
        for number, value in values.items():
            for local in _locals(self.objects[number]):
                local.assign(np.array(value))

    def joined(self, other: ObjectTable) -> ObjectTable:
        """Returns these objects followed by another's, under one numbering."""
        merged = ObjectTable()
        for value in (*self.objects, *other.objects):
            merged.add(value)
        return merged


def _locals(variable) -> list:
    """Returns a variable's local variables; reading metrics through a strategy would wait for other workers."""
    inner = keras_objects.variable_of(variable) if isinstance(variable, keras.Variable) else variable
    return list(inner.values) if isinstance(inner, DistributedVariable) else [inner]


def value_of(variable) -> np.ndarray:
    """Returns the value, if possible in TensorFlow's own memory: read-only, and valid until the next step."""
    return as_array(_locals(variable)[0])


class _Pickler(ray.cloudpickle.Pickler):
    """Writes objects by value.

    Args:
        known: Objects that the reader has, which are only numbered; None if it has none.
        classes: Whether importable classes are sent with their changes since their import.
    """

    def __init__(self, file, known: ObjectTable | None = None, classes: bool = True):
        super().__init__(file, protocol=5)
        self._known, self._classes, self.sent = known, classes, ObjectTable()
        self._changed: list[tuple] = []
        self._states: list[tuple] = []
        self._plain: dict[type, bool] = {}

    def write(self, value) -> None:
        """Writes a value, then its objects' states in rounds: (object, setter, state) each, and [] at the end."""
        self.dump(value)
        while True:
            states, self._changed, self._states = self._changed + self._states, [], []
            self.dump(states)
            if not states:
                return

    def persistent_id(self, value):
        if self._known is not None and id(value) in self._known.numbers:
            return self._known.numbers[id(value)]
        return None

    def reducer_override(self, value):
        reduced = self._reduced(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def _reduced(self, value):
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, keras.Variable):
            return self._variable(value)
        if isinstance(value, tf.Variable):
            return self._tf_variable(value)
        if isinstance(value, BaseOptimizer):
            return self._numbered(value, _optimizer_state(value), _set_optimizer)
        if isinstance(value, (keras.Operation, keras.metrics.Metric, keras.Loss)):
            return self._numbered(value, _state(value), _set_operation)
        if isinstance(value, keras.callbacks.Callback):
            state = {k: v for k, v in vars(value).items() if k not in _OF_A_TRAINING}
            return self._numbered(value, state, _set_callback)
        if isinstance(value, tracking.Tracker):
            return self._deferred(value, (_new_object, (type(value),)), _tracker_state(value), _set_tracker)
        if isinstance(value, TRACKED):
            items = dict.copy(value) if isinstance(value, dict) else list(value)
            return self._deferred(value, (_new_tracked, (type(value),)), (value.tracker, items), _set_tracked)
        if isinstance(value, DynamicBackend):
            return DynamicBackend, (keras_objects.backend_of(value),)
        reduced = tensorflow_objects.reduce_object(value)
        return self._object(value) if reduced is NotImplemented else reduced

    def _object(self, value):
        """Reduces an object that is only attributes, such as a graph's node; excludes those whose hash needs them."""
        kind = type(value)
        if kind not in self._plain:
            methods = (kind.__reduce_ex__, kind.__reduce__, kind.__hash__)
            is_plain = methods == (object.__reduce_ex__, object.__reduce__, object.__hash__)
            is_plain = is_plain and kind not in self.dispatch_table and not hasattr(kind, "__setstate__")
            self._plain[kind] = is_plain and bool(kind.__flags__ & _OF_PYTHON)
        if not self._plain[kind]:
            return NotImplemented
        made, arguments, state, items, pairs, *_ = (*value.__reduce_ex__(5), None, None, None)
        if made is not copyreg.__newobj__ or arguments != (kind,) or type(state) is not dict or items or pairs:
            return NotImplemented
        return self._deferred(value, (_new_object, (kind,)), state, _update_attributes)

    def _class(self, kind: type):
        if not self._classes or not changed_classes.may_change(kind):
            return NotImplemented
        state = changed_classes.class_changes(kind, self._pickles)
        self._changed.append((kind, changed_classes.apply_changes, state))
        return changed_classes.import_class, (kind.__module__, kind.__qualname__)

    def _pickles(self, value) -> bool:
        """Returns whether a value can be written, and is smaller than data that a module reads at its import."""
        file = io.BytesIO()
        try:
            _Pickler(file, self._known, classes=False).write(value)
        except Exception:
            return False
        return file.tell() <= _MOST_OF_A_CLASS

    def _deferred(self, value, made: tuple, state, setter):
        """Returns an object's reduction without its state, which follows later."""
        self._states.append((value, setter, state))
        return made

    def _numbered(self, value, state, setter):
        return self._deferred(value, (_new_object, (type(value), self.sent.add(value))), state, setter)

    def _variable(self, value):
        state = _plain_state(value)
        state.pop("_value")
        basic = {name: state.pop(name) for name in _BASIC}
        content = None if keras_objects.variable_of(value) is None else self._content(value)
        made = _new_variable, (type(value), self.sent.add(value), basic, content)
        return self._deferred(value, made, state, _update_attributes)

    def _tf_variable(self, value):
        if value.synchronization == tf.VariableSynchronization.ON_READ:
            warn_user(
                f"The variable {value.name!r} (tf.Variable with synchronization=ON_READ) has a part on each worker, "
                "and after the call the part of the first worker. Use add_weight(..., aggregation='sum') or 'mean' "
                "instead",
            )
        basic = {
            "trainable": value.trainable,
            "name": value.name.split(":")[0],
            "aggregation": value.aggregation,
            "synchronization": value.synchronization,
        }
        return _new_tf_variable, (self.sent.add(value), basic, self._content(value))

    def _content(self, value):
        """Returns the value itself if the reader does not receive it separately."""
        return value_of(value) if self._known is not None else ()


_BASIC = ("_dtype", "_trainable", "_name", "_path", "_aggregation", "_synchronization", "_shape", "_autocast")


def _plain_state(value) -> dict[str, Any]:
    return {k: v for k, v in vars(value).items() if not k.startswith("_self_")}


def _state(value) -> dict[str, Any]:
    excluded = {*_REBUILT}
    if isinstance(value, keras.layers.Layer):
        excluded |= {*_REBUILT_OF_LAYERS}
    if isinstance(value, keras.Function):
        excluded |= {"_nodes"}  # contains names by the ids of objects
    if isinstance(value, keras.Model):
        excluded |= {*_REBUILT_OF_MODELS}
        if isinstance(vars(value).get("history"), keras.callbacks.History):
            excluded |= {"history"}
        if getattr(vars(value).get("predict_step"), "__module__", "").startswith("raytf."):
            excluded |= {"predict_step"}
    return {name: part for name, part in vars(value).items() if name not in excluded}


def _optimizer_state(optimizer) -> dict[str, Any]:
    state = {name: part for name, part in vars(optimizer).items() if name not in _REBUILT}
    state.pop("_distribution_strategy", None)
    indices = state.pop("_trainable_variables_indices", {})
    excluded = state.pop("_exclude_from_weight_decay", None)
    parts = state.pop("_var_to_optimizer_idx", None)  # of a MultiOptimizer, by keys of this process
    if parts is not None:
        state["_raytf_parts"] = [
            parts[keras_objects.key_of(optimizer, v)] for v in keras_objects.variables_of_optimizer(optimizer)
        ]
    if excluded:
        if not excluded <= indices.keys():
            raise pickle.PicklingError(
                f"{optimizer.name} leaves variables out of its weight decay that it does not train yet; call its "
                "build(variables) first"
            )
        state["_raytf_excluded"] = sorted(indices[key] for key in excluded)
    return state


def _tracker_state(tracker) -> dict[str, Any]:
    stores = {name: store for name, (_, store) in tracker.config.items()}
    predicates = {name: test for name, (test, _) in tracker.config.items() if name not in _PREDICATES}
    attributes = {k: v for k, v in vars(tracker).items() if k not in ("config", "stored_ids")}
    return {"stores": stores, "predicates": predicates, "attributes": attributes}


# ------------------------------------------------------------------------------------------ at the reader


def _new_object(kind, number: int | None = None):
    return _received(kind.__new__(kind), number)


def _received(value, number: int | None):
    if number is not None:
        objects = _reading.sent.objects
        objects.extend([None] * (number + 1 - len(objects)))
        objects[number] = value
        _reading.sent.numbers[id(value)] = number
    return value


def _new_variable(kind, number, basic, content):
    value = kind.__new__(kind)
    vars(value).update(basic, _value=None, _initializer=None, _regularizer=None, _constraint=None)
    vars(value).update(_overwrite_with_gradient=False, _layout=None)
    if content is not None:
        keras_objects.initialize(value, _content_of(number, content))
    return _received(value, number)


def _new_tf_variable(number, basic, content):
    return _received(tf.Variable(_content_of(number, content), **basic), number)


def _content_of(number, content) -> np.ndarray:
    value = content if isinstance(content, np.ndarray) else _reading.values[number]
    return np.array(value)  # TensorFlow may modify its argument in place, and this may be in Ray's store


def _update_attributes(value, state) -> None:
    vars(value).update(state)


def _set_callback(callback, state) -> None:
    vars(callback).update(dict.fromkeys(_OF_A_TRAINING[:3]) | state)


def _set_operation(value, state) -> None:
    vars(value).update(state)
    if isinstance(value, keras.layers.Layer):
        vars(value).update(_losses=[], _loss_ids=set())
    if isinstance(value, keras.Model):
        strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        vars(value).update(train_function=None, test_function=None, predict_function=None)
        vars(value).update(_distribute_strategy=strategy, stop_training=False)
    # the Functions among classes are known once all classes have their bases
    _reading.finishers.append(lambda: _name_nodes(value) if isinstance(value, keras.Function) else None)


def _name_nodes(function) -> None:
    """Sets the node names of a function as `map_graph` does; `get_config` needs them."""
    by_depth, operations = keras_objects.graph_of(function)
    nodes = {id(node) for group in by_depth.values() for node in group}
    vars(function)["_nodes"] = {
        make_node_key(operation, index)
        for operation in operations
        for index, node in enumerate(keras_objects.nodes_of(operation))
        if id(node) in nodes
    }


def _set_optimizer(optimizer, state) -> None:
    excluded, parts = state.pop("_raytf_excluded", None), state.pop("_raytf_parts", None)
    vars(optimizer).update(state, _distribution_strategy=tf.distribute.get_strategy())

    def index():
        trained = getattr(optimizer, "_trainable_variables", [])
        keys = [keras_objects.key_of(optimizer, v) for v in trained]
        vars(optimizer)["_trainable_variables_indices"] = {key: i for i, key in enumerate(keys)}
        if excluded is not None:
            vars(optimizer)["_exclude_from_weight_decay"] = {keys[i] for i in excluded}
        if parts is not None:
            vars(optimizer)["_var_to_optimizer_idx"] = dict(zip(keys, parts, strict=True))

    _reading.finishers.append(index)


def _set_tracker(tracker, state) -> None:
    tests = _PREDICATES | state["predicates"]
    vars(tracker).update(state["attributes"])
    tracker.config = {name: (tests[name], store) for name, store in state["stores"].items()}
    tracker.stored_ids = {}

    def index():
        tracker.stored_ids = {name: {id(v) for v in store} for name, (_, store) in tracker.config.items()}

    _reading.finishers.append(index)


def _new_tracked(kind):
    made = kind.__new__(kind)
    made.tracker = None
    return made


def _set_tracked(made, state) -> None:
    made.tracker, items = state
    plain = next(k for k in (dict, list, set) if isinstance(made, k))
    (plain.extend if plain is list else plain.update)(made, items)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, known: ObjectTable | None):
        super().__init__(file)
        self._known = known

    def persistent_load(self, number):
        return self._known.objects[number]

    def read(self):
        """Reads the output of `_Pickler.write`."""
        value = self.load()
        while states := self.load():
            for made, setter, state in states:
                setter(made, state)
        return value


# ------------------------------------------------------------------------------------------ for both


def serialize(value, known: ObjectTable | None = None, classes: bool = True) -> tuple[bytes, ObjectTable]:
    """Returns (the bytes of an object without its variables' values, the objects in it).

    Args:
        value: Any object.
        known: Objects that the reader has: they are only numbered, and others are written with their values.
        classes: Whether importable classes are sent with their changes since their import.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known, classes)
    pickler.write(value)
    return file.getvalue(), pickler.sent


def deserialize(
    data: bytes, values: dict[int, np.ndarray] | None = None, known: ObjectTable | None = None
) -> tuple[Any, ObjectTable]:
    """Reads the output of `serialize` in the scope of the current strategy. Returns the value and the objects in it.

    Args:
        data: The bytes.
        values: Values of the variables, by number, if they were sent separately.
        known: The reader's objects.
    """
    outer = dict(vars(_reading))
    vars(_reading).update(sent=ObjectTable(), values=values or {}, finishers=[])
    try:
        value = _Unpickler(io.BytesIO(data), known).read()
        for finish in _reading.finishers:
            finish()
        return value, _reading.sent
    finally:
        vars(_reading).clear()
        vars(_reading).update(outer)


def serialize_named(values: Sequence[tuple[str, Any]], known: ObjectTable | None = None) -> tuple[bytes, ObjectTable]:
    """Writes a list of named values.

    Raises:
        ConfigError: One of them does not pickle; it is named.
    """
    try:
        return serialize([value for _, value in values], known)
    except Exception as whole:
        for name, value in values:
            try:
                serialize(value, known)
            except Exception as error:
                is_model = isinstance(value, keras.Model)
                culprit = _culprit_in_model(value, known) if is_model else _culprit(value, known)
                raise ConfigError(
                    "The model and the callbacks are sent to the workers, so all of them must pickle",
                    f"{name}{culprit} ({one_line(error)})",
                    _FIX_OF_MODELS if is_model else _FIX_OF_CALLBACKS,
                ) from error
        raise whole


_FIX_OF_CALLBACKS = (
    "Make what does not pickle (locks, files, connections, generators) where it is used, for example in on_train_begin"
)
_FIX_OF_MODELS = (
    "Make what does not pickle (locks, files, datasets, loaded models) in the layer's call(), or train with "
    "raytf.KerasTrainer: its workers call build_model themselves, and no model is sent"
)


def _culprit(value, known: ObjectTable | None, ignored: Sequence[str] = ()) -> str:
    """Returns " with its attribute 'name'" if a single attribute is to blame, else ""."""
    for name, part in getattr(value, "__dict__", {}).items():
        if name in (*_REBUILT, *_REBUILT_OF_LAYERS, *_REBUILT_OF_MODELS, *_OF_A_TRAINING, *ignored):
            continue
        try:
            serialize(part, known)
        except Exception:
            return f" with its attribute {name!r}"
    return ""


def _culprit_in_model(model, known: ObjectTable | None) -> str:
    """Returns the layer and its attribute that are to blame, or "".

    Layers reach each other by their graph, so only other attributes are tried.
    """
    graph = keras.Operation, keras.KerasTensor, *TRACKED
    ignored = {*vars(keras.layers.Layer())}
    for layer in keras_objects.layers_of(model):
        is_model = isinstance(layer, keras.Model)
        skipped = [k for k, v in vars(layer).items() if isinstance(v, graph) or (is_model and k.startswith("_"))]
        culprit = _culprit(layer, known, (*ignored, *skipped))
        if culprit:
            return culprit if layer is model else f", whose layer {layer.name!r} is a {type(layer).__name__}{culprit}"
    return ""


# ------------------------------------------------------------------------------------------ callbacks


def serialize_attributes(callbacks: Sequence, known: ObjectTable) -> tuple[list[dict[str, bytes]], list[str]]:
    """Returns (the attributes of each callback, as bytes; names of the user's own that do not pickle)."""
    results, lost = [], []
    for callback in callbacks:
        attributes = {}
        for name, value in vars(callback).items():
            if name in _OF_A_TRAINING:
                continue
            try:
                attributes[name] = serialize(value, known, classes=False)[0]
            except Exception:
                if not type(callback).__module__.startswith("keras."):  # Keras's files and writers are not transferable
                    lost.append(f"{type(callback).__name__}.{name}")
        results.append(attributes)
    return results, lost


def apply_attributes(callbacks: Sequence, attributes: Sequence[dict[str, bytes]], known: ObjectTable) -> None:
    """Sets the callbacks' attributes to those of their copies."""
    for callback, own_attributes in zip(callbacks, attributes, strict=True):
        for name, data in own_attributes.items():
            vars(callback)[name] = deserialize(data, known=known)[0]


# ------------------------------------------------------------------------------------------ Keras' settings


def global_settings() -> dict[str, Any]:
    """Returns the global settings of Keras and TensorFlow that a model depends on."""
    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": serialize(keras.config.dtype_policy())[0],
        "eager": tf.config.functions_run_eagerly(),
        "recursion": sys.getrecursionlimit(),
    }


def apply_settings(given: dict[str, Any]) -> None:
    """Applies the result of `global_settings` in another process."""
    for name in ("floatx", "epsilon", "image_data_format"):
        getattr(keras.config, f"set_{name}")(given[name])
    keras.config.set_dtype_policy(deserialize(given["dtype_policy"])[0])
    tf.config.run_functions_eagerly(given["eager"])
    sys.setrecursionlimit(max(sys.getrecursionlimit(), given["recursion"]))  # Keras itself descends into deep models
