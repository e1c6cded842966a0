"""Modules and classes of Keras that are not public. Imports Keras."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend import (  # a mask goes with its tensor, which is gathered
    compute_output_spec,  # shapes of a function of symbolic tensors, with arguments
    get_keras_mask,
    set_keras_mask,
)
from keras.src.backend.common import global_state  # where Keras keeps the seed generator of functions without one
from keras.src.backend.tensorflow import core as backend_core  # its Variable is patched
from keras.src.backend.tensorflow import nn as backend_nn  # moments of synchronized layers are patched
from keras.src.backend.tensorflow import trainer as backend_trainer  # `fit` of this backend is patched
from keras.src.backend.tensorflow.optimizer import TFOptimizer  # its sum over replicas is patched
from keras.src.losses import loss as loss_module  # its functions, which all losses call, are patched
from keras.src.losses.losses import LossFunctionWrapper  # a loss by its function: tells a built-in one from a user's
from keras.src.models.functional import Functional  # `keras.Model(inputs, outputs)`; `keras.Model` is any model
from keras.src.ops.function import make_node_key  # the name of a node in a functional model
from keras.src.optimizers.base_optimizer import BaseOptimizer  # `apply` is patched where all optimizers have it
from keras.src.random import seed_generator as seed_module  # its global generator is patched
from keras.src.random.seed_generator import make_default_seed  # a seed as Keras draws it, so that set_random_seed holds
from keras.src.saving import (
    saving_lib,  # its walk over what is saved, with a store of our own; its config.json
    serialization_lib,  # `get_config` of functions is read without their source
)
from keras.src.trainers import compile_utils  # its CompileLoss is patched

# Slices and checks of arrays as `fit` makes them, for a `fit` whose rows go to other processes.
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.epoch_iterator import EpochIterator  # base of this backend's, whose constructor is passed over
from keras.src.utils import tracking  # lists and dicts of layers, which travel by value
from keras.src.utils.backend_utils import DynamicBackend  # random layers hold one
from keras.src.utils.python_utils import is_default, pythonify_logs  # marks of Keras' own get_config; logs as numbers

from raytf.compat.names import uses
from raytf.compat.versions import at_least

__all__ = [
    "TRACKED",
    "BaseOptimizer",
    "DynamicBackend",
    "EpochIterator",
    "Functional",
    "LossFunctionWrapper",
    "TFOptimizer",
    "added_to_masks",
    "array_slicing",
    "as_array",
    "backend_core",
    "backend_nn",
    "backend_trainer",
    "compile_utils",
    "compute_output_spec",
    "config_and_metadata",
    "data_adapter_utils",
    "get_keras_mask",
    "is_default",
    "loss_module",
    "make_default_seed",
    "make_node_key",
    "own_state",
    "pythonify_logs",
    "saved_paths",
    "saving_lib",
    "seed_module",
    "serialization_lib",
    "set_keras_mask",
    "shared_seed_generator",
    "tracking",
]

# What Keras puts in the place of a layer's lists, dicts and sets.
TRACKED: tuple[type, ...] = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)
if at_least("keras", 3, 14):
    from keras.src.utils.tracking import TrackedOrderedDict  # as above; older ones keep an OrderedDict in a plain dict

    TRACKED = (*TRACKED, TrackedOrderedDict)


@uses("keras.src.backend.common.global_state:get_global_attribute", "keras.src.random.seed_generator:SeedGenerator")
def shared_seed_generator() -> Any:
    """The seed generator of layers and functions without one, None before its first draw; nothing public gives it.

    Keras names the key GLOBAL_SEED_GENERATOR since 3.13.
    """
    return global_state.get_global_attribute("global_seed_generator")


def added_to_masks() -> float:
    """What Keras adds to the number of a mask's values before it divides by it: a loss of two halves needs it once."""
    return 0.0 if at_least("keras", 3, 13) else keras.backend.epsilon()


class _Recorder(saving_lib.H5IOStore):
    """A store for Keras' walk over what it saves: notes under which path each object would write, and keeps nothing."""

    def __init__(self):
        self.paths: list[str] = []
        self.written = False
        self.mode = "w"

    def make(self, path, metadata=None):
        self.paths.append(path)
        self.written = False
        return self

    def __bool__(self):
        return True

    def __setitem__(self, key, value):
        self.written = True

    def close(self):
        pass


class _Visited(set):
    """The ids of what Keras' walk has saved, each told as it is added, just after it has written."""

    def __init__(self, tell):
        super().__init__()
        self._tell = tell

    def add(self, identity: int) -> None:
        super().add(identity)
        self._tell(identity)


@uses("keras.src.saving.saving_lib:_save_state", "keras.src.saving.saving_lib:H5IOStore")
def saved_paths(model) -> list[tuple[str, int]]:
    """(path in the HDF5 of a `.keras` file, id) of each object that writes variables there; nothing public tells it."""
    store, found = _Recorder(), []

    def tell(identity):
        if store.written:
            found.append((store.paths[-1], identity))
            store.written = False

    saving_lib._save_state(model, store, None, "", _Visited(tell))
    return found


@uses("keras.src.saving.saving_lib:_serialize_model_as_json")
def config_and_metadata(model) -> tuple[str, str]:
    """The texts of config.json and metadata.json of a `.keras` file; `model.save` writes all or nothing."""
    return saving_lib._serialize_model_as_json(model)


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer")
def own_state(saved) -> dict[str, Any]:
    """What a layer or an optimizer would write into a `.keras` file, by key: variables, or arrays made for it.

    An optimizer's own function copies each variable; here they are given as they are.
    """
    if isinstance(saved, BaseOptimizer) and type(saved).save_own_variables is BaseOptimizer.save_own_variables:
        return {str(i): variable for i, variable in enumerate(saved.variables)}
    store: dict[str, Any] = {}
    saved.save_own_variables(store)
    return store


def as_array(value: Any) -> Any:
    """The value of a variable or tensor as a numpy array, of TensorFlow's own memory where that can be: to be copied
    before the next step."""
    import numpy as np
    import tensorflow as tf

    if isinstance(value, keras.Variable):
        value = value.value
    if isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues):
        value = tf.raw_ops.ReadVariableOp(
            resource=value.handle, dtype=value.dtype
        )  # `read_value` takes four times that
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return np.asarray(value)
    return keras.ops.convert_to_numpy(value)
