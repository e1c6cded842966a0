"""Compiles an optimizer's update by XLA to one computation, if its variables are in this process' memory.

Keras' operations pass over the memory one after the other, and TensorFlow waits for each of them. Updates that XLA
cannot compile, or computes differently (random numbers), use Keras' operations. A debug message logs the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence

import keras
import tensorflow as tf

from raytf import logs
from raytf.collectives.communicator import local_replicas, many_replicas
from raytf.compat import keras_objects
from raytf.compat.keras import BaseOptimizer
from raytf.compat.patching import patch
from raytf.compat.tensorflow import call_with_captures, is_stateful, separate_function, try_to_compile, without_captures
from raytf.parallel import keras_optimizers, model_optimizers
from raytf.parallel import step as step_module

logger = logs.get_logger(__name__)
_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
# Allowed stateful operations: on variables, and calls, such as the branches of an `ops.cond`.
_VARIABLES = frozenset(("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"))
_CALLS = frozenset(("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase"))
_CALLS |= {"PartitionedCall", "StatefulPartitionedCall"}
# Operations that XLA compiles for any shape. A function of only these needs no trial (a third of the time).
_NEED_NO_TRIAL = _VARIABLES | frozenset(
    (
        *("Abs", "AddV2", "Cast", "Const", "Identity", "IdentityN", "Maximum", "Minimum", "Mul", "Neg", "NoOp"),
        *("Placeholder", "Pow", "RealDiv", "Sign", "Sqrt", "Square", "Sub"),
    )
)
# Optimizers that update each variable by itself, and the number of variables up to which they are compiled together.
_PER_SHAPE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "RMSprop", "SGD")
_MOST_AS_ONE = 16
# The functions used last, by content, for the next models of a warm worker: TensorFlow compiles each of them once, and
# never frees its machine code, some 3 MB.
_known: dict[tuple, Callable] = {}
_MOST_KNOWN = 64
enabled = True  # False during a verification of a few steps


def add_compiled_update(optimizer, update: Callable, gradients: Sequence, variables: Sequence) -> bool:
    """Adds a compiled update to the graph that is being traced.

    Args:
        optimizer: A built optimizer.
        update: Function `update(gradients)` that changes variables of the optimizer and `variables`.
        gradients: Gradients of the global batch; some may be None.
        variables: The trained variables.

    Returns:
        Whether it did; otherwise the caller must make the update.
    """
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if is_possible(optimizer, pairs):
        given = _with_shapes(pairs)

        def compiled_step(*values):
            remaining = iter(values)
            update([None if g is None else next(remaining) for g in gradients])

        try:
            function, captures = _compiled(optimizer, compiled_step, given)
            call_with_captures(function, given, captures)
            return True
        except Exception as error:  # a user's error is raised again by Keras' operations
            _log(optimizer, f"{type(error).__name__}: {error}")
    return False


def compiles_per_shape(optimizer, gradients: Sequence) -> bool:
    """Returns whether to compile one update for all variables of a shape: one for each variable would take seconds."""
    return (
        enabled
        and not tf.executing_eagerly()
        and not compiles_as_one([g for g in gradients if g is not None])
        and keras_optimizers.is_one_of(optimizer, _PER_SHAPE)
        and not (optimizer.use_ema or optimizer.gradient_accumulation_steps or optimizer.global_clipnorm)
    )


def compiles_as_one(variables: Sequence) -> bool:
    """Returns whether variables are few enough to compile their update as one computation."""
    return len(variables) <= _MOST_AS_ONE


@patch((BaseOptimizer, "_backend_apply_gradients"))
def apply_gradients_per_shape(original, self, grads, trainable_variables):
    """Replaces `BaseOptimizer._backend_apply_gradients`: one compiled function for all variables of a shape."""
    if not getattr(step_module.state, "compiles_per_shape", False):
        return original(self, grads, trainable_variables)
    pairs = list(zip(grads, trainable_variables, strict=True))
    if not is_possible(self, pairs):
        return original(self, grads, trainable_variables)
    given = _with_shapes(pairs)
    kinds = [(g.dtype, v.dtype, tuple(v.shape), keras_objects.decays(self, v)) for g, v in pairs]
    update = lambda i, gradient: original(self, [gradient], [trainable_variables[i]])
    compile_per_kind(self, kinds, update, [(g,) for g in given], lambda i: _handles(self, trainable_variables[i]))


def compile_per_kind(optimizer, kinds: Sequence, update: Callable, inputs: Sequence[tuple], handles: Callable) -> list:
    """Returns update(i, *inputs[i]) for each i, compiled by XLA once for each kind if possible.

    Args:
        optimizer: The optimizer whose update it is.
        kinds: Hashable kind of each i: what is compiled for one i is valid for others of its kind.
        update: Function that returns tensors or None, and may change variables.
        inputs: Tensors with known shapes.
        handles: Function handles(i) that returns handles of the variables that differ between those of a kind.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(i)
    results: list = [None] * len(inputs)
    for indices in alike.values():
        first = indices[0]
        try:
            function, captures = _compiled(optimizer, functools.partial(update, first), inputs[first])
        except Exception as error:
            _log(optimizer, f"{type(error).__name__}: {error}")
            for i in indices:
                results[i] = update(i, *inputs[i])
            continue
        known = handles(first)
        for i in indices:
            new = dict(zip(map(id, known), handles(i), strict=True))
            results[i] = call_with_captures(function, inputs[i], [new.get(id(c), c) for c in captures])
    return results


def _handles(optimizer, variable) -> list:
    """Returns the handles of a variable and its slots in this process."""
    variables = (variable, *keras_objects.slots_of(optimizer, variable).values())
    return [keras_optimizers.local_variable(v).handle for v in variables]


def _with_shapes(pairs: Sequence) -> list[tf.Tensor]:
    return [g if g.shape.is_fully_defined() else tf.ensure_shape(g, v.shape) for g, v in pairs]


def _compiled(optimizer, update: Callable, inputs: Sequence[tf.Tensor]) -> tuple:
    """Returns (a compiled function of gradients and other inputs, captures of its trace).

    Raises:
        ValueError: XLA lacks an operation.
        Exception: The user's or XLA's.
    """
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]
    stepping = model_optimizers.unscaled(optimizer)
    rate = stepping.learning_rate  # of a schedule: its functions of float32 are not rounded alike by XLA

    def compiled_step(*values):
        with (
            step_module.override_state(compiles=True, has_rows=False, compiles_per_shape=False),
            keras_objects.with_rate(stepping, rate),
        ):
            return update(*values)

    traced = separate_function(compiled_step, jit_compile=True, autograph=False).get_concrete_function(*specs)
    graph = traced.graph.as_graph_def()
    if (why := _refused(graph)) is not None:
        raise ValueError(why)
    outputs = [tensor.name for tensor in traced.graph.outputs]
    key = _content(graph.node, {f.signature.name: f for f in graph.library.function}, outputs=outputs)
    if key not in _known and not operation_types(graph) <= _NEED_NO_TRIAL:
        try_to_compile(traced, specs)
    function = _known.pop(key, None) or without_captures(traced)
    _known[key] = function
    if len(_known) > _MOST_KNOWN:
        del _known[next(iter(_known))]
    return function, traced.captured_inputs


def _log(optimizer, why: str) -> None:
    logger.debug("%s: the update is not compiled by XLA, but made by Keras' operations: %s", optimizer.name, why)


def is_within() -> bool:
    """Returns whether this thread traces an update to compile."""
    return getattr(step_module.state, "compiles", False)


def is_possible(optimizer, pairs: Sequence) -> bool:
    """Returns whether an update of (gradient, variable) pairs may be compiled; logs the reason if not."""
    if tf.executing_eagerly() or not enabled:
        return False
    why = _hindrance(pairs, optimizer)
    if why is not None:
        _log(optimizer, why)
    return why is None


def _hindrance(pairs: Sequence, optimizer) -> str | None:
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(strategy, _STRATEGIES):
        return type(strategy).__name__
    if many_replicas(strategy) and local_replicas(strategy) > 1:
        return "several devices in one process"
    if not pairs:
        return "no gradients"
    variables = [*(v for _, v in pairs), *optimizer.variables]
    tf_variables = [keras_objects.variable_of(v) if isinstance(v, keras.Variable) else v for v in variables]
    not_on_cpu = next((v for v in tf_variables if "CPU" not in v.device), None)
    return None if not_on_cpu is None else f"{not_on_cpu.name} is on {not_on_cpu.device}"


def _nodes(graph) -> Iterator:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def operation_types(graph) -> set[str]:
    """Returns the types of the operations of a `GraphDef`, with those of the functions in it."""
    return {node.op for node in _nodes(graph)}


def _refused(graph) -> str | None:
    """Returns an operation of a graph that XLA lacks or computes differently, or None."""
    kinds = sorted(operation_types(graph) - _VARIABLES - _CALLS)
    return next((kind for kind in kinds if "Random" in kind or is_stateful(kind)), None)


def _content(nodes, library: dict, arguments: Sequence[str] = (), outputs: Sequence[str] = ()) -> tuple:
    """Returns the computation of a graph as a tuple, independent of names."""
    indices = {name: i for i, name in enumerate([*arguments, *(node.name for node in nodes)])}

    def input_index(text: str) -> tuple:
        name, *output = text.removeprefix("^").split(":")
        return text.startswith("^"), indices[name], tuple(output)

    def value(attribute) -> bytes | tuple:
        called = [*([attribute.func] if attribute.HasField("func") else []), *attribute.list.func]
        if not called:
            return attribute.SerializeToString(deterministic=True)
        return tuple(_content_of_function(library[function.name], library) for function in called)

    def content(node) -> tuple:
        names = sorted(name for name in node.attr if not name.startswith("_"))  # others: gradients, code locations
        attributes = tuple((name, value(node.attr[name])) for name in names)
        return node.op, node.device, tuple(map(input_index, node.input)), attributes

    return tuple(map(content, nodes)), tuple(map(input_index, outputs))


def _content_of_function(function, library: dict) -> tuple:
    names = [argument.name for argument in function.signature.input_arg]
    outputs = [function.ret[output.name] for output in function.signature.output_arg]
    return _content(function.node_def, library, names, outputs)
