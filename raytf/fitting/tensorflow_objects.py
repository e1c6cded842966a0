"""Reduces TensorFlow objects that do not pickle: functions, tables, generators, structures."""

from __future__ import annotations

import pickle

import numpy as np
import tensorflow as tf

from raytf.compat.tensorflow import Function as TfFunction
from raytf.compat.tensorflow import (
    TrackedStructure,
    default_of,
    function_arguments,
    reserved_keys_of,
    structure_of,
    vocabulary_of,
)


def reduce_object(value):
    """Returns (function, arguments) that rebuild an object in another process; NotImplemented for others.

    Raises:
        pickle.PicklingError: It belongs to the graph of a function.
    """
    if isinstance(value, TrackedStructure):  # its constructor would access missing state
        return _plain, (structure_of(value),)
    if isinstance(value, TfFunction):
        return _function, function_arguments(value)
    if isinstance(value, tf.lookup.StaticHashTable):
        return _static_table, _table(value)
    if isinstance(value, tf.lookup.experimental.MutableHashTable):
        return _mutable_table, _table(value)
    if isinstance(value, tf.lookup.StaticVocabularyTable):
        inner, buckets = vocabulary_of(value)
        return _vocabulary_table, (None if inner is None else _table(inner), buckets, value.key_dtype)
    if isinstance(value, tf.lookup.experimental.DenseHashTable):
        return _dense_table, (*_table(value), *map(np.asarray, reserved_keys_of(value)))
    if isinstance(value, tf.random.Generator):
        return _generator, (value.state.numpy(), value.algorithm)
    if isinstance(value, tf.distribute.Strategy):
        return tf.distribute.get_strategy, ()
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        raise pickle.PicklingError(f"a symbolic tensor ({value.name}) that a function has left open")
    return NotImplemented


def _table(table) -> tuple:
    keys, values = table.export()
    return keys.numpy(), values.numpy(), (table.key_dtype, table.value_dtype), default_of(table).numpy()


def _plain(value):
    return value


def _function(function, given):
    return tf.function(function, **given)


def _static_table(keys, values, types, default):
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values, *types)
    return tf.lookup.StaticHashTable(initializer, default)


def _mutable_table(keys, values, types, default):
    table = tf.lookup.experimental.MutableHashTable(*types, default)
    if len(keys):
        table.insert(tf.constant(keys, types[0]), tf.constant(values, types[1]))
    return table


def _vocabulary_table(content, buckets, key_type):
    initializer = None
    if content is not None:
        keys, values, types, _ = content
        initializer = tf.lookup.KeyValueTensorInitializer(keys, values, *types)
    return tf.lookup.StaticVocabularyTable(initializer, buckets, lookup_key_dtype=key_type)


def _dense_table(keys, values, types, default, empty_key, deleted_key):
    table = tf.lookup.experimental.DenseHashTable(*types, default, empty_key, deleted_key)
    reserved = [(keys == key).reshape(len(keys), -1).all(1) for key in (empty_key, deleted_key)]
    used = ~(reserved[0] | reserved[1])  # `export` contains the entries that are not used, too
    if used.any():
        table.insert(tf.constant(keys[used], types[0]), tf.constant(values[used], types[1]))
    return table


def _generator(state, algorithm):
    return tf.random.Generator.from_state(state, algorithm)
