"""Gradients in users' own loops under `strategy.run`: tapes return local gradients, and optimizers sum them.

Operations between both shall apply to the sums, as in one process. So an optimizer computes the function of the tapes'
gradients again on their sums. It copies the function's operations in the graph. Sums that the loop computes itself are
not summed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from raytf.collectives import communicator
from raytf.compat.patching import patch
from raytf.logs import warn_user
from raytf.parallel import step as step_module

# Operations that read a variable, without another effect.
READS = ("ReadVariableOp", "ResourceGather")
# Operations that draw random numbers from a state of the process.
DRAWS = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "ParameterizedTruncatedNormal")
DRAWS += ("RandomGamma", "RandomPoissonV2", "Multinomial", "RandomShuffle", "RngReadAndSkip")
_TAPED, _ALIKE, _DRAWN = "taped", "alike", "drawn"
# Number of operations beyond which a gradient is summed unchanged.
_MOST_OPERATIONS = 50_000


class CustomLoop:
    """Records results of tapes and sums in the replica that this thread traces or runs."""

    def __init__(self):
        self._of_graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by name: tensors hold their graph
        self._eager: dict[int, tuple] = {}
        self.warned = False

    def note(self, tensor, kind: str) -> None:
        """Records whether a tensor comes from a tape, or is equal on all replicas."""
        if hasattr(tensor, "numpy"):
            self._eager[id(tensor)] = tensor, kind
        else:
            self._of_graphs.setdefault(tensor.graph, {})[tensor.name] = kind

    @property
    def has_taped(self) -> bool:
        """Returns whether a tape has computed a gradient outside of graphs."""
        return any(kind == _TAPED for _, kind in self._eager.values())

    def kind_of(self, tensor) -> str | None:
        """Returns the recorded kind of a tensor, or None."""
        if hasattr(tensor, "numpy"):
            return self._eager.get(id(tensor), (None, None))[1]
        return self._of_graphs.get(tensor.graph, {}).get(tensor.name)


def _loop() -> CustomLoop:
    known = getattr(step_module.state, "loop", None)
    if known is None:
        known = step_module.state.loop = CustomLoop()
    return known


def _is_custom_loop() -> bool:
    return step_module.current() is None and step_module.in_replica_of_many()


def note_taped(gradients) -> None:
    """Records gradients with respect to variables, in a user's own loop."""
    if _is_custom_loop():
        for gradient in gradients:
            if isinstance(gradient, tf.Tensor):
                _loop().note(gradient, _TAPED)


def note_drawn(seed) -> None:
    """Records a seed of random numbers of a replica, in a user's own loop."""
    if _is_custom_loop():
        _loop().note(seed, _DRAWN)


@patch((tf.distribute.ReplicaContext, "all_reduce"))
def all_reduce(original, self, reduce_op, value, options=None):
    """Replaces `ReplicaContext.all_reduce`: an optimizer does not sum functions of its results again."""
    results = original(self, reduce_op, value, options)
    if _is_custom_loop():
        for tensor in tf.nest.flatten(results, expand_composites=True):
            _loop().note(tensor, _ALIKE)
    return results


def for_optimizer(grads: Sequence, total) -> list:
    """Returns the gradients of all replicas for an optimizer in a user's own loop.

    Args:
        grads: Gradients; some may be None.
        total: total(gradients) -> their sums over replicas.
    """
    if not _is_custom_loop():
        return total(grads)
    loop, results = _loop(), list(grads)
    ways = {i: _GradientPath(loop, content_of(g)) for i, g in enumerate(grads) if g is not None}
    changed = [i for i, way in ways.items() if way.taped and way.operations]
    liftable = all(ways[i].liftable and isinstance(grads[i], tf.Tensor) for i in changed)
    if changed and not liftable and not loop.warned:
        loop.warned = True
        warn_user(
            "What this loop does to gradients before the optimizer sums them is done to each worker's own. "
            + (
                "Compile its step by tf.function, and it is done to the sums"
                if tf.executing_eagerly()
                else "Sum them before, by tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, "
                "gradients); the optimizer does not sum them again"
            ),
        )
    lifted = changed if liftable else []
    unlifted = [i for i, way in ways.items() if not way.alike and i not in lifted]
    sources = list({id(t): t for i in lifted for t in ways[i].taped}.values())
    if unlifted or sources:
        summed = total([*(grads[i] for i in unlifted), *sources])
        for i, value in zip(unlifted, summed, strict=False):
            results[i] = value
        values = {t.name: value for t, value in zip(sources, summed[len(unlifted) :], strict=True)}
        for i in lifted:
            results[i] = ways[i].apply(values)
    drawn = [i for i, way in ways.items() if way.drawn and (way.alike or i in lifted) and tf.is_tensor(results[i])]
    for i, value in zip(
        drawn, communicator.of_first_replica([results[i] for i in drawn]) if drawn else [], strict=True
    ):
        results[i] = value
    return results


def _draws(operation) -> bool:
    """Returns whether an operation draws random numbers, and changes no variable."""
    return operation.type in DRAWS and all(t.dtype != tf.resource for t in operation.inputs)


def content_of(gradient):
    """Returns the tensor of a gradient; of slices their values."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


class _GradientPath:
    """The operations from tapes' gradients to a gradient for an optimizer.

    Attributes:
        alike: Whether it is a function of variables and of the loop's own sums.
        taped: The tapes' gradients that it is a function of.
        operations: The operations between both, in order.
        liftable: Whether these can be computed on other values.
        drawn: Whether it is a function of random numbers, which each replica has of its own.
    """

    def __init__(self, loop: CustomLoop, tensor):
        self._tensor, self.taped, self.operations = tensor, [], []
        kind = loop.kind_of(tensor)
        self.alike = kind == _ALIKE
        self.liftable, self.drawn = True, False
        if kind is not None:
            self.taped = [tensor] if kind == _TAPED else []
            return
        if hasattr(tensor, "numpy"):  # its origin is unknown
            self.taped, self.operations, self.liftable = ([tensor], [None], False) if loop.has_taped else ([], [], True)
            return
        seen, unknown, summed = self._visit_operations(loop)
        self.alike = summed and not unknown and not self.taped
        ends = {t.name for t in self.taped}
        for operation in tensor.graph.get_operations() if self.taped else ():  # in order of creation
            if operation.name in seen and any(t.name in ends for t in operation.inputs):
                self.operations.append(operation)
                ends |= {t.name for t in operation.outputs}
                self.liftable &= not operation.op_def.is_stateful or _draws(operation)

    def _visit_operations(self, loop: CustomLoop) -> tuple[set[str], bool, bool]:
        """Returns (names of earlier operations, whether some are no pure functions, whether one is the loop's sum)."""
        seen, pending, unknown, summed = set(), [self._tensor], False, False
        visited: set[str] = set()
        while pending:
            tensor = pending.pop()
            if hasattr(tensor, "numpy") or tensor.name in visited:
                continue
            visited.add(tensor.name)
            kind = loop.kind_of(tensor)
            if kind == _TAPED:
                self.taped.append(tensor)
            elif kind == _ALIKE:
                summed = True
            elif kind == _DRAWN:
                self.drawn = True
            elif tensor.op.type not in READS:
                seen.add(tensor.op.name)
                draws = _draws(tensor.op)
                self.drawn |= draws
                unknown |= (tensor.op.op_def.is_stateful and not draws) or tensor.op.type == "Placeholder"
                pending += tensor.op.inputs
            if len(seen) > _MOST_OPERATIONS:
                self.taped.clear()
                return seen, True, False
        return seen, unknown, summed

    def apply(self, values: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the same function of other values, by the names of the tensors in `taped`."""
        graph, values = self._tensor.graph, dict(values)
        for operation in self.operations:
            attributes = {k: v for k, v in operation.node_def.attr.items() if k != "_class"}
            made = graph.create_op(
                operation.type,
                [values.get(t.name, t) for t in operation.inputs],
                [t.dtype for t in operation.outputs],
                attrs=attributes,
                op_def=operation.op_def,
                name=f"{operation.name}_of_all",
            )
            for source, copy in zip(operation.outputs, made.outputs, strict=True):
                copy.set_shape(source.shape)
                values[source.name] = copy
        return values[self._tensor.name]
