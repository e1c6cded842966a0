"""Traverses the graph of a `tf.data.Dataset`: its layers, and the operations in their functions."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from raytf.compat.tensorflow import functions_of, inputs_of

# Kinds whose output may differ between two readings: Python code, and datasets of other processes.
_UNKNOWN = ("PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset")
_SERVICE = "DataService"


def kind(dataset: tf.data.Dataset) -> str:
    """Returns the kind of a layer, such as "ShuffleDataset"."""
    return type(dataset).__name__.lstrip("_")


def layers(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all its inputs, recursively."""
    yield dataset
    for source in inputs_of(dataset):
        yield from layers(source)


def operations(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yields the kinds of operations in a layer's functions, and in functions that these call."""
    for function in functions_of(dataset):
        definition = function.function.graph.as_graph_def(add_shapes=False)
        for node in (*definition.node, *(n for f in definition.library.function for n in f.node_def)):
            yield node.op


def is_unknown(name: str) -> bool:
    """Returns whether the output of a layer or operation of this kind may differ between two readings."""
    return name in _UNKNOWN or name.startswith(_SERVICE)


def draws(operation: str) -> bool:
    """Returns whether an operation of a function is random."""
    random = operation.startswith(("Random", "Stateful")) and not operation.startswith("StatefulPart")
    return random or operation.startswith(("ShuffleDataset", "ShuffleAndRepeat"))
