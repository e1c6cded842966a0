"""What a `tf.data.Dataset` is made of: its layers, and the operations in their functions."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from raytf.compat.tensorflow import functions_of, inputs_of

# Of which nobody knows what they give another time: Python code, and datasets of other processes.
_UNKNOWN = ("PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset")
_SERVICE = "DataService"


def kind(dataset: tf.data.Dataset) -> str:
    """The kind of a layer, such as "ShuffleDataset"."""
    return type(dataset).__name__.lstrip("_")


def layers(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset, and all that it was made from."""
    yield dataset
    for one in inputs_of(dataset):
        yield from layers(one)


def operations(dataset: tf.data.Dataset) -> Iterator[str]:
    """Kinds of the operations in a layer's functions, and in what these call."""
    for function in functions_of(dataset):
        definition = function.function.graph.as_graph_def(add_shapes=False)
        for node in (*definition.node, *(n for f in definition.library.function for n in f.node_def)):
            yield node.op


def is_unknown(name: str) -> bool:
    """Whether a layer or an operation of this kind may give anything another time."""
    return name in _UNKNOWN or name.startswith(_SERVICE)


def draws(operation: str) -> bool:
    """Whether an operation of a function gives other results each time."""
    random = operation.startswith(("Random", "Stateful")) and not operation.startswith("StatefulPart")
    return random or operation.startswith(("ShuffleDataset", "ShuffleAndRepeat"))
