"""What callbacks assign: which variables, for workers that agree on them, and what these held before, for a process
that is to go on before that."""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from raytf.collectives import healing
from raytf.errors import RaytfError
from raytf.parallel import own_state

# The one of each class that is in force.
_watches: dict[type, weakref.ref] = {}


class AssignedVariables:
    """Notes which variables are assigned from Python, or in compiled functions, but in training steps, as long as it is
    referred to."""

    def __init__(self):
        self._assigned: dict[int, object] = {}
        self._traced: dict[int, object] = {}
        _watches[type(self)] = weakref.ref(self)

    def note(self, variable) -> None:
        """Called before a variable is assigned."""
        if variable.synchronization == "on_read":  # a metric's, which each worker has for itself
            return
        if not healing.here.executes and not _in_a_replica():
            noted = self._assigned if tf.executing_eagerly() else self._traced
            noted[id(variable)] = variable

    def taken(self) -> set[int]:
        """The ids of variables that were assigned since the last call, or may have been."""
        found = self._assigned.keys() | self._traced.keys()
        self._assigned = {}
        return found


class AssignmentWatch:
    """Notes what variables hold that are assigned from Python, but in training steps, as long as it is referred to.

    What a compiled function assigns is not seen, but where it is traced, see `in_graphs`.

    Args:
        model: of the variables that all workers have alike, see `own_state.alike`; others are not noted.
    """

    def __init__(self, model):
        self._model, self._ids = model, None
        self._held: dict[int, tuple] = {}
        self._traced: set[str] = set()
        _watches[type(self)] = weakref.ref(self)

    def before(self) -> list[tuple]:
        """(variable, its bytes) of those that were assigned since, as they were before.

        Raises:
            RaytfError: some were assigned where their values cannot be read.
        """
        if self._traced:
            raise RaytfError(
                f"a callback has changed {', '.join(sorted(self._traced))} in a graph or a replica since the last step"
            )
        return list(self._held.values())

    def note(self, variable) -> None:
        """Called before a variable is assigned."""
        if id(variable) in self._held or healing.here.executes:
            return
        if self._ids is None:
            self._ids = {id(v) for v in own_state.alike(self._model)}
        if id(variable) not in self._ids:
            return
        if _in_a_replica() or not tf.executing_eagerly():
            self._traced.add(variable.path)
            _in_graphs(self._model)[id(variable)] = variable
            return
        self._held[id(variable)] = variable, np.array(own_state.here(self._model.distribute_strategy, variable))


def _in_a_replica() -> bool:
    """Whether a strategy runs this in a replica; callbacks are called without a strategy, or in its scope."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def in_graphs(model) -> list:
    """Of a model's variables those that compiled functions assign behind its steps, as far as these were traced there.

    A call of such a function changes them unseen.
    """
    return list(_in_graphs(model).values())


def _in_graphs(model) -> dict:
    return model.__dict__.setdefault("_raytf_in_graphs", {})


def tell(variable) -> None:
    """Says that a `keras.Variable` is about to be assigned."""
    for held in _watches.values():
        watch = held()
        if watch is not None:
            watch.note(variable)
