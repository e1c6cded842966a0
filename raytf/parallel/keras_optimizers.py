"""Keras' own optimizers: their kind, and their variables in this process; for compiled, lazy and sharded updates."""

from __future__ import annotations

from collections.abc import Collection

import keras
import tensorflow as tf

from raytf.compat import keras_objects


def is_one_of(optimizer, names: Collection[str]) -> bool:
    """Returns whether an optimizer is Keras' own of one of these names, and of no subclass."""
    return type(optimizer) in [getattr(keras.optimizers, name) for name in names]


def local_variable(variable):
    """Returns TensorFlow's variable of this process' first replica."""
    return tf.distribute.get_strategy().experimental_local_results(keras_objects.variable_of(variable))[0]
