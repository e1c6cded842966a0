"""Optimizers of a model: `model.optimizer`, and those that its own `train_step` applies, as in a GAN."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

from raytf.compat import keras_objects
from raytf.compat.patching import patched
from raytf.errors import ConfigError
from raytf.parallel import metric_state
from raytf.storage import checkpoint_files

FILE = "optimizers.json"
# Key of a worker's `shards.OptimizerShards` in the attributes of an optimizer.
SHARES = "_raytf_shares"
_STEPS = {"fit": "train_step", "evaluate": "test_step", "predict": "predict_step"}


def optimizers_of(model) -> dict:
    """Returns {name: optimizer} of a model's and its layers' attributes, alone or in lists and dicts.

    Keras saves the state of the same optimizers. The names are equal in each process that builds the model.
    """
    from raytf.compat.keras import BaseOptimizer

    named: dict[int, tuple[str, BaseOptimizer]] = {}
    visited_types = (BaseOptimizer, dict, list, tuple)

    def visit(name, value):
        if isinstance(value, BaseOptimizer):
            named.setdefault(id(value), (name, value))
            return
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            if isinstance(part, visited_types):  # called at each checkpoint, and a model has thousands of attributes
                visit(f"{name}.{key}", part)

    if model.optimizer is not None:
        visit("optimizer", model.optimizer)
    for i, layer in enumerate(keras_objects.layers_of(model)):
        attributes = vars(layer)
        for name in sorted(name for name, value in attributes.items() if isinstance(value, visited_types)):
            visit(f"{i}.{name}" if i else name, attributes[name])
    return dict(named.values())


def variables(model) -> list:
    """Returns the variables of all optimizers of a model, each once."""
    return list({id(v): v for optimizer in optimizers_of(model).values() for v in optimizer.variables}.values())


def unscaled(optimizer):
    """Returns the optimizer that updates: the one within a LossScaleOptimizer, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def updating(optimizer) -> list:
    """Returns the optimizers that update: `unscaled`, or those within a MultiOptimizer, which Keras has from 3.15."""
    import keras

    inner = unscaled(optimizer)
    return inner.optimizers if isinstance(inner, getattr(keras.optimizers, "MultiOptimizer", ())) else [inner]


def alike(model) -> list:
    """Returns the variables of all optimizers that workers have alike: without shares of slots."""
    shares = [vars(optimizer)[SHARES] for optimizer in optimizers_of(model).values() if SHARES in vars(optimizer)]
    return [v for v in variables(model) if not any(id(v) in share.slots for share in shares)]


def has_call(model) -> bool:
    """Returns whether a model computes something from its inputs; with its own `train_step` it need not, as a GAN."""
    return is_own(model, "call")


def decides_itself(model, method: str = "fit") -> bool:
    """Returns whether only the model's own code defines the data that `fit`, `evaluate` or `predict` accepts.

    Args:
        model: A `keras.Model`.
        method: "fit", "evaluate" or "predict".
    """
    return is_own(model, method) or is_own(model, _STEPS[method])


def is_own(model, name: str) -> bool:
    """Returns whether a model's class has its own method, and not Keras'."""
    import keras

    return getattr(type(model), name) is not getattr(keras.Model, name)


def _is_traced(model, method: str) -> bool:
    """Returns whether a model's step can be traced to build parts: not in eager mode, nor for its own `fit`."""
    return not is_own(model, method) and not model.run_eagerly


def build(model, data_batch, method: str = "fit") -> None:
    """Builds a compiled model and `model.optimizer`, as Keras does before the first step; a step builds other
    optimizers.

    Keras calls the model on the batch's first part, and gives its labels to loss and metrics. A model's own step may do
    neither: so the step is traced if the call fails, or to build metrics.

    Args:
        model: A compiled `keras.Model`.
        data_batch: Tensors with the shapes and dtypes of a batch.
        method: "fit" or "evaluate", whose step the batch is for.

    Raises:
        ConfigError: The model has its own `fit`, and is not built; or a metric keeps its state in Python.
    """
    if has_call(model):
        in_step = is_own(model, _STEPS[method]) and _is_traced(model, method)
        try:
            keras_objects.build_for(model, data_batch, skipped=keras_objects.unbuilt_parts(model) if in_step else ())
            if in_step:
                _build_metrics_by_step(model, data_batch, method)
        except Exception:
            metric_state.check(model)
            if not decides_itself(model, method):
                raise
            _build_by_step(model, data_batch, method)
            _check_built(model, method)
    elif unbuilt(model) and decides_itself(model, method):
        _build_by_step(model, data_batch, method)
    elif not unbuilt(model):
        model.built = True
    metric_state.check(model)
    in_parts = not has_call(model) and unbuilt(model)  # the step that builds the others knows what it trains
    if model.optimizer is not None and not model.optimizer.built and not in_parts:
        model.optimizer.build(model.trainable_variables)


def unbuilt(model) -> list:
    """Returns the layers within a model that are not built yet."""
    return [layer for layer in keras_objects.layers_of(model, with_itself=False) if not layer.built]


def _build_by_step(model, data_batch, method: str) -> None:
    """Builds the layers that a model's own step uses by tracing it; nothing runs, and no weight changes."""
    import tensorflow as tf

    from raytf.collectives.communicator import many_replicas
    from raytf.compat.keras import BaseOptimizer

    def built_only(optimizer, grads, trainable_variables=None):
        if not optimizer.built and trainable_variables:  # a step may list them before its layers are built
            optimizer.build(list(trainable_variables))

    if _is_traced(model, method):
        step, strategy = getattr(model, _STEPS[method]), model.distribute_strategy
        # in a replica's context, as tapes do not know variables of several replicas
        of_replica = (lambda data: strategy.run(step, args=(data,))) if many_replicas(strategy) else step
        with patched(BaseOptimizer, "apply", built_only), _same_draws():
            tf.function(of_replica).get_concrete_function(data_batch)
        model.built = not unbuilt(model)


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Restores the global generators of Python and NumPy, from which a step may draw as it is traced."""
    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _build_metrics_by_step(model, data_batch, method: str) -> None:
    """Builds metrics of `compile` for the labels that the model's own step gives them, such as one-hot ones.

    If the step gives them none or fails on the example, they are built for the batch's labels. So are those for Keras'
    own step. Losses of several outputs have metrics, too; a single loss is left to the first step.
    """
    loss, metrics = keras_objects.compiled_parts(model)
    counting = [metrics, loss if isinstance(model.loss, (dict, list, tuple)) else None]
    if any(part is not None and not part.built for part in counting):
        with contextlib.suppress(Exception):  # the error of the first step explains it
            _build_by_step(model, data_batch, method)
    if metrics is not None and not metrics.built:
        keras_objects.build_for(model, data_batch, skipped=[p for p in keras_objects.unbuilt_parts(model) if p is loss])


def _check_built(model, method: str) -> None:
    """Raises ConfigError for layers that the model's own step has not built."""
    if unbuilt_layers := unbuilt(model):
        why = f"a {method} of its own" if is_own(model, method) else "run_eagerly=True and a step of its own"
        raise ConfigError(
            "A model that only its own code can call needs all of its layers built before it is sent to workers",
            f"{model.name!r}, with {why}, and {', '.join(repr(layer.name) for layer in unbuilt_layers[:3])} not built",
            "Call the layers, or their build(), on the shape of a row where the model is made",
        )


def noted(model) -> dict[str, dict]:
    """Returns the content of `FILE` in a checkpoint: the model's weights for which each optimizer was built.

    Raises:
        ConfigError: An optimizer trains weights outside of the model, which no checkpoint contains.
    """
    indices = {id(v): i for i, v in enumerate(model.weights)}
    entries = {}
    for name, optimizer in optimizers_of(model).items():
        if not optimizer.built:
            continue
        trained = [indices.get(id(v)) for v in keras_objects.variables_of_optimizer(optimizer)]
        if None in trained:
            raise ConfigError(
                "What an optimizer trains must belong to the model, or checkpoints do not hold it",
                f"{name}, which trains {keras_objects.variables_of_optimizer(optimizer)[trained.index(None)].name!r}",
                "Make the layers attributes of the model",
            )
        entries[name] = {"class": type(optimizer).__name__, "weights": trained}
    return entries


def build_as_saved(folder: str, model) -> None:
    """Builds the optimizers of a built model for the weights that `noted` recorded.

    Raises:
        ConfigError: The model has other optimizers, or fewer weights.
        DamagedCheckpointError: The file cannot be read.
    """
    path = os.path.join(folder, FILE)
    if not os.path.lexists(path):  # written by a version with one optimizer
        return
    optimizers, weights = optimizers_of(model), model.weights
    for name, saved in checkpoint_files.read_json(folder, FILE).items():
        if type(saved) is not dict or type(saved.get("weights")) is not list or type(saved.get("class")) is not str:
            raise checkpoint_files.damaged_error(
                os.path.basename(os.path.normpath(folder)), f"{FILE} has no right {name!r}"
            )
        current = type(optimizers[name]).__name__ if name in optimizers else "none"
        trained = saved["weights"]
        if current != saved["class"] or not all(type(i) is int and 0 <= i < len(weights) for i in trained):
            raise ConfigError(
                "A run that resumes needs the optimizers that it had, for the same weights",
                f"{name}: {current} after {saved['class']} for {len(trained)} weights; the model has {len(weights)}",
                "Build the same model, each part of it before the first step, or give the run another name",
            )
        if not optimizers[name].built:
            with model.distribute_strategy.scope():
                optimizers[name].build([weights[i] for i in trained])
