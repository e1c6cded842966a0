"""Modules, classes and attributes of TensorFlow that are not public. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.cache_op import gen_dataset_ops  # where layers of datasets are made
from tensorflow.python.data.ops.iterator_ops import OwnedIterator  # the wait for a batch is measured around its methods
from tensorflow.python.distribute import distribute_lib, mirrored_run  # a merge call of one replica is a plain call
from tensorflow.python.distribute.ps_values import AggregatingVariable  # variables that replicas share
from tensorflow.python.distribute.values import (
    DistributedVariable,  # variables with a value for each replica
    PerReplicaSpec,  # of a batch that is divided over replicas
)
from tensorflow.python.eager import (
    context,  # eager mode within a graph, and the token of a coordinator's cluster
    record,  # whether a tape may record: nothing public tells
)
from tensorflow.python.eager.polymorphic_function import polymorphic_function  # counts traces, and warns of many
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function  # `tf.function`'s class: pickled
from tensorflow.python.framework import op_def_registry  # whether an operation is stateful
from tensorflow.python.framework.ops import gradient_registry  # keeps the graph of every custom gradient
from tensorflow.python.ops import script_ops  # Python functions by name, which a graph from elsewhere calls
from tensorflow.python.ops.script_ops import FuncRegistry  # where all Python functions are called
from tensorflow.python.trackable.data_structures import (
    TrackableDataStructure as TrackedStructure,  # lists, dicts and tuples that are attributes of a module: pickled
)

from raytf.compat.patching import patched, replacing
from raytf.compat.versions import uses

__all__ = [
    "AggregatingVariable",
    "DistributedVariable",
    "FuncRegistry",
    "Function",
    "OwnedIterator",
    "TrackedStructure",
    "context",
    "distribute_lib",
    "mirrored_run",
]


@uses("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._in_multi_worker_mode")
def in_multi_worker_mode(strategy) -> bool:
    """Whether a MultiWorkerMirroredStrategy has other processes: the resolver that knows may be the user's."""
    return strategy.extended._in_multi_worker_mode()


@uses("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._is_chief")
def is_chief(strategy) -> bool:
    """Whether this process is its chief; the public way needs the resolver."""
    return bool(strategy.extended._is_chief)


@uses("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._id_in_cluster")
def rank(strategy) -> int:
    """The number of this process among its workers; as for `is_chief`."""
    return strategy.extended._id_in_cluster


@uses("tensorflow.python.data.ops.iterator_ops:OwnedIterator._dataset")
def dataset_of(iterator):
    """What an iterator goes through; None if it was made of a resource. Nothing public tells."""
    return getattr(iterator, "_dataset", None)


@uses("tensorflow.python.data.ops.iterator_ops:OwnedIterator._iterator_resource")
def take_resource(iterator):
    """What of an iterator TensorFlow must end, which the iterator then has no more; None if it has none."""
    return vars(iterator).pop("_iterator_resource", None)


@uses("tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs")
def inputs_of(dataset) -> list:
    """The datasets that a dataset was made from; nothing public tells."""
    return dataset._inputs()


@uses("tensorflow.python.data.ops.dataset_ops:DatasetV2._functions")
def functions_of(dataset) -> list:
    """The functions of a dataset (`map`, `filter`, ...), of which one may draw by chance."""
    return dataset._functions()


@uses("tensorflow.python.data.ops.shuffle_op:_ShuffleDataset._reshuffle_each_iteration")
def reshuffles(dataset) -> bool:
    """Returns whether a dataset is a shuffle with another order in each iteration; nothing public tells."""
    return bool(getattr(dataset, "_reshuffle_each_iteration", False))


@uses("tensorflow.python.eager.context:Context._seed", "tensorflow.python.eager.context:Context._rng")
@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Within it `tf.random`'s global seed is this one; `set_seed` would drop how far others have drawn."""
    here = context.context()
    before = here._seed, getattr(here, "_rng", None)
    here._seed, here._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        here._seed, here._rng = before


# What makes the layers that may run in another order than they say.
_making = threading.RLock()
_PARALLEL = ("parallel_map_dataset_v2", "parallel_interleave_dataset_v4", "parallel_batch_dataset")


@contextlib.contextmanager
def making_alike(caches: list) -> Iterator[None]:
    """Datasets that are made within it keep their order, whatever `deterministic=` says, and take caches from a list.

    Args:
        caches: in memory, in the order in which `Dataset.cache()` is called; those that are missing are added.
    """
    taken, mine = iter(range(1 << 30)), threading.get_ident()

    def cache(original, name=None):
        if threading.get_ident() != mine or not tf.executing_eagerly():  # of each dataset that a function makes, one
            return original(name)
        number = next(taken)
        if number == len(caches):
            caches.append(gen_dataset_ops.anonymous_memory_cache())
        return caches[number].handle

    def in_order(original, *args, **kwargs):
        return original(*args, **kwargs | ({"deterministic": "true"} if threading.get_ident() == mine else {}))

    with _making, contextlib.ExitStack() as ends:
        for name, function in {"dummy_memory_cache": cache, **dict.fromkeys(_PARALLEL, in_order)}.items():
            new = replacing(getattr(gen_dataset_ops, name), function)
            ends.enter_context(patched(gen_dataset_ops, name, new))
        yield


@uses(
    "tensorflow.python.data.ops.batch_op:_BatchDataset._drop_remainder",
    "tensorflow.python.data.ops.batch_op:_ParallelBatchDataset._drop_remainder",
    "tensorflow.python.data.ops.padded_batch_op:_PaddedBatchDataset._drop_remainder",
    "tensorflow.python.data.ops.batch_op:_BatchDataset._batch_size",
    "tensorflow.python.data.ops.batch_op:_ParallelBatchDataset._batch_size",
    "tensorflow.python.data.ops.padded_batch_op:_PaddedBatchDataset._batch_size",
)
def dropping_batch(dataset) -> int | None:
    """Returns the batch size of a dataset that batches and leaves out a smaller last one, else None; nothing public
    tells."""
    drops = getattr(dataset, "_drop_remainder", None)
    return int(dataset._batch_size) if drops is not None and bool(drops) else None


@uses("tensorflow.python.distribute.values:PerReplicaSpec._value_specs")
def replica_spec(spec):
    """Returns the type of the first replica's part of a batch, whose type nothing public takes apart."""
    return spec._value_specs[0] if isinstance(spec, PerReplicaSpec) else spec


@uses(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._python_function",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._autograph",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._jit_compile",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._reduce_retracing",
)
def function_arguments(function) -> tuple[Any, dict[str, Any]]:
    """(Python function, arguments of `tf.function`) that a function was made with: it cannot be pickled itself."""
    return function._python_function, {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "jit_compile": function._jit_compile,
        "reduce_retracing": function._reduce_retracing,
    }


@uses("tensorflow.python.eager.polymorphic_function.polymorphic_function:_frequent_tracing_detector_manager")
def forget_traces() -> None:
    """Has TensorFlow count traces anew: it would warn of those of a process' next model, which are none too many."""
    kind = type(polymorphic_function._frequent_tracing_detector_manager)
    polymorphic_function._frequent_tracing_detector_manager = kind()


def traced_apart(function: Callable, **options):
    """Returns `tf.function(function, **options)`, whose traces count for themselves.

    TensorFlow counts traces by a function's code, and warns of retracing where different functions have the same. A
    partial has no code.
    """
    return tf.function(functools.partial(function), **options)


@uses("tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction.inference_fn")
def without_captures(traced):
    """What `get_concrete_function` gave, without the variables that it was traced with; graphs that call it keep it."""
    return traced.inference_fn


@uses("tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction.call_with_captures")
def call_with_captures(function, arguments, captures) -> None:
    """Calls a function `without_captures` on variables in the place of those that it was traced with."""
    function.call_with_captures(arguments, {}, captures)


@uses("tensorflow.python.eager.context:Context.get_compiler_ir")
def try_to_compile(traced, specs) -> None:
    """Has XLA translate what `get_concrete_function` of a `tf.function(jit_compile=True)` gave, and raises what it
    cannot; else it is tried at the first call. The public way draws a random number, to learn of a device."""
    context.context().get_compiler_ir(
        device_name="/device:CPU:0",
        platform_name=None,
        function_name=traced.name,
        flat_args=specs,
        captured_inputs=traced.captured_inputs,
        stage="hlo",
    )


@uses("tensorflow.python.framework.op_def_registry:get")
def is_stateful(kind: str) -> bool:
    """Whether operations of a type do more than compute; unknown ones do."""
    definition = op_def_registry.get(kind)
    return definition is None or definition.is_stateful


@uses(
    "tensorflow.python.ops.lookup_ops:StaticHashTable._default_value",
    "tensorflow.python.ops.lookup_ops:MutableHashTable._default_value",
)
def default_of(table):
    """The value of a lookup table for keys that it has not; `export` leaves it out."""
    return table._default_value


def structure_of(tracked: TrackedStructure):
    """Returns the plain list, dict or tuple of what TensorFlow keeps in its place as an attribute of a module."""
    if isinstance(tracked, list):
        return list(tracked)
    return tracked.__wrapped__ if hasattr(tracked, "__wrapped__") else list(tracked)


@uses("tensorflow.python.ops.script_ops:_py_funcs", "tensorflow.python.ops.script_ops:FuncRegistry._funcs")
def register_function(token: str, function) -> None:
    """Makes a Python function known in this process by a name that a graph of another process calls.

    `tf.numpy_function` chooses its own names, known in its process alone. References are weak.
    """
    script_ops._py_funcs._funcs[token] = function


_registering = threading.local()
_giving: weakref.WeakSet = weakref.WeakSet()


@contextlib.contextmanager
def giving_memory() -> Iterator[None]:
    """Python functions that this thread makes known to TensorFlow in the block give it arrays that nobody else uses."""
    before, _registering.giving = getattr(_registering, "giving", False), True
    try:
        yield
    finally:
        _registering.giving = before


def registered(function: Callable) -> None:
    """To be told of each Python function that is made known to TensorFlow."""
    if getattr(_registering, "giving", False):
        _giving.add(function)


def gives_memory(function: Callable | None) -> bool:
    """Whether a function was made known within `giving_memory`."""
    return function in _giving


@uses("tensorflow.python.framework.registry:Registry._registry")
def forget_custom_gradients() -> None:
    """Drops the gradients of `tf.custom_gradient`s that were traced, and with them their graphs: nothing else does."""
    registry = gradient_registry._registry
    for name in [name for name in registry if name.startswith("CustomGradient-")]:
        del registry[name]


@uses("tensorflow.python.autograph.pyct.loader:load_source")
def autograph_loader():
    """The module by which AutoGraph makes files of converted functions; that it shall make none cannot be said."""
    from tensorflow.python.autograph.pyct import loader  # imported late: a process without AutoGraph needs none

    return loader


def may_record() -> bool:
    """Whether a tape of this thread may record what is computed now."""
    return record.could_possibly_record()


@uses("tensorflow.python.distribute.mirrored_run:_MirroredReplicaContext._merge_call")
def mirrored_replica_context() -> type:
    """The class of a replica of several in a process; its merge call is patched."""
    return mirrored_run._MirroredReplicaContext


@uses("tensorflow.python.distribute.distribute_lib:ReplicaContextBase._merge_call")
def plain_merge_call(replica, fn, args, kwargs):
    """A merge call as it is made where there is one replica: a call."""
    return distribute_lib.ReplicaContextBase._merge_call(replica, fn, args, kwargs)
