"""A compiled model and its callbacks from process to process, exactly: every object by value, with what it refers to.

Keras' own pickles go through its file format, which loses what is not registered. Here the objects themselves travel,
by cloudpickle, so that classes and functions of a notebook come along; layers, optimizers and metrics with their
attributes, variables with their values. It passes through Ray only; nothing of it goes into a storage.

A pickle descends from an object into its attributes, and a chain of 1,000 layers is too deep for it. Here an object is
written without its attributes, and these follow once all that is being written has ended: depth costs nothing.

What is numbered on the way out keeps its number on the way back: values of variables, and callbacks that refer to the
model, find the very objects that they left from.
"""

from __future__ import annotations

import contextlib
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
from raytf.errors import ConfigError, in_a_line
from raytf.fitting import changed_classes, tensorflow_objects

# What belongs to a process, and is made anew: of all objects, of layers and of models.
_ANEW = ("_self_saveable_object_factories", "_self_update_uid", "_exclude_from_weight_decay_cache")
_ANEW_OF_LAYERS = ("_losses", "_loss_ids", "build", "quantize")
_ANEW_OF_MODELS = ("train_function", "test_function", "predict_function", "_eval_epoch_iterator", "stop_training")
_ANEW_OF_MODELS += ("_distribute_strategy", "_raytf_last", "_raytf_notes", "_raytf_sync_batches", "_raytf_synchronize")
_PREDICATES = {
    "variables": lambda x: isinstance(x, keras.Variable),
    "trainable_variables": lambda x: isinstance(x, keras.Variable) and x.trainable,
    "non_trainable_variables": lambda x: isinstance(x, keras.Variable) and not x.trainable,
    "metrics": lambda x: isinstance(x, keras.metrics.Metric),
    "layers": lambda x: isinstance(x, keras.layers.Layer) and not isinstance(x, keras.metrics.Metric),
    "seed_generators": lambda x: isinstance(x, keras.random.SeedGenerator),
}
# Of a callback: what Keras sets anew for each training.
_OF_A_TRAINING = ("_model", "params", "_params", "validation_data")
# Bytes of a value of an importable class or its module that goes along.
_MOST_OF_A_CLASS = 16 << 20
# Of a class that Python code defines (Py_TPFLAGS_HEAPTYPE), see `type.__flags__`.
_OF_PYTHON = 1 << 9
_reading = threading.local()


class Sent:
    """Objects that went, or came: each by its number.

    Attributes:
        objects: variables, layers, models, optimizers, losses and metrics.
        numbers: the number of each, by its id.
    """

    def __init__(self):
        self.objects: list = []
        self.numbers: dict[int, int] = {}

    def add(self, value) -> int:
        self.numbers[id(value)] = number = len(self.objects)
        self.objects.append(value)
        return number

    def variables(self) -> dict[int, Any]:
        """The variables that have values, by their numbers."""
        return {
            number: one
            for number, one in enumerate(self.objects)
            if isinstance(one, tf.Variable)
            or (isinstance(one, keras.Variable) and keras_objects.held_by(one) is not None)
        }

    def values(self) -> dict[int, np.ndarray]:
        """The values of all variables, by their numbers, in TensorFlow's memory: to be sent before the next step."""
        return {number: value_of(one) for number, one in self.variables().items()}

    def assign(self, values: dict[int, np.ndarray]) -> None:
        """Gives the variables values that another process has read from them."""
        for number, value in values.items():
            for local in _locals(self.objects[number]):
                local.assign(np.array(value))

    def joined(self, other: Sent) -> Sent:
        """These objects, and then those of another, under one numbering."""
        both = Sent()
        for value in (*self.objects, *other.objects):
            both.add(value)
        return both


def _locals(variable) -> list:
    """The variables of this process behind one; a read of metrics through a strategy would wait for other workers."""
    inner = keras_objects.held_by(variable) if isinstance(variable, keras.Variable) else variable
    return list(inner.values) if isinstance(inner, DistributedVariable) else [inner]


def value_of(variable) -> np.ndarray:
    """Returns the value in TensorFlow's own memory where that can be: not to be written into, and good until a step."""
    return as_array(_locals(variable)[0])


class _Pickler(ray.cloudpickle.Pickler):
    """Writes objects by value.

    Args:
        known: of objects that the reader has, which are only numbered; None where it has none.
        classes: whether importable classes bring what has happened to them since their import.
    """

    def __init__(self, file, known: Sent | None = None, classes: bool = True):
        super().__init__(file, protocol=5)
        self._known, self._classes, self.sent = known, classes, Sent()
        self._changed: list[tuple] = []
        self._states: list[tuple] = []
        self._plain: dict[type, bool] = {}

    def write(self, value) -> None:
        """Writes a value, and then the states of its objects in rounds: (object, setter, state) each, [] at the end."""
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
            return self._deferred(value, (_new, (type(value),)), _tracker_state(value), _set_tracker)
        if isinstance(value, TRACKED):
            items = dict.copy(value) if isinstance(value, dict) else list(value)
            return self._deferred(value, (_new_tracked, (type(value),)), (value.tracker, items), _set_tracked)
        if isinstance(value, DynamicBackend):
            return DynamicBackend, (keras_objects.backend_of(value),)
        reduced = tensorflow_objects.reduced(value)
        return self._object(value) if reduced is NotImplemented else reduced

    def _object(self, value):
        """Any other object that is only its attributes, such as a node of a graph; a hash of its own needs these."""
        kind = type(value)
        if kind not in self._plain:
            own = (kind.__reduce_ex__, kind.__reduce__, kind.__hash__)
            found = own == (object.__reduce_ex__, object.__reduce__, object.__hash__)
            found = found and kind not in self.dispatch_table and not hasattr(kind, "__setstate__")
            self._plain[kind] = found and bool(kind.__flags__ & _OF_PYTHON)
        if not self._plain[kind]:
            return NotImplemented
        made, arguments, state, items, pairs, *_ = (*value.__reduce_ex__(5), None, None, None)
        if made is not copyreg.__newobj__ or arguments != (kind,) or type(state) is not dict or items or pairs:
            return NotImplemented
        return self._deferred(value, (_new, (kind,)), state, _update)

    def _class(self, kind: type):
        if not self._classes or not changed_classes.may_be(kind):
            return NotImplemented
        state = changed_classes.state(kind, self._pickles)
        self._changed.append((kind, changed_classes.set_state, state))
        return changed_classes.imported, (kind.__module__, kind.__qualname__)

    def _pickles(self, value) -> bool:
        """Whether a value can be written, and is not as large as data, which a module reads at its import."""
        file = io.BytesIO()
        try:
            _Pickler(file, self._known, classes=False).write(value)
        except Exception:
            return False
        return file.tell() <= _MOST_OF_A_CLASS

    def _deferred(self, value, made: tuple, state, setter):
        """What makes an object; its state follows."""
        self._states.append((value, setter, state))
        return made

    def _numbered(self, value, state, setter):
        return self._deferred(value, (_new, (type(value), self.sent.add(value))), state, setter)

    def _variable(self, value):
        state = _plain_state(value)
        state.pop("_value")
        basic = {name: state.pop(name) for name in _BASIC}
        content = None if keras_objects.held_by(value) is None else self._content(value)
        made = _new_variable, (type(value), self.sent.add(value), basic, content)
        return self._deferred(value, made, state, _update)

    def _tf_variable(self, value):
        basic = {
            "trainable": value.trainable,
            "name": value.name.split(":")[0],
            "aggregation": value.aggregation,
            "synchronization": value.synchronization,
        }
        return _new_tf_variable, (self.sent.add(value), basic, self._content(value))

    def _content(self, value):
        """The value itself where the reader does not get it apart."""
        return value_of(value) if self._known is not None else ()


_BASIC = ("_dtype", "_trainable", "_name", "_path", "_aggregation", "_synchronization", "_shape", "_autocast")


def _plain_state(value) -> dict[str, Any]:
    return {k: v for k, v in vars(value).items() if not k.startswith("_self_")}


def _state(value) -> dict[str, Any]:
    anew = {*_ANEW}
    if isinstance(value, keras.layers.Layer):
        anew |= {*_ANEW_OF_LAYERS}
    if isinstance(value, keras.Function):
        anew |= {"_nodes"}  # names by the ids of objects
    if isinstance(value, keras.Model):
        anew |= {*_ANEW_OF_MODELS}
        if isinstance(vars(value).get("history"), keras.callbacks.History):
            anew |= {"history"}
        if getattr(vars(value).get("predict_step"), "__module__", "").startswith("raytf."):
            anew |= {"predict_step"}
    return {name: part for name, part in vars(value).items() if name not in anew}


def _optimizer_state(optimizer) -> dict[str, Any]:
    state = {name: part for name, part in vars(optimizer).items() if name not in _ANEW}
    state.pop("_distribution_strategy", None)
    indices = state.pop("_trainable_variables_indices", {})
    excluded = state.pop("_exclude_from_weight_decay", None)
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
    own = {name: test for name, (test, _) in tracker.config.items() if name not in _PREDICATES}
    rest = {k: v for k, v in vars(tracker).items() if k not in ("config", "stored_ids")}
    return {"stores": stores, "own": own, "rest": rest}


# ------------------------------------------------------------------------------------------ at the reader


def _new(kind, number: int | None = None):
    return _came(kind.__new__(kind), number)


def _came(value, number: int | None):
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
    return _came(value, number)


def _new_tf_variable(number, basic, content):
    return _came(tf.Variable(_content_of(number, content), **basic), number)


def _content_of(number, content) -> np.ndarray:
    found = content if isinstance(content, np.ndarray) else _reading.values[number]
    return np.array(found)  # TensorFlow may work in place on what it is given, and this may lie in Ray's store


def _update(value, state) -> None:
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
    # which class is a Function is known when all classes have their bases
    _reading.after.append(lambda: _name_nodes(value) if isinstance(value, keras.Function) else None)


def _name_nodes(function) -> None:
    """What `map_graph` calls the nodes of a function; `get_config` asks for these."""
    by_depth, operations = keras_objects.graph_of(function)
    nodes = {id(node) for group in by_depth.values() for node in group}
    vars(function)["_nodes"] = {
        make_node_key(operation, index)
        for operation in operations
        for index, node in enumerate(keras_objects.nodes_of(operation))
        if id(node) in nodes
    }


def _set_optimizer(optimizer, state) -> None:
    excluded = state.pop("_raytf_excluded", None)
    vars(optimizer).update(state, _distribution_strategy=tf.distribute.get_strategy())

    def index():
        trained = getattr(optimizer, "_trainable_variables", [])
        keys = [keras_objects.key_of(optimizer, v) for v in trained]
        vars(optimizer)["_trainable_variables_indices"] = {key: i for i, key in enumerate(keys)}
        if excluded is not None:
            vars(optimizer)["_exclude_from_weight_decay"] = {keys[i] for i in excluded}

    _reading.after.append(index)


def _set_tracker(tracker, state) -> None:
    tests = _PREDICATES | state["own"]
    vars(tracker).update(state["rest"])
    tracker.config = {name: (tests[name], store) for name, store in state["stores"].items()}
    tracker.stored_ids = {}

    def index():
        tracker.stored_ids = {name: {id(v) for v in store} for name, (_, store) in tracker.config.items()}

    _reading.after.append(index)


def _new_tracked(kind):
    made = kind.__new__(kind)
    made.tracker = None
    return made


def _set_tracked(made, state) -> None:
    made.tracker, items = state
    plain = next(k for k in (dict, list, set) if isinstance(made, k))
    (plain.extend if plain is list else plain.update)(made, items)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, known: Sent | None):
        super().__init__(file)
        self._known = known

    def persistent_load(self, number):
        return self._known.objects[number]

    def read(self):
        """What `_Pickler.write` wrote."""
        value = self.load()
        while states := self.load():
            for made, setter, state in states:
                setter(made, state)
        return value


# ------------------------------------------------------------------------------------------ for both


def write(value, known: Sent | None = None, classes: bool = True) -> tuple[bytes, Sent]:
    """(the bytes of an object without the values of its variables, the objects in it).

    Args:
        value: anything.
        known: objects that the reader has: they are only named, and others bring their values.
        classes: whether importable classes bring what has happened to them since their import.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known, classes)
    pickler.write(value)
    return file.getvalue(), pickler.sent


def read(data: bytes, values: dict[int, np.ndarray] | None = None, known: Sent | None = None) -> tuple[Any, Sent]:
    """What `write` wrote, in the scope of the strategy that is in force, and the objects in it.

    Args:
        data: the bytes.
        values: of the variables, by number, where they came apart.
        known: the reader's objects.
    """
    before = dict(vars(_reading))
    vars(_reading).update(sent=Sent(), values=values or {}, after=[])
    try:
        found = _Unpickler(io.BytesIO(data), known).read()
        for finish in _reading.after:
            finish()
        return found, _reading.sent
    finally:
        vars(_reading).clear()
        vars(_reading).update(before)


def write_named(values: Sequence[tuple[str, Any]], known: Sent | None = None) -> tuple[bytes, Sent]:
    """`write` of a list of values, which have names.

    Raises:
        ConfigError: one of them does not pickle; it is named.
    """
    try:
        return write([value for _, value in values], known)
    except Exception as whole:
        for name, value in values:
            try:
                write(value, known)
            except Exception as error:
                where = _culprit(value, known)
                raise ConfigError(
                    "The model and the callbacks are sent to the workers, so all of them must pickle",
                    f"{name}{where} ({in_a_line(error)})",
                    "Make what does not pickle (locks, files, connections, generators) where it is used, for example "
                    "in on_train_begin",
                ) from error
        raise whole


def _culprit(value, known: Sent | None) -> str:
    """ " with its attribute 'name'", where a single attribute is to blame."""
    for name, part in getattr(value, "__dict__", {}).items():
        if name in (*_ANEW, *_ANEW_OF_LAYERS, *_ANEW_OF_MODELS, *_OF_A_TRAINING):
            continue
        try:
            write(part, known)
        except Exception:
            return f" with its attribute {name!r}"
    return ""


# ------------------------------------------------------------------------------------------ callbacks


def write_attributes(callbacks: Sequence, known: Sent) -> tuple[list[dict[str, bytes]], list[str]]:
    """(the attributes of each callback, as bytes; names of the user's own that do not pickle)."""
    found, lost = [], []
    for callback in callbacks:
        mine = {}
        for name, value in vars(callback).items():
            if name in _OF_A_TRAINING:
                continue
            try:
                mine[name] = write(value, known, classes=False)[0]
            except Exception:
                if not type(callback).__module__.startswith("keras."):  # whose files and writers are nobody else's
                    lost.append(f"{type(callback).__name__}.{name}")
        found.append(mine)
    return found, lost


def read_attributes(callbacks: Sequence, attributes: Sequence[dict[str, bytes]], known: Sent) -> None:
    """Gives callbacks the attributes that their copies had."""
    for callback, mine in zip(callbacks, attributes, strict=True):
        for name, data in mine.items():
            with contextlib.suppress(AttributeError):  # a property without a setter
                vars(callback)[name] = read(data, known=known)[0]


# ------------------------------------------------------------------------------------------ Keras' settings


def settings() -> dict[str, Any]:
    """What of Keras' and TensorFlow's global settings a model depends on."""
    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": write(keras.config.dtype_policy())[0],
        "eager": tf.config.functions_run_eagerly(),
        "recursion": sys.getrecursionlimit(),
    }


def apply_settings(given: dict[str, Any]) -> None:
    """Gives another process what `settings` found."""
    for name in ("floatx", "epsilon", "image_data_format"):
        getattr(keras.config, f"set_{name}")(given[name])
    keras.config.set_dtype_policy(read(given["dtype_policy"])[0])
    tf.config.run_functions_eagerly(given["eager"])
    sys.setrecursionlimit(max(sys.getrecursionlimit(), given["recursion"]))  # Keras itself descends into deep models
