"""Private modules, classes and attributes of TensorFlow. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe  # lets tapes record in an init_scope: no public API
from tensorflow.python.data.ops.cache_op import gen_dataset_ops  # creates the operations of datasets
from tensorflow.python.data.ops.iterator_ops import OwnedIterator  # its methods are timed, for the wait for a batch
from tensorflow.python.distribute import distribute_lib, mirrored_run  # a merge call of one replica is a plain call
from tensorflow.python.distribute.ps_values import AggregatingVariable  # variables that replicas share
from tensorflow.python.distribute.values import (
    DistributedVariable,  # variables with a value for each replica
    PerReplicaSpec,  # of a batch that is split over replicas
)
from tensorflow.python.eager import (
    context,  # eager mode within a graph, and the token of a coordinator's cluster
    forwardprop_util,  # whether a forward accumulator has tangents
    record,  # whether a tape may record, and a linear computation for tapes: no public API
)
from tensorflow.python.eager.polymorphic_function import polymorphic_function  # counts traces, and warns of many

# the class of `tf.function`'s results: pickled
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import (
    op_def_registry,  # whether an operation is stateful
    random_seed,  # its `get_seed` gives operations their seeds: patched
)
from tensorflow.python.framework.ops import gradient_registry  # keeps the graph of every custom gradient
from tensorflow.python.ops import script_ops  # Python functions by name, for calls from a graph of another process
from tensorflow.python.ops.script_ops import FuncRegistry  # calls all Python functions
from tensorflow.python.trackable.data_structures import (
    TrackableDataStructure as TrackedStructure,  # lists, dicts and tuples that are attributes of a module: pickled
)

from raytf.compat.patching import patched, replacing
from raytf.compat.versions import uses_private

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
    "random_seed",
]


@uses_private(
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._in_multi_worker_mode"
)
def in_multi_worker_mode(strategy) -> bool:
    """Returns whether a MultiWorkerMirroredStrategy has other processes; its public resolver may be the user's."""
    return strategy.extended._in_multi_worker_mode()


@uses_private("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._is_chief")
def is_chief(strategy) -> bool:
    """Returns whether this process is the strategy's chief; the public way needs the resolver."""
    return bool(strategy.extended._is_chief)


@uses_private("tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._id_in_cluster")
def rank(strategy) -> int:
    """Returns the rank of this process among the strategy's workers; the public way needs the resolver."""
    return strategy.extended._id_in_cluster


@uses_private("tensorflow.python.data.ops.iterator_ops:OwnedIterator._dataset")
def dataset_of(iterator):
    """Returns the dataset of an iterator; None if it was made from a resource. No public API."""
    return getattr(iterator, "_dataset", None)


@uses_private("tensorflow.python.data.ops.iterator_ops:OwnedIterator._iterator_resource")
def take_resource(iterator):
    """Detaches and returns the resource of an iterator that TensorFlow must end; None if it has none."""
    return vars(iterator).pop("_iterator_resource", None)


@uses_private("tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs")
def inputs_of(dataset) -> list:
    """Returns the datasets that a dataset was made from; no public API."""
    return dataset._inputs()


@uses_private("tensorflow.python.data.ops.dataset_ops:DatasetV2._functions")
def functions_of(dataset) -> list:
    """Returns the functions of a dataset (`map`, `filter`, ...), which may use random numbers; no public API."""
    return dataset._functions()


@uses_private("tensorflow.python.data.ops.shuffle_op:_ShuffleDataset._reshuffle_each_iteration")
def reshuffles(dataset) -> bool:
    """Returns whether a dataset is a shuffle with another order in each iteration; no public API."""
    return bool(getattr(dataset, "_reshuffle_each_iteration", False))


@uses_private("tensorflow.python.eager.context:Context._seed", "tensorflow.python.eager.context:Context._rng")
@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Sets `tf.random`'s global seed for a while; `set_seed` would reset the counters of others."""
    eager_context = context.context()
    previous = eager_context._seed, getattr(eager_context, "_rng", None)
    eager_context._seed, eager_context._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        eager_context._seed, eager_context._rng = previous


@uses_private("tensorflow.python.eager.context:Context._config", "tensorflow.python.eager.context:Context._initialized")
def disable_thread_spinning() -> None:
    """Lets idle threads of TensorFlow sleep at once, which otherwise look for work for a while; no public API.

    It has no effect after TensorFlow's first operation in this process.
    """
    eager_context = context.context()
    if not eager_context._initialized:
        config = eager_context._config or tf.compat.v1.ConfigProto()
        config.experimental.disable_thread_spinning = True
        eager_context._config = config


# Operations of datasets whose order may differ from the declared one.
_making = threading.RLock()
_PARALLEL = ("parallel_map_dataset_v2", "parallel_interleave_dataset_v4", "parallel_batch_dataset")


@contextlib.contextmanager
def deterministic_datasets(caches: list) -> Iterator[None]:
    """Builds datasets that keep their order, for any `deterministic=`, and that use caches from a list.

    Args:
        caches: Caches in memory, in the order of the `Dataset.cache()` calls; missing ones are appended.
    """
    taken, own_thread = iter(range(1 << 30)), threading.get_ident()

    def cache(original, name=None):
        # a function creates one for each of its datasets
        if threading.get_ident() != own_thread or not tf.executing_eagerly():
            return original(name)
        number = next(taken)
        if number == len(caches):
            caches.append(gen_dataset_ops.anonymous_memory_cache())
        return caches[number].handle

    def in_order(original, *args, **kwargs):
        return original(*args, **kwargs | ({"deterministic": "true"} if threading.get_ident() == own_thread else {}))

    with _making, contextlib.ExitStack() as ends:
        for name, function in {"dummy_memory_cache": cache, **dict.fromkeys(_PARALLEL, in_order)}.items():
            new = replacing(getattr(gen_dataset_ops, name), function)
            ends.enter_context(patched(gen_dataset_ops, name, new))
        yield


@uses_private(
    "tensorflow.python.data.ops.batch_op:_BatchDataset._drop_remainder",
    "tensorflow.python.data.ops.batch_op:_ParallelBatchDataset._drop_remainder",
    "tensorflow.python.data.ops.padded_batch_op:_PaddedBatchDataset._drop_remainder",
    "tensorflow.python.data.ops.batch_op:_BatchDataset._batch_size",
    "tensorflow.python.data.ops.batch_op:_ParallelBatchDataset._batch_size",
    "tensorflow.python.data.ops.padded_batch_op:_PaddedBatchDataset._batch_size",
)
def dropping_batch(dataset) -> int | None:
    """Returns the batch size of a dataset that batches and drops a smaller last one, else None; no public API."""
    drops = getattr(dataset, "_drop_remainder", None)
    return int(dataset._batch_size) if drops is not None and bool(drops) else None


@uses_private("tensorflow.python.distribute.values:PerReplicaSpec._value_specs")
def replica_spec(spec):
    """Returns the type of a batch's part for the first replica; no public API splits the type."""
    return spec._value_specs[0] if isinstance(spec, PerReplicaSpec) else spec


@uses_private(
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._python_function",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._autograph",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._jit_compile",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function._reduce_retracing",
)
def function_arguments(function) -> tuple[Any, dict[str, Any]]:
    """Returns (Python function, arguments of `tf.function`) of a function, as it cannot be pickled itself."""
    return function._python_function, {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "jit_compile": function._jit_compile,
        "reduce_retracing": function._reduce_retracing,
    }


@uses_private("tensorflow.python.eager.polymorphic_function.polymorphic_function:_frequent_tracing_detector_manager")
def forget_traces() -> None:
    """Resets TensorFlow's count of traces: it would warn of a process' next models, although each has few traces."""
    kind = type(polymorphic_function._frequent_tracing_detector_manager)
    polymorphic_function._frequent_tracing_detector_manager = kind()


def separate_function(function: Callable, **options):
    """Returns `tf.function(function, **options)` with its own count of traces.

    TensorFlow counts traces by a function's code, and warns of retracing if several functions have the same code. A
    partial has no code.
    """
    return tf.function(functools.partial(function), **options)


@uses_private("tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction.inference_fn")
@uses_private("tensorflow.python.distribute.coordinator.values:RemoteValueImpl._error")
def failed_with(value: tf.distribute.coordinator.RemoteValue, error: BaseException) -> bool:
    """Returns whether a scheduled function has raised this error; unlike `fetch`, it does not wait for the value."""
    return getattr(value, "_error", None) is error


def without_captures(traced):
    """Returns a concrete function without the variables of its trace; graphs that call it keep it alive."""
    return traced.inference_fn


@uses_private("tensorflow.python.eager.polymorphic_function.atomic_function:AtomicFunction.call_with_captures")
def call_with_captures(function, arguments, captures):
    """Returns the result of a function of `without_captures`, with variables that replace those of its trace."""
    return function.call_with_captures(arguments, {}, captures)


@uses_private("tensorflow.python.eager.context:Context.get_compiler_ir")
def try_to_compile(traced, specs) -> None:
    """Compiles a concrete function of `tf.function(jit_compile=True)` to HLO, to raise XLA's errors before its first
    call.

    The public way draws a random number to find its device.
    """
    context.context().get_compiler_ir(
        device_name="/device:CPU:0",
        platform_name=None,
        function_name=traced.name,
        flat_args=specs,
        captured_inputs=traced.captured_inputs,
        stage="hlo",
    )


@uses_private("tensorflow.python.framework.op_def_registry:get")
def is_stateful(kind: str) -> bool:
    """Returns whether operations of a type have state or side effects; True if unknown."""
    definition = op_def_registry.get(kind)
    return definition is None or definition.is_stateful


@uses_private(
    "tensorflow.python.ops.lookup_ops:StaticHashTable._default_value",
    "tensorflow.python.ops.lookup_ops:MutableHashTable._default_value",
    "tensorflow.python.ops.lookup_ops:DenseHashTable._default_value",
)
def default_of(table):
    """Returns the value of a lookup table for missing keys; `export` omits it."""
    return table._default_value


@uses_private(
    "tensorflow.python.ops.lookup_ops:StaticVocabularyTable._table",
    "tensorflow.python.ops.lookup_ops:StaticVocabularyTable._num_oov_buckets",
)
def vocabulary_of(table):
    """Returns (the inner table of a vocabulary or None, its number of buckets for other words)."""
    return table._table, table._num_oov_buckets


@uses_private(
    "tensorflow.python.ops.lookup_ops:DenseHashTable._empty_key",
    "tensorflow.python.ops.lookup_ops:DenseHashTable._deleted_key",
)
def reserved_keys_of(table):
    """Returns the keys of a dense table that mark empty and deleted entries."""
    return table._empty_key, table._deleted_key


def structure_of(tracked: TrackedStructure):
    """Returns the plain list, dict or tuple of TensorFlow's wrapper for an attribute of a module."""
    if isinstance(tracked, list):
        return list(tracked)
    return tracked.__wrapped__ if hasattr(tracked, "__wrapped__") else list(tracked)


@uses_private("tensorflow.python.ops.script_ops:_py_funcs", "tensorflow.python.ops.script_ops:FuncRegistry._funcs")
def register_function(token: str, function) -> None:
    """Registers a Python function in this process under a name that a graph of another process calls.

    `tf.numpy_function` chooses its own names, which only its process has. References are weak.
    """
    script_ops._py_funcs._funcs[token] = function


_registering = threading.local()
_releasing: weakref.WeakSet = weakref.WeakSet()


@contextlib.contextmanager
def releasing_functions() -> Iterator[None]:
    """Marks Python functions that this thread registers with TensorFlow meanwhile: no one else uses their arrays."""
    previous, _registering.giving = getattr(_registering, "giving", False), True
    try:
        yield
    finally:
        _registering.giving = previous


def registered(function: Callable) -> None:
    """Records a newly registered Python function; called for each one."""
    if getattr(_registering, "giving", False):
        _releasing.add(function)


def releases_function(function: Callable | None) -> bool:
    """Returns whether a function was registered within `releasing_functions`."""
    return function in _releasing


@uses_private("tensorflow.python.framework.registry:Registry._registry")
def forget_custom_gradients() -> None:
    """Removes the traced gradients of `tf.custom_gradient`s, and with them their graphs; TensorFlow never does."""
    registry = gradient_registry._registry
    for name in [name for name in registry if name.startswith("CustomGradient-")]:
        del registry[name]


@uses_private("tensorflow.python.autograph.pyct.loader:load_source")
def autograph_loader():
    """Returns the module by which AutoGraph writes files of converted functions; no option prevents that."""
    from tensorflow.python.autograph.pyct import loader  # imported late: a process without AutoGraph does not need it

    return loader


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Lets tapes record within a `tf.init_scope`, which stops also those that are made in it."""
    pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def may_record() -> bool:
    """Returns whether a tape of this thread may record the current computation."""
    return record.could_possibly_record()


def has_tangents(tensors) -> bool:
    """Returns whether a `tf.autodiff.ForwardAccumulator` has tangents of tensors."""
    return any(forwardprop_util.pack_tangents(list(tensors)).indices)


def recorded_linear(outputs, inputs, adjoint: Callable, forward: Callable) -> list:
    """Returns the outputs of a linear computation, recorded for tapes and forward accumulators.

    Args:
        outputs, inputs: Tensors of the computation.
        adjoint: Returns the gradients of the inputs for those of the outputs; differentiable.
        forward: Returns the tangents of the outputs for those of the inputs.
    """
    with record.stop_recording():
        outputs = [tf.identity(output) for output in outputs]
    record.record_operation("RaytfLinear", outputs, list(inputs), adjoint, lambda *given: list(forward(*given)))
    return outputs


@uses_private("tensorflow.python.distribute.mirrored_run:_MirroredReplicaContext._merge_call")
def mirrored_replica_context() -> type:
    """Returns the class of a process' replica among several; its merge call is patched."""
    return mirrored_run._MirroredReplicaContext


@uses_private("tensorflow.python.distribute.distribute_lib:ReplicaContextBase._merge_call")
def plain_merge_call(replica, fn, args, kwargs):
    """Makes a merge call of a single replica: a plain call."""
    return distribute_lib.ReplicaContextBase._merge_call(replica, fn, args, kwargs)
