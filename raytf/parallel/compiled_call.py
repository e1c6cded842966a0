"""`jit_compile=True` with several workers on CPUs: XLA compiles a model's call, and the backward pass through it.

What workers exchange has no place in what XLA compiles. So the loss, metrics and the sum of gradients stay outside, and
the update is compiled by itself, see `compiled_update`.
"""

from __future__ import annotations

from typing import NoReturn

import tensorflow as tf
from keras import tree

from raytf.compat.keras import get_keras_mask, logits_of, not_wrapped, set_keras_mask, set_logits
from raytf.compat.tensorflow import traced_apart
from raytf.errors import ConfigError
from raytf.parallel import step as step_module

_EXCHANGES = ("PyFunc", "Collective")


def is_due(model) -> bool:
    """Whether a model's call is to be compiled here: on GPUs it is not."""
    return bool(model.jit_compile) and not tf.config.list_physical_devices("GPU")


def refuse(layer, why: str) -> NoReturn:
    """Raises ConfigError for what a layer or model does in a call that is to be compiled."""
    error = ConfigError(
        "With jit_compile=True and several workers on CPUs a model's call can be compiled, exchanges nothing and adds "
        "no loss",
        f"{layer.name!r}: {why}",
        "Compile the model with jit_compile=False",
    )
    raise not_wrapped(error)


def is_within() -> bool:
    """Whether what this thread traces is the call of a model that is being compiled."""
    return getattr(step_module.state, "compiles_call", False)


def call(model, original, *args, **kwargs):
    """`model.call`, compiled; its outputs have what Keras notes of them, as without.

    Raises:
        ConfigError: it cannot be compiled.
    """
    flat = tree.flatten((args, kwargs))
    places = [i for i, one in enumerate(flat) if tf.is_tensor(one)]
    if tf.executing_eagerly() or not places or is_within():
        return original(*args, **kwargs)
    tensors, masks = [flat[i] for i in places], [get_keras_mask(flat[i]) for i in places]
    structure = None

    def whole(tensors, masks):
        nonlocal structure
        leaves = list(flat)
        for i, tensor, mask in zip(places, tensors, masks, strict=True):
            leaves[i] = tensor
            if mask is not None:
                set_keras_mask(tensor, mask)
        its_args, its_kwargs = tree.pack_sequence_as((args, kwargs), leaves)
        with step_module.within(compiles_call=True):
            structure = original(*its_args, **its_kwargs)
        outputs = tree.flatten(structure)
        return outputs, [get_keras_mask(one) for one in outputs], [logits_of(one) for one in outputs]

    function = traced_apart(whole, jit_compile=True, autograph=False)
    try:
        graph = function.get_concrete_function(tensors, masks).graph.as_graph_def()
    except ConfigError:
        raise
    except Exception as error:
        refuse(model, f"{type(error).__name__}: {error}")
    kinds = {node.op for node in (*graph.node, *(n for f in graph.library.function for n in f.node_def))}
    if found := sorted(kind for kind in kinds if any(one in kind for one in _EXCHANGES)):
        refuse(model, ", ".join(found))
    outputs, masks, logits = function(tensors, masks)
    for output, mask, its in zip(outputs, masks, logits, strict=True):
        if mask is not None:
            set_keras_mask(output, mask)
        if its is not None:
            set_logits(output, its)
    return tree.pack_sequence_as(structure, outputs)
