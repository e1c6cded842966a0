"""Local steps: each worker follows its own gradients, and parameters are averaged every few steps.

Local SGD (S. U. Stich, "Local SGD converges fast and communicates little", 2019): parameters travel once in `every`
steps, in the place of the gradients of each. Slots of optimizers stay local between the ends of epochs, where they are
averaged too, so that a run that goes on from a checkpoint goes on with what the others had.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from raytf.collectives import gradient_ring
from raytf.collectives.communicator import all_sum, local_replicas, wide
from raytf.compat import keras_objects
from raytf.parallel import model_optimizers, step

_every: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def attach(strategy, every: int) -> None:
    """Makes the workers of `strategy` average every `every` steps; 1 sums the gradients of each step."""
    if every > 1:
        _every[strategy.extended] = every


def every(strategy) -> int:
    """Steps between two averages; 1 where gradients are summed."""
    return _every.get(strategy.extended, 1)


def average_when_due(iterations, variables: Sequence) -> None:
    """In a replica context, after a step: the mean over workers of variables, when `every` steps have been made."""
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync

    def average():
        values = [wide(tf.convert_to_tensor(v.value)) for v in variables]
        ring = gradient_ring.of(strategy)
        summed = ring.sum(values, None, exact=True)[0] if ring is not None else all_sum(values)
        with step.within(inline_merge=local_replicas(strategy) == 1):
            for variable, total in zip(variables, summed, strict=True):
                variable.assign(tf.cast(total / tf.cast(replicas, total.dtype), variable.dtype))
        return True

    tf.cond(tf.equal(tf.cast(iterations, tf.int64) % every(strategy), 0), average, lambda: True)


def averaged_at_ends(model) -> list:
    """Variables that are local between the ends of epochs: parameters, and floating slots of the optimizers."""
    if every(model.distribute_strategy) == 1:
        return []
    slots = [v for o in model_optimizers.of(model).values() for v in o.variables if v is not keras_objects.rate_of(o)]
    return [v for v in (*model.trainable_variables, *slots) if "float" in v.dtype]
