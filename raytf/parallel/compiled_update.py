"""Compiles an optimizer's update by XLA to one computation, if its variables are in this process' memory.

Keras' operations pass over the memory one after the other, and TensorFlow waits for each of them. Updates that XLA
cannot compile, or computes differently (random numbers), use Keras' operations. A debug message logs the reason.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from raytf import logs
from raytf.collectives.communicator import local_replicas, many_replicas
from raytf.compat import keras_objects
from raytf.compat.tensorflow import call_with_captures, is_stateful, traced_apart, try_to_compile, without_captures
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
# The functions in use, by content: TensorFlow compiles each of them once.
_known: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# Kept for the next model of a warm worker, which often has the same update; a few, as each holds its machine code.
_recent: collections.deque = collections.deque(maxlen=4)
enabled = True  # False during a verification of a few steps


def made(optimizer, update: Callable, gradients: Sequence, variables: Sequence) -> bool:
    """Adds a compiled update to the graph that is being traced.

    Args:
        optimizer: A built optimizer.
        update: Function `update(gradients)` that changes variables of the optimizer and `variables`.
        gradients: Gradients of the global batch; some may be None.
        variables: The trained variables.

    Returns:
        Whether it did; otherwise the caller must make the update.
    """
    if tf.executing_eagerly() or not enabled:
        return False
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    why = _hindrance(pairs, optimizer)
    if why is None:
        given = [g if g.shape.is_fully_defined() else tf.ensure_shape(g, v.shape) for g, v in pairs]
        specs = [tf.TensorSpec(g.shape, g.dtype) for g in given]

        stepping = getattr(optimizer, "inner_optimizer", optimizer)
        rate = stepping.learning_rate  # of a schedule: its functions of float32 are not rounded alike by XLA

        def whole(*its):
            left = iter(its)
            with step_module.within(compiles=True, has_rows=False), keras_objects.rate_is(stepping, rate):
                update([None if g is None else next(left) for g in gradients])

        try:
            traced = traced_apart(whole, jit_compile=True, autograph=False).get_concrete_function(*specs)
            graph = traced.graph.as_graph_def()
            why = _refused(graph)
            if why is None:
                key = _content(graph.node, {f.signature.name: f for f in graph.library.function})
                if key not in _known and not operation_types(graph) <= _NEED_NO_TRIAL:
                    try_to_compile(traced, specs)
                function = _known.setdefault(key, without_captures(traced))
                _recent.append(function)
                call_with_captures(function, given, traced.captured_inputs)
                return True
        except Exception as error:  # a user's error is raised again by Keras' operations
            why = f"{type(error).__name__}: {error}"
    logger.debug("%s: the update is not compiled by XLA, but made by Keras' operations: %s", optimizer.name, why)
    return False


def is_within() -> bool:
    """Whether this thread traces an update to compile."""
    return getattr(step_module.state, "compiles", False)


def _hindrance(pairs: Sequence, optimizer) -> str | None:
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and not isinstance(strategy, _STRATEGIES):
        return type(strategy).__name__
    if many_replicas(strategy) and local_replicas(strategy) > 1:
        return "several devices in one process"
    if not pairs:
        return "no gradients"
    variables = [*(v for _, v in pairs), *optimizer.variables]
    held = [keras_objects.held_by(v) if isinstance(v, keras.Variable) else v for v in variables]
    not_on_cpu = next((v for v in held if "CPU" not in v.device), None)
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

    def place(text: str) -> tuple:
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
        return node.op, node.device, tuple(map(place, node.input)), attributes

    return tuple(map(content, nodes)), tuple(map(place, outputs))


def _content_of_function(function, library: dict) -> tuple:
    names = [argument.name for argument in function.signature.input_arg]
    outputs = [function.ret[output.name] for output in function.signature.output_arg]
    return _content(function.node_def, library, names, outputs)
