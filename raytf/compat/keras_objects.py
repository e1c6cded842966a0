"""Private state of Keras' objects: models, layers, optimizers, variables. Does not import Keras itself."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence
from typing import Any

from raytf.compat.patching import patched_of
from raytf.compat.versions import uses_private

# ------------------------------------------------------------------------------------------ layers and models


@uses_private("keras.src.layers.layer:Layer._flatten_layers")
def layers_of(layer, with_itself: bool = True) -> list:
    """Returns all layers within a layer or model; `Model.layers` has only the direct ones."""
    return list(layer._flatten_layers(include_self=with_itself))


@uses_private(
    "keras.src.layers.layer:Layer._trainable_variables", "keras.src.layers.layer:Layer._non_trainable_variables"
)
def own_variables(layer) -> tuple[list, list]:
    """Returns (trainable, other) variables of a layer without its inner layers'; public lists contain all."""
    return layer._trainable_variables, layer._non_trainable_variables


@uses_private("keras.src.layers.layer:Layer._seed_generators")
def seed_generators_of(layer) -> list:
    """Returns the layer's own seed generators; `variables` contains their states without a distinction."""
    return layer._seed_generators


def seeds_of(model) -> list:
    """Returns the states of the seed generators of the model's layers, then of the global one if it was used."""
    return list({id(v): v for v in (*seeds_of_layers(model), *shared_seed())}.values())


def seeds_of_layers(model) -> list:
    """Returns the states of the seed generators of the model's layers."""
    return list({id(g): g.state for layer in layers_of(model) for g in seed_generators_of(layer)}.values())


def shared_seed() -> list:
    """Returns the state of the global seed generator, if anything has drawn from it in this process.

    That may be a callback of one worker alone.
    """
    from raytf.compat.keras import shared_seed_generator

    shared = shared_seed_generator() or _made_elsewhere()
    return [] if shared is None else [shared.state]


@uses_private("keras.src.random.seed_generator:global_seed_generator")
def make_shared_seed() -> list:
    """Returns `shared_seed`, of a new generator if there is none, as its first draw would create; no draw is counted.

    All workers that draw from it within steps must create it before these. Otherwise each first draw creates one with
    the worker's own seed, and a checkpoint saves only the chief's.
    """
    from raytf.compat.keras import seed_module

    state = random.getstate()  # Keras draws the seed from it
    generator = seed_module.global_seed_generator()
    random.setstate(state)
    _made[:] = [(generator, threading.current_thread())]
    return [generator.state]


# The newest generator of `make_shared_seed`, and its thread.
_made: list[tuple[Any, threading.Thread]] = []


def _made_elsewhere():
    """Returns the global seed generator of another thread that trains with it; Keras keeps one per thread."""
    for generator, thread in _made:
        if thread is not threading.current_thread() and thread.is_alive():
            return generator
    return None


def shared_of_replicas():
    """Returns, in a replica's thread, the generator of `make_shared_seed` under its strategy; elsewhere None."""
    import tensorflow as tf

    generator = _made_elsewhere() if hasattr(threading.current_thread(), "replica_id") else None
    in_this_strategy = (
        generator is not None
        and getattr(variable_of(generator.state), "distribute_strategy", None) is tf.distribute.get_strategy()
    )
    return generator if in_this_strategy else None


@uses_private("keras.src.layers.core.embedding:Embedding._embeddings")
def table_of(layer):
    """Returns the variable of an Embedding; `embeddings` is a tensor if the layer is quantized or has LoRA."""
    return getattr(layer, "_embeddings", None)


@uses_private("keras.src.layers.layer:Layer._call_has_training_arg")
def takes_training(layer) -> bool:
    """Returns whether `call` accepts `training=`; Keras has determined it, without a public API."""
    return layer._call_has_training_arg


@uses_private("keras.src.trainers.trainer:Trainer._symbolic_build")
def build_for(model, data_batch, skipped: Sequence = ()) -> None:
    """Builds model, loss and metrics for a batch; `build` accepts shapes and omits loss and metrics.

    Its number of rows is unknown, as in a step: a loss may need more than an example has. A model that needs it known
    gets the number of the example.

    Args:
        model: A compiled `keras.Model`.
        data_batch: Tensors with the shapes and dtypes of a batch.
        skipped: Parts of `unbuilt_parts` that are left to the model's own step, which may give them other labels.
    """
    import keras

    symbol = lambda t: t if t is None or not len(t.shape) else keras.KerasTensor((None, *t.shape[1:]), t.dtype)
    if skipped:
        for part in skipped:
            part.built = True  # Keras passes it over
        try:
            return build_for(model, data_batch)
        finally:
            for part in skipped:
                part.built = False
    unbuilt = unbuilt_parts(model)
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(symbol, data_batch))
    except Exception:
        for part in unbuilt:
            part.built = False  # Keras takes a loss that failed for built, and would not try it again
        if model.run_eagerly and all(map(keras.ops.is_tensor, keras.tree.flatten(data_batch))):
            _build_eagerly(model, data_batch)
        else:
            model._symbolic_build(data_batch=data_batch)


def _build_eagerly(model, data_batch) -> None:
    """Builds with values, which a model with `run_eagerly=True` may need, such as a metric that calls NumPy."""
    import keras

    x, y, weights = keras.utils.unpack_x_y_sample_weight(data_batch)
    y_pred = model(x, training=False) if takes_training(model) else model(x)
    model.compute_metrics(x, y, y_pred, weights)
    step_loss(model, x, y, y_pred, weights, training=False)
    model.reset_metrics()


@uses_private("keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter._first_batches")
def first_batch(adapter):
    """Returns the first batch of a Python generator, which Keras has read for its shapes; None for other data."""
    return next(iter(getattr(adapter, "_first_batches", ())), None)


@uses_private("keras.src.trainers.trainer:Trainer._compile_loss", "keras.src.trainers.trainer:Trainer._compile_metrics")
def compiled_parts(model) -> tuple[Any, Any]:
    """Returns (loss, metrics) of `compile`, or None each; `model.loss` and `model.metrics` contain its arguments."""
    return model._compile_loss, model._compile_metrics


def unbuilt_parts(model) -> list:
    """Returns those of loss and metrics of `compile` that are not built yet."""
    return [part for part in compiled_parts(model) if part is not None and not part.built]


@uses_private("keras.src.trainers.compile_utils:CompileMetrics._user_metrics")
@uses_private("keras.src.trainers.compile_utils:CompileMetrics._user_weighted_metrics")
def metrics_of(model) -> list:
    """Returns the metrics of a model, with those of `compile` before they are built."""
    import keras

    given = compiled_parts(model)[1]
    lists = [] if given is None else [given._user_metrics, given._user_weighted_metrics, given.metrics]
    candidates = [*model.metrics, *keras.tree.flatten(lists)]
    return list({id(m): m for m in candidates if isinstance(m, keras.metrics.Metric)}.values())


@uses_private("keras.src.trainers.trainer:Trainer._compute_loss")
def step_loss(model, *args, **kwargs):
    """Returns the loss of a step for any signature of the user's `compute_loss`, which a caller would have to match."""
    return model._compute_loss(*args, **kwargs)


@uses_private("keras.src.trainers.trainer:Trainer._loss_tracker")
def loss_tracker_of(model):
    """Returns the metric of the mean loss; `metrics` has it first, unless the user's property hides it."""
    return model._loss_tracker


@uses_private("keras.src.metrics.reduction_metrics:MeanMetricWrapper._fn")
def function_of(metric):
    """Returns the function whose values a metric averages, or None; `get_config` has only its name."""
    return getattr(metric, "_fn", None)


@uses_private("keras.src.trainers.trainer:Trainer._flatten_metrics_in_order")
def in_order(model, logs: dict) -> list:
    """Returns the values of logs as `evaluate` without `return_dict`; only Keras has the order."""
    return model._flatten_metrics_in_order(logs)


@uses_private("keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs")
def epoch_logs(model, logs: dict) -> dict:
    """Returns the logs of `fit` at an epoch's end; the public API returns those of a batch only."""
    return model._get_metrics_result_or_logs(logs)


def reported_names(model) -> tuple[str, ...] | None:
    """Returns the names that a built model reports for epochs and validations; None if it has its own step."""
    import keras

    methods = ("train_step", "test_step", "compute_metrics", "get_metrics_result")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in methods):
        return None
    names = tuple(model.get_metrics_result())
    return (*names, *(f"val_{name}" for name in names))


@uses_private("keras.src.trainers.trainer:Trainer._assert_compile_called")
def check_compiled(model, method: str) -> None:
    """Raises Keras' own error for a model that is not compiled, before raytf exchanges data with other workers."""
    model._assert_compile_called(method)


@uses_private("keras.src.backend.tensorflow.trainer:TensorFlowTrainer._autoconvert_optionals")
def autoconverted(model, step):
    """Returns a step with optional inputs unwrapped as by Keras; part of its own `_make_function`."""
    return model._autoconvert_optionals(step)


@uses_private("keras.src.backend.tensorflow.trainer:TensorFlowTrainer._distribute_strategy")
def given_strategy(model):
    """Returns the strategy in whose scope a model was made, or None; `distribute_strategy` then returns the default."""
    return model._distribute_strategy


@uses_private(
    "keras.src.trainers.trainer:Trainer.fit", "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_begin"
)
def first_epoch(model) -> int:
    """Returns the epoch at which `fit` begins if a callback (`BackupAndRestore`) restored one, or 0; no public API."""
    return getattr(model, "_initial_epoch", None) or 0


def set_first_epoch(model, epoch: int) -> None:
    """Makes `fit` begin at an epoch, as `BackupAndRestore` does; 0 leaves it to `fit(initial_epoch=)`."""
    model._initial_epoch = epoch or None


# ------------------------------------------------------------------------------------------ optimizers


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._learning_rate")
def rate_of(optimizer):
    """Returns the variable or schedule of the learning rate, or None; `learning_rate` is a schedule's value."""
    return getattr(optimizer, "_learning_rate", None)


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._get_current_learning_rate")
def with_rate(optimizer, rate):
    """Returns a context in which the optimizer's learning rate, as its schedule returns it, is `rate`."""
    return patched_of(optimizer, "_get_current_learning_rate", lambda original: rate)


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._trainable_variables")
def variables_of_optimizer(optimizer) -> list:
    """Returns the variables that an optimizer was built for; `variables` are its own."""
    return optimizer._trainable_variables


@uses_private("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply")
def apply_scaled(optimizer, grads, variables) -> None:
    """Makes a step of a LossScaleOptimizer outside of TensorFlow's merge call, as Keras does on other backends."""
    optimizer._common_apply(grads, trainable_variables=variables)


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._use_weight_decay")
def decays(optimizer, variable) -> bool:
    """Returns whether an optimizer's weight decay includes a variable; its exclusions are not public."""
    return optimizer._use_weight_decay(variable)


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._use_weight_decay")
def with_decay_choice(optimizer, included) -> None:
    """Makes an optimizer use included(variable) for its choice of variables that decay; see `decays`."""
    optimizer._use_weight_decay = included


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._var_key")
def key_of(optimizer, variable):
    """Returns the key of an optimizer's state for a variable; it differs in another process."""
    return optimizer._var_key(variable)


@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._get_variable_index")
def slots_of(optimizer, variable, shape=None) -> dict[str, Any]:
    """Returns an optimizer's variables with the shape of a trained variable, for that one, by their lists' names.

    Args:
        optimizer: A built optimizer.
        variable: The trained variable.
        shape: The shape of its slots; None for that of the variable.
    """
    index, trained = optimizer._get_variable_index(variable), variables_of_optimizer(optimizer)
    shape = variable.shape if shape is None else shape
    lists = {name: item for name, item in vars(optimizer).items() if isinstance(item, list) and item is not trained}
    return {
        name: item[index]
        for name, item in lists.items()
        if len(item) == len(trained) and getattr(item[index], "shape", None) == shape
    }


@contextlib.contextmanager
@uses_private("keras.src.optimizers.base_optimizer:BaseOptimizer._get_variable_index")
def with_slots(optimizer, variable, slots: dict[str, Any]):
    """Sets these objects as the slots of a trained variable within the context, by the names of `slots_of`."""
    index, lists = optimizer._get_variable_index(variable), {name: vars(optimizer)[name] for name in slots}
    vars(optimizer).update({name: [*lists[name][:index], slots[name], *lists[name][index + 1 :]] for name in slots})
    try:
        yield
    finally:
        vars(optimizer).update(lists)


# ------------------------------------------------------------------------------------------ variables, graphs, losses


@uses_private("keras.src.backend.common.variables:Variable._value")
def variable_of(variable):
    """Returns TensorFlow's variable of a Keras variable, or None without a value; `value` waits for workers."""
    return variable._value


@uses_private("keras.src.backend.tensorflow.core:Variable._initialize")
def initialize(variable, value) -> None:
    """Creates TensorFlow's variable of a Keras variable that was made without `__init__`, as by pickle."""
    variable._initialize(value)


@uses_private("keras.src.ops.operation:Operation._inbound_nodes")
def nodes_of(operation) -> list:
    """Returns the calls of an operation in graphs, oldest first; `input` and `output` only work for a single call."""
    return operation._inbound_nodes


@uses_private("keras.src.ops.node:KerasHistory")
def history_of(tensor) -> tuple:
    """Returns (operation, call, index) of a symbolic tensor's origin; no public API."""
    return tensor._keras_history


@uses_private("keras.src.ops.function:Function._nodes")
def graph_nodes(function) -> set | None:
    """Returns the names of a functional model's nodes; None for other models."""
    return getattr(function, "_nodes", None)


@uses_private("keras.src.ops.function:Function._nodes_by_depth", "keras.src.ops.function:Function._operations")
def graph_of(function) -> tuple[dict, list]:
    """Returns (nodes by depth, operations) of a functional model, which its pickle needs for names of nodes."""
    return function._nodes_by_depth, function._operations


@uses_private("keras.src.losses.losses:LossFunctionWrapper._fn_kwargs")
def loss_arguments(loss) -> dict:
    """Returns the arguments of the function that a loss wraps; `get_config` omits those of a plain function."""
    return loss._fn_kwargs


@uses_private("keras.src.trainers.compile_utils:CompileLoss._flat_losses")
def flat_losses(compile_loss) -> list:
    """Returns the losses of all outputs, as records that can be replaced; no public API."""
    return compile_loss._flat_losses


@uses_private("keras.src.utils.backend_utils:DynamicBackend._backend")
def backend_of(dynamic) -> str:
    """Returns the backend for which a DynamicBackend, as in random layers, was made."""
    return dynamic._backend
