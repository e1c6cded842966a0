"""Tracks the variables that callbacks assign, for workers that agree on them, and their values before.

A replacement worker needs the values before, to start before the assignment.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from raytf.collectives import recovery_client
from raytf.errors import RaytfError
from raytf.parallel import own_state

# The active instance of each class.
_watches: dict[type, weakref.ref] = {}


class AssignedVariables:
    """Records which variables are assigned outside of training steps, while it is referenced.

    It covers assignments from Python, and variables that compiled functions assign.
    """

    def __init__(self):
        self._assigned: dict[int, object] = {}
        self._traced: dict[int, object] = {}
        _watches[type(self)] = weakref.ref(self)

    def note(self, variable) -> None:
        """Records a variable; called before it is assigned."""
        if variable.synchronization == "on_read":  # variables of metrics differ between workers
            return
        if not recovery_client.client.executes and not _in_a_replica():
            noted = self._assigned if tf.executing_eagerly() else self._traced
            noted[id(variable)] = variable

    def taken(self) -> set[int]:
        """Returns the ids of variables that were, or may have been, assigned since the last call."""
        ids = self._assigned.keys() | self._traced.keys()
        self._assigned = {}
        return ids


class AssignmentWatch:
    """Records old values of variables that are assigned from Python outside of training steps, while it is referenced.

    Assignments of a compiled function are not seen, except when it is traced, see `in_graphs`.

    Args:
        model: The model whose variables are recorded, if all workers have equal values, see `own_state.alike`.
    """

    def __init__(self, model):
        self._model, self._ids = model, None
        self._old_values: dict[int, tuple] = {}
        self._traced: set[str] = set()
        _watches[type(self)] = weakref.ref(self)

    def old_values(self) -> list[tuple]:
        """Returns (variable, its old bytes) of the variables that were assigned.

        Raises:
            RaytfError: A variable was assigned in a graph or a replica, so its value could not be read.
        """
        if self._traced:
            raise RaytfError(
                f"a callback has changed {', '.join(sorted(self._traced))} in a graph or a replica since the last step"
            )
        return list(self._old_values.values())

    def note(self, variable) -> None:
        """Records the value of a variable; called before it is assigned."""
        if id(variable) in self._old_values or recovery_client.client.executes:
            return
        if self._ids is None:
            self._ids = {id(v) for v in own_state.alike(self._model)}
        if id(variable) not in self._ids:
            return
        if _in_a_replica() or not tf.executing_eagerly():
            self._traced.add(variable.path)
            _in_graphs(self._model)[id(variable)] = variable
            return
        self._old_values[id(variable)] = (
            variable,
            np.array(own_state.local_value(self._model.distribute_strategy, variable)),
        )


def _in_a_replica() -> bool:
    """Returns whether the code runs in a replica of a strategy; callbacks run without a strategy, or in its scope."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def in_graphs(model) -> list:
    """Returns the model's variables that compiled functions assign after its steps, if they were traced there.

    A call of such a function changes them unseen.
    """
    return list(_in_graphs(model).values())


def _in_graphs(model) -> dict:
    return model.__dict__.setdefault("_raytf_in_graphs", {})


def note_assignment(variable) -> None:
    """Reports a `keras.Variable` to the active watches, before it is assigned."""
    for reference in _watches.values():
        watch = reference()
        if watch is not None:
            watch.note(variable)
