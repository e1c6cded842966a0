"""What Keras' objects hold and do not show: models, layers, optimizers, variables. Imports no Keras by itself."""

from __future__ import annotations

import random
import threading
from typing import Any

from raytf.compat.patching import patched_of
from raytf.compat.versions import uses

# ------------------------------------------------------------------------------------------ layers and models


@uses("keras.src.layers.layer:Layer._flatten_layers")
def layers_of(layer, with_itself: bool = True) -> list:
    """All layers within a layer or model; `Model.layers` has the direct ones only."""
    return list(layer._flatten_layers(include_self=with_itself))


@uses("keras.src.layers.layer:Layer._trainable_variables", "keras.src.layers.layer:Layer._non_trainable_variables")
def own_variables(layer) -> tuple[list, list]:
    """(trainable, other) variables of a layer without those of layers within it; public lists have all together."""
    return layer._trainable_variables, layer._non_trainable_variables


@uses("keras.src.layers.layer:Layer._seed_generators")
def seed_generators_of(layer) -> list:
    """The layer's own sources of seeds; their states are among `variables`, but not told apart there."""
    return layer._seed_generators


def seeds_of(model) -> list:
    """The states of the seed generators of the model's layers, and last of the global one if something has drawn."""
    return list({id(v): v for v in (*seeds_of_layers(model), *shared_seed())}.values())


def seeds_of_layers(model) -> list:
    """The states of the seed generators of the model's layers."""
    return list({id(g): g.state for layer in layers_of(model) for g in seed_generators_of(layer)}.values())


def shared_seed() -> list:
    """The state of the global seed generator, if something has drawn from it in this process, which may be a callback
    of one worker alone."""
    from raytf.compat.keras import shared_seed_generator

    shared = shared_seed_generator() or _made_elsewhere()
    return [] if shared is None else [shared.state]


@uses("keras.src.random.seed_generator:global_seed_generator")
def make_shared_seed() -> list:
    """As `shared_seed`, of a generator that is made if there is none, as its first draw would; that would count in it.

    Where several workers draw from it within their steps it is to be made by all before these begin: made by their
    first draw it would have a seed of each worker's own, of which a checkpoint keeps the chief's.
    """
    from raytf.compat.keras import seed_module

    state = random.getstate()  # the seed is drawn from it
    generator = seed_module.global_seed_generator()
    random.setstate(state)
    _made[:] = [(generator, threading.current_thread())]
    return [generator.state]


# The newest that `make_shared_seed` gave, and the thread that it was made in.
_made: list[tuple[Any, threading.Thread]] = []


def _made_elsewhere():
    """The global seed generator that another thread made and trains with; Keras keeps one for each thread."""
    for generator, thread in _made:
        if thread is not threading.current_thread() and thread.is_alive():
            return generator
    return None


def shared_of_replicas():
    """In a replica's thread the generator that `make_shared_seed` made under its strategy, elsewhere None."""
    import tensorflow as tf

    made = _made_elsewhere() if hasattr(threading.current_thread(), "replica_id") else None
    mine = (
        made is not None and getattr(held_by(made.state), "distribute_strategy", None) is tf.distribute.get_strategy()
    )
    return made if mine else None


@uses("keras.src.layers.core.embedding:Embedding._embeddings")
def table_of(layer):
    """The variable of an Embedding; `embeddings` gives a tensor where the layer is quantized or has LoRA."""
    return getattr(layer, "_embeddings", None)


@uses("keras.src.layers.layer:Layer._call_has_training_arg")
def takes_training(layer) -> bool:
    """Whether `call` takes `training=`; Keras found out and has no public word for it."""
    return layer._call_has_training_arg


@uses("keras.src.trainers.trainer:Trainer._symbolic_build")
def build_for(model, data_batch) -> None:
    """Builds model, loss and metrics for a batch; `build` takes shapes and leaves loss and metrics out."""
    model._symbolic_build(data_batch=data_batch)


@uses("keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter._first_batches")
def first_batch(adapter):
    """The first batch of a Python generator, which Keras has read for its shapes, and keeps; None of other data."""
    return next(iter(getattr(adapter, "_first_batches", ())), None)


@uses("keras.src.trainers.trainer:Trainer._compile_loss", "keras.src.trainers.trainer:Trainer._compile_metrics")
def compiled_parts(model) -> tuple[Any, Any]:
    """(loss, metrics) as `compile` made them, or None each; `model.loss` and `model.metrics` hold what was given."""
    return model._compile_loss, model._compile_metrics


@uses("keras.src.trainers.trainer:Trainer._compute_loss")
def step_loss(model, *args, **kwargs):
    """The loss of a step, whichever signature the user's `compute_loss` has: callers of the public one must know."""
    return model._compute_loss(*args, **kwargs)


@uses("keras.src.trainers.trainer:Trainer._loss_tracker")
def loss_tracker_of(model):
    """The metric that holds the mean loss; `metrics` has it first, unless the user's property hides it."""
    return model._loss_tracker


@uses("keras.src.metrics.reduction_metrics:MeanMetricWrapper._fn")
def function_of(metric):
    """The function whose values a metric averages, None of others; `get_config` has it as a name."""
    return getattr(metric, "_fn", None)


@uses("keras.src.trainers.trainer:Trainer._flatten_metrics_in_order")
def in_order(model, logs: dict) -> list:
    """Values of logs as `evaluate` gives them without `return_dict`; the order is known to Keras alone."""
    return model._flatten_metrics_in_order(logs)


@uses("keras.src.trainers.trainer:Trainer._get_metrics_result_or_logs")
def epoch_logs(model, logs: dict) -> dict:
    """The logs that `fit` takes for an epoch's end; a public way gives those of a batch only."""
    return model._get_metrics_result_or_logs(logs)


@uses("keras.src.trainers.trainer:Trainer._assert_compile_called")
def check_compiled(model, method: str) -> None:
    """Raises Keras' own error for a model that is not compiled, before raytf asks other workers for anything."""
    model._assert_compile_called(method)


@uses("keras.src.backend.tensorflow.trainer:TensorFlowTrainer._autoconvert_optionals")
def autoconverted(model, step):
    """A step whose optional inputs are unwrapped as Keras unwraps them; part of its own `_make_function`."""
    return model._autoconvert_optionals(step)


@uses("keras.src.backend.tensorflow.trainer:TensorFlowTrainer._distribute_strategy")
def given_strategy(model):
    """The strategy in whose scope a model was made, or None; `distribute_strategy` gives the default one then."""
    return model._distribute_strategy


@uses(
    "keras.src.trainers.trainer:Trainer.fit", "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_begin"
)
def first_epoch(model) -> int:
    """The epoch at which `fit` begins where a callback restored one (`BackupAndRestore`); nothing public tells."""
    return getattr(model, "_initial_epoch", None) or 0


def set_first_epoch(model, epoch: int) -> None:
    """Has `fit` begin at an epoch, as `BackupAndRestore` does; 0 leaves it to `fit(initial_epoch=)`."""
    model._initial_epoch = epoch or None


# ------------------------------------------------------------------------------------------ optimizers


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._learning_rate")
def rate_of(optimizer):
    """The variable or schedule of the learning rate, None without one; `learning_rate` gives a schedule's value."""
    return getattr(optimizer, "_learning_rate", None)


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._get_current_learning_rate")
def rate_is(optimizer, rate):
    """Within it the optimizer's learning rate, as a schedule of its gives it, is `rate`."""
    return patched_of(optimizer, "_get_current_learning_rate", lambda original: rate)


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._trainable_variables")
def trained_by(optimizer) -> list:
    """The variables that an optimizer was built for; `variables` are its own."""
    return optimizer._trainable_variables


@uses("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._common_apply")
def apply_scaled(optimizer, grads, variables) -> None:
    """A step of a LossScaleOptimizer outside of TensorFlow's merge call, as Keras makes it on other backends."""
    optimizer._common_apply(grads, trainable_variables=variables)


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._use_weight_decay")
def decays(optimizer, variable) -> bool:
    """Whether an optimizer's weight decay includes a variable; what it was told to exclude is not public."""
    return optimizer._use_weight_decay(variable)


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._use_weight_decay")
def decay_as(optimizer, included) -> None:
    """Has an optimizer ask included(variable) which variables decay; see `decays`."""
    optimizer._use_weight_decay = included


@uses("keras.src.optimizers.base_optimizer:BaseOptimizer._var_key")
def key_of(optimizer, variable):
    """The key by which an optimizer finds what it has for a variable; made anew in another process."""
    return optimizer._var_key(variable)


# ------------------------------------------------------------------------------------------ variables, graphs, losses


@uses("keras.src.backend.common.variables:Variable._value")
def held_by(variable):
    """TensorFlow's variable of a Keras variable, None before it has a value; `value` reads it, or waits for workers."""
    return variable._value


@uses("keras.src.backend.tensorflow.core:Variable._initialize")
def initialize(variable, value) -> None:
    """Makes TensorFlow's variable of a Keras variable that was made without `__init__`, as pickles make it."""
    variable._initialize(value)


@uses("keras.src.ops.operation:Operation._inbound_nodes")
def nodes_of(operation) -> list:
    """The calls of an operation in graphs, oldest first; `input` and `output` know the only one."""
    return operation._inbound_nodes


@uses("keras.src.ops.node:KerasHistory")
def history_of(tensor) -> tuple:
    """(operation, call, index) that a symbolic tensor came of; nothing public tells."""
    return tensor._keras_history


@uses("keras.src.ops.function:Function._nodes")
def graph_nodes(function) -> set | None:
    """Names of the nodes of a functional model; None of others."""
    return getattr(function, "_nodes", None)


@uses("keras.src.ops.function:Function._nodes_by_depth", "keras.src.ops.function:Function._operations")
def graph_of(function) -> tuple[dict, list]:
    """(nodes by depth, operations) of a functional model, which a pickle needs for its names of nodes."""
    return function._nodes_by_depth, function._operations


@uses("keras.src.losses.losses:LossFunctionWrapper._fn_kwargs")
def loss_arguments(loss) -> dict:
    """Arguments of the function that a loss wraps; `get_config` leaves those of a plain function out."""
    return loss._fn_kwargs


@uses("keras.src.trainers.compile_utils:CompileLoss._flat_losses")
def flat_losses(compile_loss) -> list:
    """The losses of all outputs, a record each that may be exchanged; nothing public reaches them."""
    return compile_loss._flat_losses


@uses("keras.src.utils.backend_utils:DynamicBackend._backend")
def backend_of(dynamic) -> str:
    """The backend that a DynamicBackend, which random layers hold, was made for."""
    return dynamic._backend
