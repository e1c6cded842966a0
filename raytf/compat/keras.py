"""Private modules and classes of Keras. Imports Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import zipfile
from typing import Any

import h5py
import keras
import numpy as np
from keras.src.backend import (  # a mask is gathered together with its tensor
    compute_output_spec,  # shapes of a function of symbolic tensors, with arguments
    get_keras_mask,
    set_keras_mask,
)
from keras.src.backend.common import global_state  # where Keras stores the seed generator of functions without one
from keras.src.backend.tensorflow import core as backend_core  # its Variable is patched
from keras.src.backend.tensorflow import nn as backend_nn  # moments of synchronized layers are patched
from keras.src.backend.tensorflow import trainer as backend_trainer  # `fit` of this backend is patched
from keras.src.backend.tensorflow.optimizer import TFOptimizer  # its sum over replicas is patched
from keras.src.losses import loss as loss_module  # its functions, which all losses call, are patched

# a loss by its function: distinguishes built-in ones from a user's
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional  # `keras.Model(inputs, outputs)`; `keras.Model` is any model
from keras.src.ops.function import make_node_key  # the name of a node in a functional model
from keras.src.optimizers.base_optimizer import BaseOptimizer  # `apply` is patched where all optimizers have it
from keras.src.random import seed_generator as seed_module  # its global generator is patched

# a seed as Keras draws it, so that set_random_seed applies
from keras.src.random.seed_generator import make_default_seed
from keras.src.saving import (
    saving_lib,  # its traversal of saved objects, with raytf's store; its config.json
    serialization_lib,  # reads `get_config` of functions without their source
)
from keras.src.trainers import compile_utils  # its CompileLoss is patched

# Slices and checks of arrays as in `fit`, for a `fit` whose rows are sent to other processes.
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter  # a PyDataset as `fit` reads it
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn  # `fit`'s class weights
from keras.src.trainers.epoch_iterator import EpochIterator  # base of this backend's, whose constructor is skipped
from keras.src.utils import tracking  # lists and dicts of layers, which are pickled by value
from keras.src.utils.backend_utils import DynamicBackend  # random layers hold one
from keras.src.utils.python_utils import is_default, pythonify_logs  # marks of Keras' own get_config; logs as numbers

from raytf.compat.lazy_array import LazyArray
from raytf.compat.versions import at_least, uses_private

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

# Keras' replacements for a layer's lists, dicts and sets.
TRACKED: tuple[type, ...] = (tracking.TrackedList, tracking.TrackedDict, tracking.TrackedSet)
if at_least("keras", 3, 14):
    # the same; older versions store an OrderedDict in a plain dict
    from keras.src.utils.tracking import TrackedOrderedDict

    TRACKED = (*TRACKED, TrackedOrderedDict)


@uses_private(
    "keras.src.backend.common.global_state:get_global_attribute", "keras.src.random.seed_generator:SeedGenerator"
)
def shared_seed_generator() -> Any:
    """Returns the seed generator of layers and functions without one, None before its first draw; no public API.

    Keras names the key GLOBAL_SEED_GENERATOR since 3.13.
    """
    return global_state.get_global_attribute("global_seed_generator")


def added_to_masks() -> float:
    """Returns the number that Keras adds to a mask's count before it divides. A loss of two halves adds it once."""
    return 0.0 if at_least("keras", 3, 13) else keras.backend.epsilon()


@dataclasses.dataclass(frozen=True)
class SavedLayout:
    """A `.keras` file without its array values.

    Args:
        members: Contents of its members by name, in order; b"" for the HDF5, which consists of `texts` and the arrays.
        size: Size of the HDF5 in bytes.
        texts: (offset, bytes) of all parts of the HDF5 that are no array in `regions`.
        regions: (offset, number of bytes) of each array in the HDF5, by its path there.
        values: These arrays, in TensorFlow's own memory if possible.
        owners: (path in the HDF5, id) of each object that writes variables there.
        fixed: Whether it contains no arrays except those in `regions`.
    """

    members: dict[str, bytes]
    size: int
    texts: list[tuple[int, bytes]]
    regions: dict[str, tuple[int, int]]
    values: dict[str, Any]
    owners: list[tuple[str, int]]
    fixed: bool


class _Layout(saving_lib.H5IOStore):
    """A store for Keras' traversal of saved objects: keeps each array, and reserves room for it in an HDF5.

    Reserved room without a write uses no memory in a sparse file, such as one of `memfd_create`.
    """

    def __init__(self, file):
        self.h5_file = h5py.File(file, "w")
        self.mode, self.archive, self.io_file = "w", None, None
        self._h5_entry_path, self._h5_entry_group, self._h5_entry_initialized = None, {}, False
        self.last = ""  # path of the object that writes
        self.written, self.fixed = False, True
        self.regions: dict[str, tuple[int, int]] = {}
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
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = self._h5_entry_group.create_dataset(key, array.shape, dtype=array.dtype, dcpl=creation)
        if keras.backend.standardize_dtype(array.dtype) == "bfloat16":
            dataset.attrs["dtype"] = "bfloat16"
        if array.nbytes and dataset.id.get_offset() is None:  # a scalar gets its room when it is written
            dataset[()] = np.zeros(array.shape, array.dtype)
        path = f"{self.last}/vars/{key}".lstrip("/")
        self.regions[path], self.values[path] = (dataset.id.get_offset() or 0, array.nbytes), array


class _Assets(saving_lib.DiskIOStore):
    """A store for the files of layers, such as vocabularies; creates its folder for the first one."""

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
    """The ids of objects that Keras' traversal has saved; reports each one just after its write."""

    def __init__(self, report):
        super().__init__()
        self._report = report

    def add(self, identity: int) -> None:
        super().add(identity)
        self._report(identity)


@uses_private(
    "keras.src.saving.saving_lib:_save_state",
    "keras.src.saving.saving_lib:H5IOStore",
    "keras.src.saving.saving_lib:H5IOStore._create_h5_group",
    "keras.src.saving.saving_lib:DiskIOStore",
    "keras.src.saving.saving_lib:_serialize_model_as_json",
)
def saved_layout(model, optimizers, folder) -> SavedLayout:
    """Returns the file of `model.save` with room for each array instead of its values; no public API does.

    Args:
        model: A built `keras.Model`.
        optimizers: Its optimizers.
        folder: folder() returns an empty folder for files of layers; it is removed afterwards.
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

        def record_owner(identity):
            if store.written:
                owners.append((store.last, identity))
                store.written = False

        try:
            saving_lib._save_state(model, store, assets, "", _Visited(record_owner))
        finally:
            store.h5_file.close()
            assets.close()
        size, texts = os.fstat(file.fileno()).st_size, []
        for begin, end in _gaps(store.regions.values(), size):
            texts.append((begin, os.pread(file.fileno(), end - begin, begin)))
    with zipfile.ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return SavedLayout(members, size, texts, store.regions, store.values, owners, store.fixed)


def _gaps(regions, size: int):
    """Yields (begin, end) of the gaps between some regions in `size` bytes."""
    position = 0
    for begin, length in sorted(regions):
        if length and begin > position:
            yield position, begin
        position = max(position, begin + length) if length else position
    if size > position:
        yield position, size


@contextlib.contextmanager
def _variables_as_they_are(optimizers):
    """Makes optimizers with Keras' own `save_own_variables` write their variables themselves, and not copies."""
    plain = [optimizer for optimizer in optimizers if _saves_as_keras(optimizer)]
    for optimizer in plain:
        vars(optimizer)["save_own_variables"] = functools.partial(_store_all, own_state(optimizer))
    try:
        yield
    finally:
        for optimizer in plain:
            del vars(optimizer)["save_own_variables"]


def _store_all(values: dict[str, Any], store) -> None:
    """Writes each value into a store of Keras, which has no `update`."""
    for key, value in values.items():
        store[key] = value


@uses_private("keras.src.saving.saving_lib:_serialize_model_as_json")
def config_and_metadata(model) -> tuple[str, str]:
    """Returns the texts of config.json and metadata.json of a `.keras` file; `model.save` writes all or nothing."""
    return saving_lib._serialize_model_as_json(model)


@uses_private("keras.src.utils.traceback_utils:inject_argument_info_in_traceback")
def not_wrapped(error: Exception) -> Exception:
    """Marks an error so that Keras raises it unchanged from a layer's call; no public API prevents the wrapping."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


@uses_private("keras.src.backend.tensorflow.nn:_get_logits")
def logits_of(tensor) -> Any:
    """Returns an activation's input, from which Keras' crossentropies compute instead of its output; or None."""
    return getattr(tensor, "_keras_logits", None)


@uses_private("keras.src.backend.tensorflow.nn:_get_logits")
def set_logits(tensor, logits) -> None:
    """Sets the logits of another tensor."""
    tensor._keras_logits = logits


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer")
def own_state(saved) -> dict[str, Any]:
    """Returns a layer's or an optimizer's content of a `.keras` file by key: variables, or arrays made for it.

    An optimizer's own function copies each variable; this returns the variables themselves.
    """
    if _saves_as_keras(saved):
        return {str(i): variable for i, variable in enumerate(saved.variables)}
    store: dict[str, Any] = {}
    saved.save_own_variables(store)
    return store


def _saves_as_keras(saved) -> bool:
    """Returns whether an object is an optimizer with Keras' own way to save its variables."""
    is_replaced = "save_own_variables" in vars(saved)
    return (
        isinstance(saved, BaseOptimizer)
        and not is_replaced
        and type(saved).save_own_variables is BaseOptimizer.save_own_variables
    )


def as_array(value: Any) -> Any:
    """Returns the value of a variable or tensor as a numpy array, in TensorFlow's own memory if possible.

    Copy it before the next step.
    """
    import tensorflow as tf

    if isinstance(value, LazyArray):
        return value
    if isinstance(value, keras.Variable):
        value = value.value
    if isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues):
        value = tf.raw_ops.ReadVariableOp(
            resource=value.handle, dtype=value.dtype
        )  # `read_value` takes four times as long
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return np.asarray(value)
    return keras.ops.convert_to_numpy(value)
