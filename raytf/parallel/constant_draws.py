"""Replaces random numbers by constants, where each replica's own would hide what is compared."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

from raytf.compat.patching import patched, replacing

# The constant that replaces random numbers, as a share of their range.
_DRAWN = 0.37
# Held while one thread has constants: threads that overlap would put back each other's replacements.
_lock = threading.RLock()


@contextlib.contextmanager
def constant_draws(own_thread: bool = False) -> Iterator[None]:
    """Replaces TensorFlow's random operations, from which Keras' are made, by ones that return a constant.

    Without it each replica draws other numbers, by its own seed and for its own rows. That is no difference to report.

    Args:
        own_thread: Whether other threads, such as those of a pipeline, draw as before.
    """

    def constant_between(shape, low, high, dtype):
        dtype = tf.as_dtype(dtype)
        low = tf.cast(low, dtype)
        high = tf.cast(dtype.max if high is None else high, dtype)
        if dtype.is_floating:
            return tf.broadcast_to(low + (high - low) * tf.cast(_DRAWN, dtype), shape)
        return tf.broadcast_to(low + (high - low) // 3, shape)

    def uniform(shape, minval=0, maxval=None, dtype=tf.float32, seed=None, name=None, **_):
        floating = tf.as_dtype(dtype).is_floating
        return constant_between(shape, minval, 1 if maxval is None and floating else maxval, dtype)

    def normal(shape, mean=0.0, stddev=1.0, dtype=tf.float32, seed=None, name=None, **_):
        mean, stddev = tf.cast(mean, dtype), tf.cast(stddev, dtype)
        return tf.broadcast_to(mean + stddev * tf.cast(_DRAWN, dtype), shape)

    def stateless_uniform(shape, seed=None, minval=0, maxval=None, dtype=tf.float32, name=None, **_):
        return uniform(shape, minval, maxval, dtype)

    def stateless_normal(shape, seed=None, mean=0.0, stddev=1.0, dtype=tf.float32, name=None, **_):
        return normal(shape, mean, stddev, dtype)

    def categorical(logits, num_samples, dtype=None, seed=None, name=None, **_):
        best = tf.argmax(logits, -1, tf.as_dtype(dtype or tf.int64))
        return tf.repeat(best[:, None], num_samples, 1)

    def gamma(shape, seed=None, alpha=1.0, beta=None, dtype=tf.float32, name=None, **_):
        return tf.broadcast_to(tf.cast(alpha, dtype), shape)

    def of_means(shape, means, dtype):
        means = tf.cast(means, dtype)
        return tf.broadcast_to(means, tf.concat([tf.reshape(tf.cast(shape, tf.int32), [-1]), tf.shape(means)], 0))

    def gammas(shape, alpha, beta=None, dtype=tf.float32, seed=None, name=None):
        return of_means(shape, alpha if beta is None else tf.cast(alpha, dtype) / tf.cast(beta, dtype), dtype)

    def poisson(shape, lam, dtype=tf.float32, seed=None, name=None):
        return of_means(shape, lam, dtype)

    def binomial(shape, seed=None, counts=1, probs=0.5, output_dtype=tf.int32, name=None, **_):
        return tf.cast(tf.broadcast_to(tf.cast(counts, tf.float32) * tf.cast(probs, tf.float32), shape), output_dtype)

    def shuffle(value, seed=None, name=None):
        return tf.identity(value)

    def dropout(x, rate=None, noise_shape=None, seed=None, name=None, **_):
        return tf.identity(x)

    drawn = {
        "uniform": uniform,
        "normal": normal,
        "truncated_normal": normal,
        "stateless_uniform": stateless_uniform,
        "stateless_normal": stateless_normal,
        "stateless_truncated_normal": stateless_normal,
        "gamma": gammas,
        "poisson": poisson,
        "categorical": categorical,
        "stateless_categorical": lambda logits, num_samples, seed, dtype=None, name=None: categorical(
            logits, num_samples, dtype
        ),
        "stateless_gamma": gamma,
        "stateless_binomial": binomial,
        "shuffle": shuffle,
    }
    as_method = lambda function: lambda self, *args, **kwargs: function(*args, **kwargs)
    generated = {"uniform": uniform, "normal": normal, "truncated_normal": normal}
    replaced = [(tf.random.Generator, name, as_method(function)) for name, function in generated.items()]
    replaced += [(tf.random, name, function) for name, function in drawn.items()]
    replaced += [(tf.nn, "dropout", dropout), (tf.nn.experimental, "stateless_dropout", dropout)]
    with contextlib.ExitStack() as ends:
        if own_thread:
            ends.enter_context(_lock)
        for owner, name, function in replaced:
            new = replacing(getattr(owner, name), _of_this_thread(function)) if own_thread else function
            ends.enter_context(patched(owner, name, new))
        yield


def _of_this_thread(function: Callable) -> Callable:
    """Returns a replacement that other threads do not see."""
    thread = threading.get_ident()

    def call(original, *args, **kwargs):
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
