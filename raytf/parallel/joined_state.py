"""Joins the state of layers other than weights: counters, running means, codebooks.

A variable's `aggregation` defines how workers' values are joined at each assignment in a step. "sum" adds the changes
of all workers. "mean" is the mean over all rows. "only_first_replica" is the chief's value. So is each value that only
random numbers make differ. Without an `aggregation` each worker has its own value until the epoch ends. A warning names
each such variable once if it depends on a batch's rows.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from raytf import logs
from raytf.collectives import communicator
from raytf.collectives.communicator import all_sum, local_replicas
from raytf.compat import keras_objects
from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.parallel import gradients
from raytf.parallel import step as step_module

logger = logs.get_logger(__name__)


def refuse_state_of_rows(model) -> None:
    """Raises ConfigError for a stateful layer: its state is in no checkpoint, nor on workers with other rows."""
    for layer in keras_objects.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigError(
                "A step must depend on its own rows alone, as they come in another order in each epoch, and on any "
                "worker",
                f"the layer {layer.name!r}, {type(layer).__name__}(stateful=True)",
                "Use stateful=False, with longer sequences",
            )


def report_normalization(model, named: set[str]) -> None:
    """Reports once that layers normalize the rows of their own worker; results then depend on the number of workers.

    Args:
        model: A model with built layers, about to be trained by several replicas.
        named: Names that were reported already; "BatchNormalization" is added.
    """
    layers = [
        layer
        for layer in keras_objects.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
    ]
    if not layers or "BatchNormalization" in named or not communicator.is_chief(model.distribute_strategy):
        return
    named.add("BatchNormalization")
    logger.info(
        f"BatchNormalization ({len(layers)} in the model, such as {layers[0].name!r}) normalizes the rows of its own "
        "worker, as Keras does: results depend on the number of workers. BatchNormalization(synchronized=True) gives "
        "those of one process"
    )


def assigned(variable: keras.Variable, value) -> bool:
    """Assigns a variable within a step, joined over all workers; returns False, without assigning, if it is not joined.

    Called in a replica's context.
    """
    step = step_module.current()
    if step is None or getattr(step_module.state, "reduced", False):
        return False
    drawn = _is_one_draw(step, variable, value)
    if not step_module.is_joined(variable) and not drawn:
        _note(step, variable, value)
        return False
    strategy, context = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    tf_variable = keras_objects.variable_of(variable)
    value = tf.cast(value, tf_variable.dtype)
    # TensorFlow's own assignment would start another collective of the replicas
    local = strategy.experimental_local_results(tf_variable)[_local_number(context, strategy)]
    if drawn:
        (joined,) = communicator.of_first_replica([value])
    else:
        joined = _joined(step, variable.aggregation, tf.convert_to_tensor(local), value)
    local.assign(joined)
    return True


def _note(step: step_module.Step, variable: keras.Variable, value) -> None:
    """Warns of a state that follows a worker's rows; a replica without rows keeps the new value of any other."""
    if step.states is None:
        return
    step.states.note(step, variable, value)
    if not step.partial or variable.aggregation != "none":
        return
    if step.states.is_moving(variable) or step.is_in_control_flow() or gradients.may_differ(step, value):
        step.note_changed_by_rows(variable)
        if tf.executing_eagerly() and not int(step.rows):
            step.states.note_older(variable)
    else:
        step.note_complete(variable)


def of_shared(step: step_module.Step, variable: keras.Variable, old_value: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the value that a replica assigns to a variable that all replicas share, and that joins their values."""
    if getattr(step_module.state, "reduced", False):
        return value
    if not step_module.has_aggregation(variable):
        if _is_one_draw(step, variable, value):
            return communicator.of_first_replica([value])[0]
        _note(step, variable, value)
        follows_rows = id(variable) in step.shared and not step.is_complete(variable)
        return tf.where(step.rows > 0, value, old_value) if follows_rows else value
    if variable.aggregation == "sum":
        return tf.where(step.rows > 0, value, old_value)
    return _joined(step, variable.aggregation, old_value, value)


def _is_one_draw(step: step_module.Step, variable: keras.Variable, value) -> bool:
    """Returns whether a variable without an `aggregation` gets noise, of which one draw counts, or replicas diverge."""
    if variable.aggregation != "none" or variable.synchronization == "on_read" or step.is_in_control_flow():
        return False
    return gradients.differs_by_draws(step, value)


def _local_number(context, strategy) -> int:
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return int(number) % local_replicas(strategy) if local_replicas(strategy) > 1 else 0


def _joined(step: step_module.Step, aggregation: str, old_value: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    if aggregation == "sum":
        (added,) = all_sum([tf.where(step.rows > 0, value - old_value, tf.zeros_like(old_value))])
        return old_value + added
    if not gradients.may_differ(step, value):
        return value
    if aggregation == "mean" and not gradients.differs_by_draws(step, value):
        (joined,) = gradients.mean([value if value.dtype.is_floating else tf.cast(value, tf.float64)])
        return tf.cast(joined if value.dtype.is_floating else tf.round(joined), value.dtype)
    return communicator.of_first_replica([value])[0]


class States:
    """The states of a model's own layers that no `aggregation` joins, except for layers of Keras.

    Args:
        model: A model with built layers.
        named: Paths of variables that were named in a warning already; more are added.
    """

    def __init__(self, model, named: set[str]):
        self._named = named
        owners = [(v, layer) for layer in keras_objects.layers_of(model) for v in keras_objects.own_variables(layer)[1]]
        self._moving = {id(v) for v, layer in owners if isinstance(layer, keras.layers.BatchNormalization)}
        self._owners = {id(variable): layer for variable, layer in owners if id(variable) not in self._moving}
        self._layers = {
            key: layer for key, layer in self._owners.items() if not type(layer).__module__.startswith("keras.")
        }

    def is_moving(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is a moving statistic of a `BatchNormalization`."""
        return id(variable) in self._moving

    def note(self, step: step_module.Step, variable: keras.Variable, value) -> None:
        """Warns once of a variable whose assigned value depends on the rows of this worker."""
        layer = self._layers.get(id(variable))
        if layer is None or variable.path in self._named or tf.executing_eagerly():
            return
        if not gradients.may_differ(step, value):
            return
        self._named.add(variable.path)
        if not communicator.is_chief(tf.distribute.get_strategy()):
            return
        owner = "the mean of all workers'" if keras.backend.is_float_dtype(variable.dtype) else "the chief's"
        warn_user(
            f"{type(layer).__name__} {layer.name!r} keeps {variable.path!r}, which follows the rows of a batch: each "
            f"worker has its own, of its rows, and {owner} after each epoch, which is not what one process would have. "
            'Set it in add_weight: aggregation="sum" adds up what each worker adds to it, "mean" '
            'takes the mean over the rows of all, and "only_first_replica" the chief\'s',
        )

    def note_older(self, variable: keras.Variable) -> None:
        """Warns once of a variable that an eager step without rows leaves as it was: what it follows is unknown."""
        layer = self._owners.get(id(variable))
        if layer is None or variable.path in self._named:
            return
        self._named.add(variable.path)
        warn_user(
            f"{type(layer).__name__} {layer.name!r} keeps {variable.path!r}, and this worker had no row in a step that "
            "ran eagerly: it has the value from before that step until the epoch ends. Leave run_eagerly=True out, "
            "or set aggregation= in add_weight",
        )
