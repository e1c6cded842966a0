"""A worker's own state: variables that a step changes besides its update, such as metrics, moving statistics, seeds.

Other workers do not have it, or have it as of the next step. So each worker sends it to the next one of the ring after
every step, for its replacement worker. See `raytf.collectives.recovery_client`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from raytf.collectives import communicator, gradient_ring, recovery_client
from raytf.collectives.exchange import NO_NUMBERS
from raytf.compat import keras_objects
from raytf.compat.tensorflow import separate_function
from raytf.errors import RaytfError
from raytf.parallel import model_optimizers
from raytf.parallel import step as step_module


def variables_of(model) -> list:
    """Returns the variables, in the same order on all workers of a model."""
    states = [v for layer in keras_objects.layers_of(model) for v in keras_objects.own_variables(layer)[1]]
    shared = keras_objects.shared_seed()
    # later seeds that no step draws from belong to a callback of one worker only
    shared_ids = model.__dict__.setdefault("_raytf_shared_seed", {id(v) for v in shared}) | _written(model).keys()
    seeds = [*keras_objects.seeds_of_layers(model), *(v for v in shared if id(v) in shared_ids)]
    return list({id(v): v for v in (*model.metrics_variables, *states, *seeds)}.values())


def bytes_of(model) -> int | None:
    """Returns their number of bytes; None if some have no fixed number."""
    variables = variables_of(model)
    if any(tf.as_dtype(v.dtype) in NO_NUMBERS for v in variables):
        return None
    return sum(map(communicator.bytes_of, variables))


def passing_on(model, replica_step):
    """Returns a replica's step that also sends its own state to the next worker, if the workers' ring can recover."""
    holder = gradient_ring.ring_of(model.distribute_strategy)
    if holder is None or not recovery_client.client.armed:
        return replica_step

    def step(data):
        with step_module.override_state(written=_written(model)):
            outputs = replica_step(data)
        holder.send_to_successor([tf.convert_to_tensor(v.value) for v in variables_of(model)])
        return outputs

    return step


def _written(model) -> dict[int, keras.Variable]:
    """Returns the variables, by id, that steps assign outside of optimizers' updates; recorded during tracing."""
    return model.__dict__.setdefault("_raytf_written", {})


def written_early(model) -> list[str]:
    """Returns paths of variables, other than own state, that a step may change before its gradients are summed.

    While a worker waits in a step, they do not have their values from before the step.
    """
    own_ids = {id(v) for v in variables_of(model)}
    return sorted(v.path for key, v in _written(model).items() if key not in own_ids)


def send_at_epoch_begin(model) -> None:
    """Sends a worker's own state at the begin of an epoch; every worker calls it."""
    recovery_client.client.send_state_at_epoch_begin(
        gradient_ring.ring_of(model.distribute_strategy), content_of(model)
    )


def send_averaged(model) -> None:
    """Sends a worker's own state after a checkpoint that averaged it over workers; every worker calls it."""
    if recovery_client.client.armed:
        recovery_client.client.send_averaged_state(gradient_ring.ring_of(model.distribute_strategy), content_of(model))


def send_before_execution(model) -> None:
    """Sends own state that callbacks that read batches may have changed since the last step, as `evaluate` does."""
    if recovery_client.client.armed and model.__dict__.get("_raytf_sync_batches"):
        recovery_client.client.send_state_before_execution(
            gradient_ring.ring_of(model.distribute_strategy), content_of(model)
        )


def content_of(model) -> bytes:
    """Returns the values of these variables as bytes, for `take`."""
    variables = variables_of(model)
    key = [id(v) for v in variables]
    known, function = model.__dict__.get("_raytf_own_state", (None, None))
    if known != key:
        strategy = model.distribute_strategy
        read = lambda: [tf.identity(v.value) for v in variables]
        function = separate_function(
            lambda: [strategy.experimental_local_results(v)[0] for v in strategy.run(read)], autograph=False
        )
        model.__dict__["_raytf_own_state"] = key, function
    return b"".join(value.numpy().tobytes() for value in function())


def alike(model) -> list:
    """Returns the variables that are equal on all workers: all others of a model and its optimizers."""
    own_ids = {id(v) for v in variables_of(model)}
    return list({id(v): v for v in (*model.variables, *model_optimizers.alike(model)) if id(v) not in own_ids}.values())


def check_alike(model) -> None:
    """Checks after a recovery that all workers have equal weights and optimizer state.

    Raises:
        RaytfError: They differ.
    """
    recovery_client.client.recovered = False
    digest = 0
    for variable in alike(model):
        digest = zlib.crc32(local_value(model.distribute_strategy, variable), digest)
    ring = gradient_ring.ring_of(model.distribute_strategy).ring
    digests = np.zeros(ring.size, np.int64)
    digests[ring.rank] = digest
    (digests,) = communicator.sum_over_workers(model.distribute_strategy, [digests])
    if len(set(digests.tolist())) > 1:
        raise RaytfError(
            "A worker can be replaced in place where a step changes weights by its summed gradients alone, received: "
            "other weights on some workers after the step in which one was replaced. A train_step that changes them "
            "before its optimizer does, such as a moving copy of weights, a callback whose compiled function does, and "
            "one that changes them by what a checkpoint does not keep of it need TensorflowConfig(heal=False)."
        )


def take(model, content: bytes) -> None:
    """Restores a model's own state from bytes of another worker.

    Raises:
        ValueError: The bytes are of another model.
    """
    # not in a replica, where TensorFlow joins what is assigned to a variable with an `aggregation`
    put(model, list(map(np.array, values_of(model, content))))  # copies: TensorFlow may keep the memory of an array


def values_of(model, content: bytes) -> list[np.ndarray]:
    """Returns the values of `variables_of` from another worker's bytes; raises ValueError, see `take`."""
    values, begin = [], 0
    for variable in variables_of(model):
        kind = tf.as_dtype(variable.dtype).as_numpy_dtype
        end = begin + communicator.bytes_of(variable)
        values.append(np.frombuffer(content[begin:end], kind).reshape(tuple(variable.shape)))
        begin = end
    if begin != len(content):
        raise ValueError(f"{len(content)} bytes for variables of {begin}")
    return values


def put(model, values: Sequence[np.ndarray]) -> None:
    """Assigns the variables in this process only, from any thread, also while a step of the model waits."""
    put_each(model.distribute_strategy, zip(variables_of(model), values, strict=True))


def local_value(strategy, variable) -> np.ndarray:
    """Returns the value of a variable in this process as bytes, without a copy if TensorFlow allows it."""
    array = communicator.read(strategy.experimental_local_results(keras_objects.variable_of(variable))[0])
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def put_each(strategy, pairs: Iterable[tuple]) -> None:
    """Assigns each (variable, value) like `put`."""
    for variable, value in pairs:
        (local,) = strategy.experimental_local_results(keras_objects.variable_of(variable))
        local.assign(value)
