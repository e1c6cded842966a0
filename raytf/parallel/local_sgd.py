"""Local SGD: each worker applies its own gradients, and parameters are averaged every few steps.

See S. U. Stich, "Local SGD converges fast and communicates little", 2019. Workers send parameters once in `sync_every`
steps, instead of the gradients of each step. Optimizer slots stay local until the end of an epoch, where they are
averaged too. So a run that resumes from a checkpoint continues from the state of all workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from raytf.collectives import gradient_ring
from raytf.collectives.communicator import all_sum, local_replicas, wide
from raytf.compat import keras_objects
from raytf.parallel import model_optimizers, step

_averaging_intervals: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def attach(strategy, interval: int) -> None:
    """Makes the workers of `strategy` average every `interval` steps; 1 sums the gradients of each step."""
    if interval > 1:
        _averaging_intervals[strategy.extended] = interval


def averaging_interval(strategy) -> int:
    """Returns the number of steps between two averages, or 1 if gradients are summed."""
    return _averaging_intervals.get(strategy.extended, 1)


def average_when_due(iterations, variables: Sequence) -> None:
    """Averages variables over workers when `sync_every` steps have been made; in a replica context, after a step."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync

    def average():
        values = [wide(tf.convert_to_tensor(v.value)) for v in variables]
        ring = gradient_ring.ring_of(strategy)
        summed = ring.sum(values, None, exact=True)[0] if ring is not None else all_sum(values)
        with step.override_state(inline_merge=local_replicas(strategy) == 1):
            for variable, total in zip(variables, summed, strict=True):
                variable.assign(tf.cast(total / tf.cast(replicas, total.dtype), variable.dtype))
        return True

    tf.cond(tf.equal(tf.cast(iterations, tf.int64) % averaging_interval(strategy), 0), average, lambda: True)


def averaged_at_ends(model) -> list:
    """Returns variables that are local until the end of an epoch: parameters, and floating slots of the optimizers."""
    if averaging_interval(model.distribute_strategy) == 1:
        return []
    slots = [
        v
        for o in model_optimizers.optimizers_of(model).values()
        for v in o.variables
        if v is not keras_objects.rate_of(o)
    ]
    return [v for v in (*model.trainable_variables, *slots) if "float" in v.dtype]
