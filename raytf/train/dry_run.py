"""Builds the model once, outside of the driver, and tries it on the data's shapes before any worker starts.

Over 500 lines: what is tried runs in one order, which is to be read at once.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import sys
import time
from collections.abc import Mapping

import psutil
from ray import cloudpickle

from raytf import timeouts
from raytf.compat import autograph, keras_objects, legacy_names, versions
from raytf.compat.patching import patched
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import of_dataset
from raytf.data.record_files import RecordBlocks
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import PipelineFacts, TFData
from raytf.errors import ConfigError, UnsupportedVersionError, tensorflow_line, user_line, without_escapes
from raytf.identity import canonical, config_keys, fingerprint
from raytf.identity.config_keys import AccessTrackingConfig
from raytf.parallel import model_optimizers
from raytf.train import verify
from raytf.worker import inputs

_STRING_LAYERS = ("TextVectorization", "StringLookup", "Hashing", "HashedCrossing")


_KERAS_2 = "train with raytf.TensorflowTrainer and raytf.TensorflowConfig(legacy_keras=True)"
_MEASURED_STEPS = 5
# Number of rows whose labels are checked if a map changes them.
_MAPPED_ROWS = 32


def inspect(
    pickled: bytes,
    block: StoredDataset | TFData,
    rows: int | None = None,
    options: verify.VerificationOptions | None = None,
    validation: StoredDataset | TFData | None = None,
) -> ConfigError | UnsupportedVersionError | DryRunResult:
    """Checks the model and the columns. Returns an error for the driver to raise, or the model's properties.

    It checks untested versions of Ray, Keras and TensorFlow first.

    Args:
        pickled: (build_model, config, the `batch_spec.BatchSpec`, keys of the config that something must read,
            callbacks or None), by cloudpickle.
        block: A block of the training data, or a pipeline.
        rows: Number of rows of the measured steps, or None for no figures.
        options: How to compare two workers with one device meanwhile, or None.
        validation: A block of the validation data, or a pipeline, to check, too; or None.
    """
    block, validation = _local_rows(block), validation and _local_rows(validation)
    for block_or_error in (block, validation):
        if isinstance(block_or_error, ConfigError):
            return block_or_error
    warning = _in_a_copy(_check_versions) if versions.untested_versions() else None
    if isinstance(warning, Exception):
        return warning
    trial = None if options is None else verify.task_factory(pickled, block, validation, options.batch)
    comparison = None if options is None else verify.start_comparison(trial, low_priority=options.may_continue)
    result = _tried(pickled, block, rows, warning, validation)
    if comparison is None:
        return result
    if not isinstance(result, DryRunResult):
        verify.cancel(comparison)
        return result
    verification = verify.outcome(comparison, options.wait)
    if verification is None and not options.may_continue:
        verify.cancel(comparison)
        verification = verify.VerificationResult(skipped="it took too long")
    return dataclasses.replace(
        result, verification=verification, comparison=comparison if verification is None else None
    )


def _tried(
    pickled: bytes,
    block: StoredDataset | TFData,
    rows: int | None,
    warning: str | None,
    validation: StoredDataset | TFData | None,
) -> ConfigError | DryRunResult:
    """Does the work of `inspect` for compatible versions."""

    def answer() -> ConfigError | DryRunResult:
        # without Ray from this line on
        os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="2")
        build_model, config, batch, names, callbacks = cloudpickle.loads(pickled)
        noted = AccessTrackingConfig(config)
        references = sys.getrefcount(noted)
        pipelines = _pipeline_facts(block, validation, config)
        model = check(build_model, noted, block, batch, config.get("batch_size"))
        if isinstance(block, StoredDataset) and isinstance(validation, StoredDataset):
            _check_shapes(block, validation, dataclasses.replace(batch, map=None))
        if validation is not None:
            _check_validation(model, validation, batch, config["batch_size"])
        noted.read |= config_keys.mentioned_keys(build_model).intersection(config)  # keys that its functions read later
        identity = _identity(model, noted, config, block, batch)
        functions = [build_model] if callbacks is None else [build_model, callbacks]
        unread = config_keys.unread_keys(names, noted, functions, references)
        facts = None if rows is None else _measured(model, _feed(block, batch, rows))
        return DryRunResult(facts, identity, warning, unread, keras_objects.reported_names(model), pipelines)

    return _in_a_copy(answer)


def _local_rows(block: StoredDataset | TFData) -> StoredDataset | TFData | ConfigError:
    """Returns the rows in this process; records are parsed in a copy of it, as TensorFlow does that."""
    return _in_a_copy(block.with_blocks) if isinstance(block, RecordBlocks) else block.with_blocks()


def _check_versions():
    os.environ.update(CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="2")
    from raytf.parallel import step_check

    return step_check.refusal()


def _identity(model, noted: AccessTrackingConfig, config: dict, block: StoredDataset, batch: BatchSpec) -> dict:
    """Returns the identity of the model, of the config values that it was built with, and of its columns' types."""
    values = {**noted.defaults, **config}
    keys = set(values) if noted.whole else noted.read & set(values)
    read = {key: values[key] for key in sorted(keys - config_keys.TRAINER_KEYS, key=str)}
    types = {} if isinstance(block, TFData) else fingerprint.types_of(block.refs[0], *batch.roles.values())
    return fingerprint.model_fingerprint(model) | {"config": canonical.describe(read), "types": types}


@dataclasses.dataclass(frozen=True)
class DryRunResult:
    """Properties of a model and columns that fit each other.

    Args:
        facts: Figures, or None if they were not requested.
        identity: Identity of the model and of the columns' types, see `fingerprint.model_fingerprint`.
        warning: One line on untested versions that work, or None.
        unread: Keys of the config that nothing read, see `config_keys.unread_keys`.
        logs: Names of an epoch's metrics and of its validation's, without metrics of callbacks. None if the model has
            its own step.
        pipelines: Properties of pipelines, by name of the dataset.
        verification: Result of the comparison of two workers with one device, or None.
        comparison: The comparison if it continues in the process that ran `inspect`, or None.
    """

    facts: ModelFacts | None
    identity: dict
    warning: str | None = None
    unread: dict[str, str] = dataclasses.field(default_factory=dict)
    logs: tuple[str, ...] | None = None
    pipelines: dict[str, PipelineFacts] = dataclasses.field(default_factory=dict)
    verification: verify.VerificationResult | None = None
    comparison: verify.ComparisonProcess | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Figures of a model and its data.

    Args:
        parameters: Number of trainable parameters.
        weight_bytes, optimizer_bytes, gradient_bytes: Bytes of all variables, of the optimizer's variables, and of the
            dense gradients of a step.
        table_slot_bytes: Bytes of the optimizer's variables for tables of `Embedding`s.
        largest_bytes: Bytes of the largest variable.
        sparse_bytes: Bytes of the table rows for which a step has gradients.
        wide_gradients: Whether gradients have more than 16 bits.
        row_bytes: Bytes of a row of the data.
        step_seconds: Median duration of a training step, in seconds.
    """

    parameters: int
    weight_bytes: int
    largest_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    sparse_bytes: int
    wide_gradients: bool
    row_bytes: float
    step_seconds: float
    table_slot_bytes: int = 0


def _measured(model, feed) -> ModelFacts:
    """Returns `_facts`; raises ConfigError if a step fails."""
    try:
        return _facts(model, feed)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "A training step on the first rows must work",
            _error_with_line(error),
            "Correct these rows, or change the model",
        ) from error


def _facts(model, feed) -> ModelFacts:
    import numpy as np
    import tensorflow as tf

    def size(variables):
        return int(sum(np.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables))

    batch = next(iter(feed.dataset()))
    step = tf.function(model.train_step)
    seconds = []
    for _ in range(_MEASURED_STEPS + 1):
        began = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy() if isinstance(t, tf.Tensor) else t, step(batch))
        seconds.append(time.perf_counter() - began)
    tables = {id(keras_objects.table_of(layer)) for layer in keras_objects.layers_of(model)}
    table_slots = [
        slot
        for optimizer in map(model_optimizers.unscaled, model_optimizers.optimizers_of(model).values())
        for variable in keras_objects.variables_of_optimizer(optimizer)
        if id(variable) in tables
        for slot in keras_objects.slots_of(optimizer, variable).values()
    ]
    dense, sparse = _bytes_of(_gradients(model, batch))
    return ModelFacts(
        parameters=int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        largest_bytes=max((size([v]) for v in model.variables), default=0),
        weight_bytes=size(model.trainable_variables + model.non_trainable_variables),
        optimizer_bytes=size(model_optimizers.variables(model)),
        table_slot_bytes=size(table_slots),
        gradient_bytes=dense,
        sparse_bytes=sparse,
        wide_gradients=any(tf.as_dtype(v.dtype).size > 2 for v in model.trainable_variables),
        row_bytes=float(feed.row_bytes),
        step_seconds=float(np.median(seconds[1:])),
    )


def _gradients(model, batch) -> list:
    """Returns the gradients of a step; for an own `train_step`, the gradients of all calls of optimizers."""
    import keras
    import tensorflow as tf

    from raytf.compat.keras import BaseOptimizer

    if type(model).train_step is keras.Model.train_step:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if keras_objects.takes_training(model) else model(x)
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])
    gradients, original = [], BaseOptimizer.apply

    def noted(self, grads, trainable_variables=None):
        gradients.extend(grads)
        return original(self, grads, trainable_variables)

    with patched(BaseOptimizer, "apply", noted):
        model.train_step(batch)
    return gradients


def _bytes_of(gradients) -> tuple[int, int]:
    """Returns the bytes of dense gradients, and of sparse ones with their indices."""
    import tensorflow as tf

    dense = sparse = 0
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            sparse += int(tf.size(gradient.values)) * gradient.values.dtype.size
            sparse += int(tf.size(gradient.indices)) * gradient.indices.dtype.size
        elif gradient is not None:
            dense += int(tf.size(gradient)) * gradient.dtype.size
    return dense, sparse


def _in_a_copy(answer):
    """Calls `answer` in a fork of this process, which may become a worker and must not have run TensorFlow.

    The fork's output is shown only after an error, as otherwise the workers print the same.
    """
    reader, writer = os.pipe()
    printed = os.memfd_create("printed")
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            for stream in (1, 2):
                os.dup2(printed, stream)
            with os.fdopen(writer, "wb") as file:
                try:
                    with autograph.in_memory():
                        result = answer()
                    cloudpickle.dump(result, file)
                except ConfigError as error:
                    cloudpickle.dump(error, file)
                except BaseException as error:
                    cloudpickle.dump(_unexpected(_error_with_line(error)), file)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.close(writer)
    result = _read(reader, time.monotonic() + timeouts.get().dry_run)
    if result is None:
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(status)
    if result is None:
        answer = _unexpected(f"no end after {timeouts.get().dry_run:g} s")
    elif status < 0:  # its result may be incomplete
        answer = _ended_by(-status, used.ru_maxrss << 10)
    else:
        answer = cloudpickle.loads(result) if result else _unexpected(f"the end of its process, with status {status}")
    with os.fdopen(printed, "rb") as file:
        if isinstance(answer, ConfigError):
            file.seek(0)
            sys.stderr.write(file.read().decode(errors="replace"))
    return answer


def _read(reader: int, deadline: float) -> bytes | None:
    """Returns all that other processes write into a pipe, and closes it; None without an end by the deadline."""
    parts = []
    with os.fdopen(reader, "rb", buffering=0) as file:
        poll = select.poll()
        poll.register(file, select.POLLIN)
        while poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            parts.append(file.read(1 << 20))
            if not parts[-1]:
                return b"".join(parts)
    return None


def _ended_by(number: int, most: int) -> ConfigError:
    """Returns the error for a process that a signal has ended.

    Args:
        number: Number of the signal.
        most: Peak memory of the process, in bytes.
    """
    name, had = signal.Signals(number).name, f"{most >> 20} MB of memory at most"
    if number != signal.SIGKILL:
        return ConfigError(
            "The model is built, and tried, in a process of its own before the run starts",
            f"its end by {name}, with {had}",
            "Call build_model(config) in a process of your own to see why",
        )
    free = psutil.virtual_memory().available >> 20
    return ConfigError(
        "The model is built, and tried, in a process of its own before the run starts, and needs memory there",
        f"its end by {name}, with {had}: so the kernel ends what takes more memory than there is"
        f" ({free} MB are free now)",
        "Start the driver where more memory is free, or give its container more; look into the kernel's log (dmesg)",
    )


def _unexpected(received: str) -> ConfigError:
    return ConfigError(
        "build_model(config) must return a compiled keras.Model",
        received,
        "Call it in a process of your own to see why",
    )


def _feed(block: StoredDataset | TFData, batch: BatchSpec, rows: int):
    from raytf.data.feed import open_feed

    return open_feed(block, batch, Sampling(global_batch=rows), saved={"steps": 1})


def _pipeline_facts(
    block: StoredDataset | TFData, validation: StoredDataset | TFData | None, config: Mapping
) -> dict[str, PipelineFacts]:
    from raytf.data import pipeline

    sampling = Sampling(global_batch=config["batch_size"])
    given = {"train": block, "validation": validation}
    return {
        name: pipeline.inspect(dataset, sampling, name)
        for name, dataset in given.items()
        if isinstance(dataset, TFData)
    }


def check(build_model, config, first: StoredDataset | TFData, batch: BatchSpec, rows: int = 1):
    """Builds the model for the columns and returns it; raises ConfigError unless it can train on them.

    Args:
        build_model: The user's function.
        config: Config for `build_model`.
        first: A block of the data, or a pipeline.
        batch: Parts of a batch.
        rows: Number of rows of a batch, for a pipeline.
    """
    import keras
    import tensorflow as tf

    from raytf.worker import labels
    from raytf.worker.fit import build_from_data

    feed = _feed(first, batch, rows if isinstance(first, TFData) else 1)
    try:
        model = build_model(config)
    except Exception as error:
        if isinstance(error, KeyError) and error.args[0] in getattr(config, "missing", ()):
            raise _missing(error.args[0], config, _error_with_line(error)) from error
        raise ConfigError(
            "build_model(config) must return a compiled keras.Model",
            _error_with_line(error),
            legacy_names.hint(error, _KERAS_2) or "Correct build_model or the config",
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError(
            "build_model(config) must return a compiled keras.Model",
            f"{type(model).__module__}.{type(model).__name__}",
            "Return the model, of Keras 3",
        )
    if not model.compiled or not model_optimizers.optimizers_of(model):
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
            _error_with_line(error),
            "Correct map",
        ) from error
    _check_numeric(model, dataset)
    labels.check_kind(model, dataset.element_spec)
    try:
        build_from_data(model, dataset)
        if not model_optimizers.has_call(model):
            tf.function(model.train_step).get_concrete_function(dataset.element_spec)
    except ConfigError:
        raise
    except Exception as error:
        labels.refuse_unknown(error)
        parts = dataset.element_spec if isinstance(dataset.element_spec, tuple) else (dataset.element_spec,)
        shown = ", ".join(
            f"{role} {_shape(spec)}" for role, spec in zip(("features", "labels", "weights"), parts, strict=False)
        )
        fix = "Choose other columns, or change the model"
        if isinstance(first, TFData):
            fix = f"Change what {first.name!r} gives, or the model"
        elif batch.labels is None and len(parts) == 1:
            shown, fix = f"{shown} and no labels", f"{fix}; labels= names the column that a loss compares with"
        fix = labels.hint(model, dataset.element_spec) or fix
        raise ConfigError(
            "The columns must fit the model's inputs and its loss",
            f"{shown}, for which Keras reports: {_first_line(error)}",
            fix,
        ) from error
    labels.check_shapes(model, dataset.element_spec)
    if not model_optimizers.decides_itself(model):  # its step may change what it gets
        features = keras.utils.unpack_x_y_sample_weight(dataset.element_spec)[0]
        inputs.check_types(model, features, "Choose other columns, or change the model's input")
    _check_labels(model, first, batch, feed, dataset.element_spec)
    return model


def _check_validation(model, dataset: StoredDataset | TFData, batch: BatchSpec, rows: int) -> None:
    """Raises ConfigError for validation labels that the loss does not accept; no map changes them."""
    batch = dataclasses.replace(batch, map=None)
    feed = _feed(dataset, batch, rows if isinstance(dataset, TFData) else 1)
    with of_dataset("validation"):
        _check_labels(model, dataset, batch, feed, feed.dataset().element_spec)


def _check_shapes(block: StoredDataset, validation: StoredDataset, batch: BatchSpec) -> None:
    """Raises ConfigError for validation columns of other shapes than those of the training."""
    import tensorflow as tf

    specs = [tf.nest.flatten(_feed(data, batch, 1).dataset().element_spec) for data in (block, validation)]
    for column, train_spec, valid_spec in zip(batch.columns, *specs, strict=False):
        text = (train_spec.dtype == tf.string) != (valid_spec.dtype == tf.string)
        if text or not train_spec.shape.is_compatible_with(valid_spec.shape):
            raise ConfigError(
                "Columns of the validation must have the shapes that they have in the training",
                f"{', '.join(column.names)}: {_shape(valid_spec)} in 'validation', {_shape(train_spec)} in 'train'",
                "Make both by the same steps",
            )


def _missing(key: str, config: AccessTrackingConfig, location: str) -> ConfigError:
    option = "--learning-rate NUMBER" if key == "learning_rate" else f"--set {key}=VALUE"
    return ConfigError(
        "config must hold each key that build_model reads",
        f"a config without {key!r} ({location}); it holds {', '.join(map(str, config))}",
        f"Add it, config={{{key!r}: ...}}, or on the command line {option}",
    )


def _check_labels(model, dataset: StoredDataset | TFData, batch: BatchSpec, feed, spec) -> None:
    """Raises ConfigError for labels of the first rows that the loss does not accept.

    Args:
        model: The built model.
        dataset: A block of the data, or a pipeline.
        batch: Contents of a batch of a block.
        feed: Its feed.
        spec: Element spec of its batches.
    """
    from raytf.worker import labels

    if not isinstance(spec, tuple) or len(spec) < 2:
        return
    if isinstance(dataset, StoredDataset) and batch.map is None:  # all rows, but only their labels
        batches = labels.of_rows(dataset, batch.labels)
    else:
        if isinstance(dataset, StoredDataset):
            feed = _feed(dataset, batch, min(_MAPPED_ROWS, sum(dataset.rows)))
            rows = next(iter(feed.dataset()))
        else:
            rows = next(iter(feed.first_batch()))
        batches = [labels.dense(rows[1])]
    labels.check_values(model, spec, batches, weighted=len(spec) > 2)


def _check_numeric(model, dataset) -> None:
    import tensorflow as tf

    features = dataset.element_spec[0] if isinstance(dataset.element_spec, tuple) else dataset.element_spec
    strings = any(spec.dtype == tf.string for spec in tf.nest.flatten(features))
    takes = any(t.dtype == "string" for t in tf.nest.flatten(getattr(model, "inputs", None) or []))
    takes = takes or any(type(layer).__name__ in _STRING_LAYERS for layer in keras_objects.layers_of(model))
    if strings and not takes and not model_optimizers.decides_itself(model):
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
    if known := tensorflow_line(error):
        return known
    text = without_escapes(error).split("Arguments received by")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith("Exception encountered")]
    if useful and useful[0] == "in user code:":  # AutoGraph: the last line is the user's error, with its type
        return useful[-1].rstrip(".")
    return f"{type(error).__name__}: {(useful or lines or [''])[0]}".rstrip(".")


def _error_with_line(error: BaseException) -> str:
    return tensorflow_line(error) or f"{_first_line(error)}{user_line(error)}"
