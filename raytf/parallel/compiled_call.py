"""`jit_compile=True` with several workers on CPUs: XLA compiles a model's call, and the backward pass through it.

XLA cannot compile exchanges of workers. So the loss, metrics and the all-reduce of gradients are not compiled. The
update is compiled separately, see `compiled_update`.
"""

from __future__ import annotations

from typing import NoReturn

import tensorflow as tf
from keras import tree

from raytf.compat.keras import get_keras_mask, logits_of, not_wrapped, set_keras_mask, set_logits
from raytf.compat.tensorflow import separate_function
from raytf.errors import ConfigError
from raytf.parallel import compiled_update
from raytf.parallel import step as step_module

_EXCHANGES = ("PyFunc", "Collective")


def is_due(model) -> bool:
    """Returns whether to compile a model's call: only with `jit_compile`, and not on GPUs."""
    return bool(model.jit_compile) and not tf.config.list_physical_devices("GPU")


def refuse(layer, why: str) -> NoReturn:
    """Raises ConfigError for a layer or model whose call cannot be compiled; `why` is the reason."""
    error = ConfigError(
        "With jit_compile=True and several workers on CPUs a model's call can be compiled, exchanges nothing and adds "
        "no loss",
        f"{layer.name!r}: {why}",
        "Compile the model with jit_compile=False",
    )
    raise not_wrapped(error)


def is_within() -> bool:
    """Returns whether this thread traces a model's call to compile."""
    return getattr(step_module.state, "compiles_call", False)


def call(model, original, *args, **kwargs):
    """Calls `model.call`, compiled; the outputs keep Keras' masks and logits.

    Raises:
        ConfigError: The call cannot be compiled.
    """
    flat = tree.flatten((args, kwargs))
    indices = [i for i, item in enumerate(flat) if tf.is_tensor(item)]
    if tf.executing_eagerly() or not indices or is_within():
        return original(*args, **kwargs)
    tensors, masks = [flat[i] for i in indices], [get_keras_mask(flat[i]) for i in indices]
    structure = None

    def whole(tensors, masks):
        nonlocal structure
        leaves = list(flat)
        for i, tensor, mask in zip(indices, tensors, masks, strict=True):
            leaves[i] = tensor
            if mask is not None:
                set_keras_mask(tensor, mask)
        call_args, call_kwargs = tree.pack_sequence_as((args, kwargs), leaves)
        with step_module.override_state(compiles_call=True):
            structure = original(*call_args, **call_kwargs)
        outputs = tree.flatten(structure)
        return outputs, [get_keras_mask(item) for item in outputs], [logits_of(item) for item in outputs]

    function = separate_function(whole, jit_compile=True, autograph=False)
    try:
        graph = function.get_concrete_function(tensors, masks).graph.as_graph_def()
    except ConfigError:
        raise
    except Exception as error:
        refuse(model, f"{type(error).__name__}: {error}")
    kinds = compiled_update.operation_types(graph)
    if exchanges := sorted(kind for kind in kinds if any(item in kind for item in _EXCHANGES)):
        refuse(model, ", ".join(exchanges))
    outputs, masks, logits = function(tensors, masks)
    for output, mask, output_logits in zip(outputs, masks, logits, strict=True):
        if mask is not None:
            set_keras_mask(output, mask)
        if output_logits is not None:
            set_logits(output, output_logits)
    return tree.pack_sequence_as(structure, outputs)
