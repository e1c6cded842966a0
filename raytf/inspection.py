"""Builds the model once, away from the driver, and tries it on the data's shapes before any worker starts."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback

import cloudpickle

from raytf.blocks import Blocks
from raytf.errors import ConfigError

_STRING_LAYERS = ("TextVectorization", "StringLookup", "Hashing", "HashedCrossing")


_DEADLINE_SECONDS = 600.0


def inspect(pickled: bytes, block: Blocks) -> ConfigError | None:
    """What is wrong with the model or the columns, for the driver to raise, or None.

    Args:
        pickled: (build_model, config, features, labels, sample_weights, map), by cloudpickle.
        block: a block of the training data.
    """
    block = block.here()

    def answer() -> ConfigError | None:
        # no Ray from here on
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="2")
        build_model, config, *columns = cloudpickle.loads(pickled)
        try:
            check(build_model, config, block, *columns)
        except ConfigError as error:
            return error
        return None

    return _in_a_copy(answer)


def _in_a_copy(answer):
    """Calls `answer` in a fork of this process, which goes to a worker later and must not have run TensorFlow."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as file:
                try:
                    cloudpickle.dump(answer(), file)
                except BaseException as error:
                    cloudpickle.dump(_unexpected(_where(error)), file)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        readable, _, _ = select.select([file], [], [], _DEADLINE_SECONDS)
        if not readable:
            os.kill(child, signal.SIGKILL)
        said = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not readable:
        return _unexpected(f"no end after {_DEADLINE_SECONDS:g} s")
    return cloudpickle.loads(said) if said else _unexpected(f"the end of its process, with status {status}")


def _unexpected(received: str) -> ConfigError:
    return ConfigError(
        "build_model(config) must return a compiled keras.Model",
        received,
        "Call it in a process of your own to see why",
    )


def check(build_model, config, first, features, labels, sample_weights, map) -> None:
    """Raises ConfigError unless the model can train on the columns."""
    import keras

    from raytf.feed import Feed
    from raytf.worker import build_from_data

    feed = Feed(first, features=features, labels=labels, sample_weights=sample_weights, global_batch=1, map=map)
    try:
        model = build_model(dict(config))
    except Exception as error:
        raise ConfigError(
            "build_model(config) must return a compiled keras.Model", _where(error), "Correct build_model or the config"
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError(
            "build_model(config) must return a compiled keras.Model",
            f"{type(model).__module__}.{type(model).__name__}",
            "Return the model, of Keras 3",
        )
    if not model.compiled or model.optimizer is None:
        raise ConfigError(
            "build_model(config) must return a compiled keras.Model",
            f"{model.name!r}, which is not compiled with an optimizer",
            "Call model.compile(optimizer, loss, ...) in build_model",
        )
    try:
        dataset = feed.dataset()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "map must take features, labels, weights (as far as there are any) and seeds, and be TensorFlow operations",
            _where(error),
            "Correct map",
        ) from error
    _check_numeric(model, dataset)
    try:
        build_from_data(model, dataset)
    except Exception as error:
        parts = dataset.element_spec if isinstance(dataset.element_spec, tuple) else (dataset.element_spec,)
        shown = ", ".join(
            f"{role} {_shape(spec)}" for role, spec in zip(("features", "labels", "weights"), parts, strict=False)
        )
        raise ConfigError(
            "The columns must fit the model's inputs and its loss",
            f"{shown}, for which Keras says: {_first_line(error)}",
            "Choose other columns, or change the model",
        ) from error


def _check_numeric(model, dataset) -> None:
    import tensorflow as tf

    features = dataset.element_spec[0] if isinstance(dataset.element_spec, tuple) else dataset.element_spec
    strings = any(spec.dtype == tf.string for spec in tf.nest.flatten(features))
    takes = any(t.dtype == "string" for t in tf.nest.flatten(getattr(model, "inputs", None) or []))
    takes = takes or any(type(layer).__name__ in _STRING_LAYERS for layer in model._flatten_layers())
    if strings and not takes:
        raise ConfigError(
            "Features must be numbers unless the model takes strings",
            f"{_shape(features)}",
            "Encode the column, or put a StringLookup or TextVectorization layer into the model",
        )


def _shape(spec) -> str:
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{k}: {_shape(v)}" for k, v in spec.items()) + "}"
    return f"{spec.dtype.name}{tuple(spec.shape)}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("Exception encountered", "Arguments received"))]
    return f"{type(error).__name__}: {(useful or lines or [''])[0]}".rstrip(".")


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_first_line(error)} ({last.filename.rsplit('/', 1)[-1]}, line {last.lineno})"
