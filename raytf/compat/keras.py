"""Modules and classes of Keras that are not public. Imports Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import zipfile
from typing import Any

import h5py
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
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter  # a PyDataset as `fit` reads it
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn  # `fit`'s weights of classes
from keras.src.trainers.epoch_iterator import EpochIterator  # base of this backend's, whose constructor is passed over
from keras.src.utils import tracking  # lists and dicts of layers, which travel by value
from keras.src.utils.backend_utils import DynamicBackend  # random layers hold one
from keras.src.utils.python_utils import is_default, pythonify_logs  # marks of Keras' own get_config; logs as numbers

from raytf.compat.versions import at_least, uses

__all__ = [
    "TRACKED",
    "BaseOptimizer",
    "DynamicBackend",
    "EpochIterator",
    "Functional",
    "LossFunctionWrapper",
    "PyDatasetAdapter",
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
    "make_class_weight_map_fn",
    "make_default_seed",
    "make_node_key",
    "not_wrapped",
    "own_state",
    "pythonify_logs",
    "saved_layout",
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


@dataclasses.dataclass(frozen=True)
class SavedLayout:
    """A `.keras` file without the numbers in it.

    Args:
        members: the content of its members by name, in order; b"" for the HDF5, which is `texts` and the arrays.
        size: bytes of the HDF5.
        texts: (offset, bytes) of all in the HDF5 that is no array with a place.
        places: (offset, bytes) of each array in the HDF5, by its path there.
        values: these arrays, of TensorFlow's own memory where that can be.
        owners: (path in the HDF5, id) of each object that writes variables there.
        fixed: no array but those with a place is in it.
    """

    members: dict[str, bytes]
    size: int
    texts: list[tuple[int, bytes]]
    places: dict[str, tuple[int, int]]
    values: dict[str, Any]
    owners: list[tuple[str, int]]
    fixed: bool


class _Layout(saving_lib.H5IOStore):
    """A store for Keras' walk over what it saves: makes room for each array in an HDF5, and keeps the array itself.

    Room that is not written to takes none in a file without blocks there, as that of `memfd_create`.
    """

    def __init__(self, file):
        self.h5_file = h5py.File(file, "w")
        self.mode, self.archive, self.io_file = "w", None, None
        self._h5_entry_path, self._h5_entry_group, self._h5_entry_initialized = None, {}, False
        self.last = ""  # the path of the object that writes
        self.written, self.fixed = False, True
        self.places: dict[str, tuple[int, int]] = {}
        self.values: dict[str, Any] = {}

    def make(self, path, metadata=None):
        self.last, self.written = path, False
        return super().make(path, metadata)

    def __setitem__(self, key, value):
        self.written = True
        array = as_array(value)
        if array.dtype.hasobject:
            self.fixed = False
            super().__setitem__(key, value)
            return
        if not self._h5_entry_initialized:
            self._create_h5_group(self._h5_entry_path)
        room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        made = self._h5_entry_group.create_dataset(key, array.shape, dtype=array.dtype, dcpl=room)
        if keras.backend.standardize_dtype(array.dtype) == "bfloat16":
            made.attrs["dtype"] = "bfloat16"
        if array.nbytes and made.id.get_offset() is None:  # a number alone has room once it is written
            made[()] = array
        path = f"{self.last}/vars/{key}".lstrip("/")
        self.places[path], self.values[path] = (made.id.get_offset() or 0, array.nbytes), array


class _Assets(saving_lib.DiskIOStore):
    """A store for the files of layers, such as vocabularies; its folder is made when the first one comes."""

    def __init__(self, archive, folder):
        self.mode, self.root_path, self.archive, self.tmp_dir = "w", "assets", archive, None
        self._folder = folder

    def make(self, path):
        if self.tmp_dir is None:
            self.tmp_dir = self._folder()
            self.working_dir = os.path.join(self.tmp_dir, self.root_path)
            os.mkdir(self.working_dir)
        return super().make(path)

    def close(self):
        if self.tmp_dir is not None:
            super().close()


class _Visited(set):
    """The ids of what Keras' walk has saved, each told as it is added, just after it has written."""

    def __init__(self, tell):
        super().__init__()
        self._tell = tell

    def add(self, identity: int) -> None:
        super().add(identity)
        self._tell(identity)


@uses(
    "keras.src.saving.saving_lib:_save_state",
    "keras.src.saving.saving_lib:H5IOStore",
    "keras.src.saving.saving_lib:H5IOStore._create_h5_group",
    "keras.src.saving.saving_lib:DiskIOStore",
    "keras.src.saving.saving_lib:_serialize_model_as_json",
)
def saved_layout(model, optimizers, folder) -> SavedLayout:
    """What `model.save` would write, with the room for each array in the place of its numbers; nothing public tells it.

    Args:
        model: a built `keras.Model`.
        optimizers: that it has.
        folder: folder() is an empty folder, for what layers write into files; it is removed here.
    """
    packed, owners = io.BytesIO(), []
    with (
        open(os.memfd_create("raytf_layout"), "r+b", buffering=0) as file,
        zipfile.ZipFile(packed, "w") as archive,
        _variables_as_they_are(optimizers),
    ):
        config, metadata = saving_lib._serialize_model_as_json(model)
        archive.writestr("metadata.json", metadata)
        archive.writestr("config.json", config)
        archive.writestr("model.weights.h5", b"")
        store, assets = _Layout(file), _Assets(archive, folder)

        def tell(identity):
            if store.written:
                owners.append((store.last, identity))
                store.written = False

        try:
            saving_lib._save_state(model, store, assets, "", _Visited(tell))
        finally:
            store.h5_file.close()
            assets.close()
        size, texts = os.fstat(file.fileno()).st_size, []
        for begin, end in _between(store.places.values(), size):
            texts.append((begin, os.pread(file.fileno(), end - begin, begin)))
    with zipfile.ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return SavedLayout(members, size, texts, store.places, store.values, owners, store.fixed)


def _between(places, size: int):
    """(begin, end) of what of so many bytes is in none of some places."""
    at = 0
    for begin, length in sorted(places):
        if length and begin > at:
            yield at, begin
        at = max(at, begin + length) if length else at
    if size > at:
        yield at, size


@contextlib.contextmanager
def _variables_as_they_are(optimizers):
    """Optimizers that write their variables alone give these within it, and not a copy of each."""
    given = [its for its in optimizers if type(its).save_own_variables is BaseOptimizer.save_own_variables]
    for its in given:
        vars(its)["save_own_variables"] = lambda store, its=its: _store_all(store, own_state(its))
    try:
        yield
    finally:
        for its in given:
            del vars(its)["save_own_variables"]


def _store_all(store, found: dict[str, Any]) -> None:
    """Puts each into a store of Keras, which has no `update`."""
    for key, value in found.items():
        store[key] = value


@uses("keras.src.saving.saving_lib:_serialize_model_as_json")
def config_and_metadata(model) -> tuple[str, str]:
    """The texts of config.json and metadata.json of a `.keras` file; `model.save` writes all or nothing."""
    return saving_lib._serialize_model_as_json(model)


@uses("keras.src.utils.traceback_utils:inject_argument_info_in_traceback")
def not_wrapped(error: Exception) -> Exception:
    """An error that Keras is to let pass as it is out of a layer's call, and not to put into another one's text."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


@uses("keras.src.backend.tensorflow.nn:_get_logits")
def logits_of(tensor) -> Any:
    """What an activation was given, by which Keras' crossentropies compute in the place of a tensor; or None."""
    return getattr(tensor, "_keras_logits", None)


@uses("keras.src.backend.tensorflow.nn:_get_logits")
def set_logits(tensor, logits) -> None:
    """Notes them of another tensor."""
    tensor._keras_logits = logits


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
