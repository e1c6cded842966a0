"""`raytf.fit`, `evaluate` and `predict`: several workers for an existing model. Driver side.

Over 500 lines: more than half of it documents the arguments of three calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import pyarrow as pa
import ray
import tensorflow as tf
from keras import tree
from ray.data.extensions import ArrowTensorArray
from ray.train import RunConfig, ScalingConfig

from raytf import logs, validation
from raytf.compat import keras_objects
from raytf.compat.keras import make_default_seed
from raytf.console.lines import print_line
from raytf.console.phases import READING, show_phases
from raytf.data import ingest, pipeline, sampling
from raytf.data.columns import ColumnSpecs
from raytf.data.sampling import Sampling
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError
from raytf.fitting import arrays as arrays_module
from raytf.fitting import tf_data
from raytf.fitting.call import Call
from raytf.fitting.named_checkpoints import NamedFitCheckpoints
from raytf.fitting.predictor import named_outputs
from raytf.runtime.topology import per_replica_batch
from raytf.storage import run_folder
from raytf.train import arguments as checks
from raytf.train import ray_config
from raytf.worker.checkpoint_every import CheckpointInterval

logger = logs.get_logger(__name__)

_BATCH = 32
# Bytes of predictions that a worker sends at once.
_CHUNK_BYTES = 32 << 20
# Steps whose predictions it sends at once if their size is unknown.
_CHUNK_STEPS = 32


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | Callable | None = None,
    validation_split: float | None = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    features: ColumnSpecs | None = None,
    labels: ColumnSpecs | None = None,
    num_workers: int | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    name: str | None = None,
    storage: str | os.PathLike | None = None,
    checkpoint_every: str = "auto",
    resume: str | bool = "auto",
    verify: Literal["warn", "error", False] = "warn",
    nan: Literal["warn", "stop", "ignore"] = "warn",
) -> keras.callbacks.History:
    """Trains a compiled model on several workers, with the result of `model.fit` in this process.

    The model is sent to the workers with its classes and functions, also those of a notebook. Afterwards weights,
    optimizers, seeds, metrics and attributes of callbacks are put back into the same objects. Values that cannot be
    pickled stay on the workers. Workers are kept for the next call. Ctrl-C ends them, and the model then has the
    weights of the last complete epoch.

    With a `name` the workers write checkpoints. After an interrupt, a failure or a kill, the same call then resumes at
    the next step. Its model and data must be the same. The checkpoints are removed when the training is complete.

    Args:
        model: A compiled `keras.Model`, built outside of any `tf.distribute` strategy.
        x: NumPy arrays, tensors, pandas or Arrow tables (as matrices), each of shape (rows, ...). Or lists and dicts of
            these, as the model takes them. Or a finite `tf.data.Dataset` of batches, which is read once in this
            process. Or a `raytf.TFData`, whose function makes a `tf.data.Dataset` on the workers. Or rows whose columns
            `features` and `labels` name: a table, a path of Parquet files, or a `ray.data.Dataset`.
        y: Labels, in the forms of `x`, or None where `x` contains them.
        batch_size: Rows of the **global** batch, an int of at least the number of workers; 32 by default.
        epochs: Number of epochs to train, at least 1 and 1 by default. With `initial_epoch` it is the index of the
            epoch to end with, as in Keras.
        verbose: "auto", the default, 1 or 2 print a line per epoch, and a live line in terminals. 0 prints nothing.
        callbacks: List of Keras callbacks. They run on every worker; only the chief writes files. Or a function
            `callbacks(config)` that returns them, as for `KerasTrainer`. It is called once, in this process, with
            `batch_size` and `epochs`.
        validation_split: Share of arrays' rows, the last ones, for validation; at least 0, the default, and less than
            1.
        validation_data: `(x, y)`, `(x, y, sample_weight)`, a `raytf.TFData`, or rows with the columns of `x`.
        shuffle: Whether the order of rows changes in each epoch; True by default. It is the same on any number of
            workers.
        class_weight: Dict of weights by class, for arrays and a `raytf.TFData`.
        sample_weight: Array of weights by row, or the name of a column.
        initial_epoch: Index of the first epoch, from 0, which is the default.
        steps_per_epoch: Number of batches of an epoch, for a `raytf.TFData`. Else it must be the number of batches, as
            each row is used once an epoch.
        validation_steps: Number of batches of a validation, at least 1; all by default.
        validation_batch_size: Rows of a batch of the validation; `batch_size` by default.
        validation_freq: Number of epochs between validations, at least 1 and 1 by default, or a list of epochs.
        features: Columns of `x` that are features, as in `KerasTrainer`.
        labels: Columns of `x` that are labels, as in `KerasTrainer`.
        num_workers: Number of workers, at least 1; 1 by default.
        scaling_config: A `ray.train.ScalingConfig`, instead of `num_workers`.
        run_config: A `ray.train.RunConfig`, of which `worker_runtime_env` is used.
        name: Name of the training, for its checkpoints. Without one nothing is stored.
        storage: Folder or URI for the checkpoints, which all hosts can reach; `~/ray_results` by default.
        checkpoint_every: When to write checkpoints within epochs, as in `KerasTrainer`; "auto" by default. Each epoch
            ends with one.
        resume: "auto", the default, resumes the same training from its checkpoints. True resumes also with changes,
            unless model or optimizer differ, and needs a checkpoint. False removes them and starts from scratch.
        verify: Whether to compare two workers with one process on a few rows: "warn", the default, "error" or False.
            See `KerasTrainer`.
        nan: What to do if the loss is NaN or infinite: "warn", the default, "stop" or "ignore", as in `KerasTrainer`.

    Returns:
        A `keras.callbacks.History` with one global value per metric and epoch.

    Raises:
        ConfigError: An argument, the model or the data is wrong. No worker has started.
        TrainingError: A worker failed and could not be replaced; workers are replaced at most three times in a call.
            The model has the weights of the last complete epoch. If the workers that hold them are lost, it has those
            of before the call. If the chief was replaced, callbacks have what checkpoints keep of them: plain values,
            and what `get_state()` returns.
        StoppedError: SIGTERM or SIGINT came to the main thread. It is a `SystemExit`, and after SIGINT also a
            `KeyboardInterrupt`.

    Example:
        >>> import keras, numpy, raytf
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = numpy.random.rand(64, 4)
        >>> history = raytf.fit(model, x, x.sum(1), epochs=2, num_workers=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """
    _check_model(model, "fit")
    workers, run_config = _workers(num_workers, scaling_config, run_config)
    drops = False
    if isinstance(x, tf.data.Dataset):
        other_arguments = {
            "y": y,
            "batch_size": batch_size,
            "sample_weight": sample_weight,
            "class_weight": class_weight,
        }
        reads_once = name is None and _is_one_epoch(epochs, initial_epoch)
        with show_phases(bool(verbose), "reading x"):
            content = tf_data.rows_of(x, "x", other_arguments, reads_once)
        (x, y, sample_weight), batch_size, shuffle, drops = (
            content.parts,
            content.batch,
            content.shuffles,
            content.drops,
        )
    if isinstance(validation_data, tf.data.Dataset):
        other_arguments = {"validation_batch_size": validation_batch_size}
        with show_phases(bool(verbose), "reading validation_data"):
            content = tf_data.rows_of(validation_data, "validation_data", other_arguments)
        validation_data, validation_batch_size = content.parts, content.batch
        if content.drops:
            raise ConfigError(
                "validation_data must hold the same rows in each epoch",
                "a shuffle, and a batch that drops the remainder",
                "Leave one of them out",
            )
    batch = _check_batch(batch_size, workers, "batch_size")
    validation_batch = (
        batch
        if validation_batch_size is None
        else _check_batch(validation_batch_size, workers, "validation_batch_size")
    )
    _check_fit(epochs, initial_epoch, shuffle, verbose, validation_split, validation_steps)
    _check_kinds(class_weight, validation_freq)
    validation.check_word("verify", verify, checks.VERIFY_WORDS)
    validation.check_word("nan", nan, validation.NAN_WORDS)
    users = _callbacks(callbacks, {"batch_size": batch, "epochs": epochs})
    if validation_split and validation_data is None:
        if not arrays_module.is_arrays(x) or features is not None:
            raise ConfigError("validation_split is for arrays", f"x of type {type(x).__name__}", "Pass validation_data")
        (x, y, sample_weight), validation_data = arrays_module.split_validation(x, y, sample_weight, validation_split)
    with show_phases(bool(verbose), READING):
        parts = {"train": arrays_module.check_rows(x, y, sample_weight, class_weight, features, labels)}
        if validation_data is not None:
            parts["validation"] = _validation(validation_data, sample_weight, features, labels)
            parts["validation"] = _steps(parts["validation"], validation_steps, validation_batch)
    if isinstance(x, TFData):
        parts["train"] = _steps(parts["train"], steps_per_epoch, batch)
    else:
        _check_steps(steps_per_epoch, parts["train"], batch, drops)
    with show_phases(bool(verbose), READING):
        sizes = {"train": batch}
        parts = {n: _inspected(part, sizes.get(n, validation_batch), n, verbose) for n, part in parts.items()}
    resume_unit = getattr(getattr(parts["train"].dataset, "facts", None), "resume_unit", "step")
    keeping = NamedFitCheckpoints.from_arguments(name, storage, checkpoint_every, resume)
    with Call(model, workers, run_config, parts, keeping, show_phases(bool(verbose))) as call:
        call.verify = verify
        batches = {"train": batch, "validation": validation_batch}
        order = "full" if shuffle else "none"
        call.build("fit")
        validation.check_monitors(users, keras_objects.reported_names(model), "validation" in parts)
        call.pack(users)
        order_arguments = {"initial_epoch": initial_epoch, "shuffle": order} | (
            {"drop_remainder": True} if drops else {}
        )
        seed, more = call.resume_state(make_default_seed(), batch, order_arguments, bool(verbose))
        arguments = {"epochs": epochs, "initial_epoch": initial_epoch, "validation_freq": validation_freq}
        more |= {"recovers": workers.num_workers > 1 and resume_unit == "step", "nan": nan}
        if resume_unit == "epoch" and checkpoint_every == "auto" and keeping is not None:
            more["checkpoint_every"] = CheckpointInterval()
        work = call.work("fit", batches, seed, order, arguments, drops, **more)
        return call.fit(work, users, verbose)


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | Callable | None = None,
    return_dict: bool = False,
    *,
    features: ColumnSpecs | None = None,
    labels: ColumnSpecs | None = None,
    num_workers: int | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> Any:
    """Evaluates a compiled model on several workers, with the result of `model.evaluate` in this process.

    Args:
        model: A compiled `keras.Model`.
        x: Features, or a `raytf.TFData`, as in `raytf.fit`.
        y: Labels, as in `raytf.fit`.
        batch_size: Rows of the **global** batch; 32 by default.
        verbose: "auto", the default, 1 or 2 show what the call waits for. 0 shows nothing.
        sample_weight: Array of weights by row, or the name of a column.
        steps: Number of batches, at least 1; all by default.
        callbacks: List of Keras callbacks, which run on every worker, or a function `callbacks(config)` that returns
            them. The function is called once, in this process, with `batch_size`.
        return_dict: Whether to return a dict by name.
        features: Columns of `x` that are features, as in `raytf.fit`.
        labels: Columns of `x` that are labels, as in `raytf.fit`.
        num_workers: Number of workers, at least 1; 1 by default.
        scaling_config: A `ray.train.ScalingConfig`, instead of `num_workers`.
        run_config: A `ray.train.RunConfig`, of which `worker_runtime_env` is used.

    Returns:
        The loss, a list of loss and metrics, or a dict by name: floats over all rows.

    Raises:
        ConfigError: An argument, the model or the data is wrong. No worker has started.
        TrainingError: A worker failed.
        StoppedError: SIGTERM or SIGINT came to the main thread.

    Example:
        >>> import keras, numpy, raytf
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> sorted(raytf.evaluate(model, numpy.ones((8, 4)), numpy.ones(8), return_dict=True, verbose=0))
        ['loss']
    """
    _check_model(model, "evaluate")
    _check_verbose(verbose)
    validation.check_flag("return_dict", return_dict)
    workers, run_config = _workers(num_workers, scaling_config, run_config)
    if isinstance(x, tf.data.Dataset):
        other_arguments = {"y": y, "batch_size": batch_size, "sample_weight": sample_weight}
        with show_phases(bool(verbose), "reading x"):
            content = tf_data.rows_of(x, "x", other_arguments, reads_once=True)
        (x, y, sample_weight), batch_size = content.parts, content.batch
    batch = _check_batch(batch_size, workers, "batch_size")
    users = _callbacks(callbacks, {"batch_size": batch})
    with show_phases(bool(verbose), READING):
        data = _steps(arrays_module.check_rows(x, y, sample_weight, None, features, labels), steps, batch)
        data = _inspected(data, batch, "train")
    with Call(model, workers, run_config, {"train": data}, phases=show_phases(bool(verbose))) as call:
        call.build("evaluate")
        call.pack(users)
        (reports,) = call.reports(call.work("evaluate", {"train": batch}, make_default_seed(), "none", {}))
        call.objects.assign(reports[0]["values"])
        logs = reports[0]["logs"]
        if bad := [name for name, value in logs.items() if not np.isfinite(np.asarray(value, np.float64)).all()]:
            logger.warning(
                f"{', '.join(bad)}: NaN or infinite in the evaluation. Look for rows that are NaN or infinite, in the "
                "data and in the model's weights"
            )
        return logs if return_dict else keras_objects.in_order(model, logs)


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    *,
    features: ColumnSpecs | None = None,
    num_workers: int | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> Any:
    """Predicts on several workers, with the result of `model.predict` in this process: one row per row of `x`.

    Args:
        model: A `keras.Model`, compiled or not.
        x: Features, as in `raytf.fit`, but no `raytf.TFData`.
        batch_size: Rows of the **global** batch; 32 by default.
        verbose: "auto", the default, 1 or 2 show what the call waits for. 0 shows nothing.
        steps: Number of batches, at least 1; all by default.
        callbacks: Refused, as workers predict different rows at different times.
        features: Columns of `x` that are features, as in `raytf.fit`.
        num_workers: Number of workers, at least 1; 1 by default.
        scaling_config: A `ray.train.ScalingConfig`, instead of `num_workers`.
        run_config: A `ray.train.RunConfig`, of which `worker_runtime_env` is used.

    Returns:
        NumPy arrays of shape (rows, ...) in the structure of the model's outputs. For a path or a `ray.data.Dataset` a
        `ray.data.Dataset` with one column per output. A column is named by the output's key, "predictions", or
        "predictions_0" and so on.

    Raises:
        ConfigError: An argument, the model or the data is wrong. No worker has started.
        TrainingError: A worker failed.
        StoppedError: SIGTERM or SIGINT came to the main thread.

    Example:
        >>> import keras, numpy, raytf
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> raytf.predict(model, numpy.ones((8, 4)), verbose=0).shape
        (8, 1)
    """
    if not isinstance(model, keras.Model):
        _check_model(model, "predict")
    if callbacks:
        raise ConfigError("raytf.predict takes no callbacks", repr(callbacks), "Use model.predict for them")
    _check_verbose(verbose)
    workers, run_config = _workers(num_workers, scaling_config, run_config)
    if isinstance(x, tf.data.Dataset):
        with show_phases(bool(verbose), "reading x"):
            content = tf_data.rows_of(x, "x", {"batch_size": batch_size}, reads_once=True)
        x, batch_size = content.parts[0], content.batch
    batch = _check_batch(batch_size, workers, "batch_size")
    if isinstance(x, TFData):
        raise ConfigError(
            "raytf.predict gives a prediction for each row, in order, of arrays or a ray.data.Dataset",
            "a raytf.TFData",
            "Pass arrays, or use a raytf.Predictor in ray.data.Dataset.map_batches",
        )
    with show_phases(bool(verbose), READING):
        data = _steps(arrays_module.check_rows(x, None, None, None, features, None), steps, batch)
    with Call(model, workers, run_config, {"train": data}, phases=show_phases(bool(verbose))) as call:
        row_bytes = call.build("predict")
        call.pack(())
        chunk = _chunk_steps(row_bytes * batch / workers.num_workers)
        work = call.work("predict", {"train": batch}, make_default_seed(), "none", {}, chunk_steps=chunk)
        chunks = (_in_order(reports) for reports in call.reports(work))
        if data.table is None:
            return _as_dataset(chunks)
        chunks = [chunk for chunk in chunks if chunk is not None]
        structure = chunks[0][0]
        whole = [np.concatenate(parts) for parts in zip(*(flat for _, flat in chunks), strict=True)]
        return tree.map_structure(lambda index: whole[index], structure)


# ------------------------------------------------------------------------------------------ predictions


def _chunk_steps(step_bytes: float) -> int:
    """Returns the number of steps whose predictions a worker sends at once; all workers need the same one.

    Args:
        step_bytes: Bytes of a worker's predictions of a step, or 0 if unknown.
    """
    return max(1, int(_CHUNK_BYTES / step_bytes)) if step_bytes else _CHUNK_STEPS


def _in_order(reports: list[dict]) -> tuple[Any, list[np.ndarray]] | None:
    """Returns (the outputs' structure of indices, an array for each index) of all workers' steps."""
    flat: list[list[np.ndarray]] = []
    for step in zip(*(report["parts"] for report in reports), strict=True):
        flat += [arrays for rows, arrays in step if rows]
    if not flat:
        return None
    structure = next(report["like"] for report in reports if report["like"] is not None)
    return structure, [np.concatenate(parts) for parts in zip(*flat, strict=True)]


def _as_dataset(chunks):
    """Returns a `ray.data.Dataset` of predictions."""
    refs = []
    for chunk in chunks:
        if chunk is None:
            continue
        structure, flat = chunk
        made = {
            name: pa.array(flat[index]) if flat[index].ndim == 1 else ArrowTensorArray.from_numpy(flat[index])
            for name, index in sorted(named_outputs(structure).items(), key=lambda pair: pair[1])
        }
        refs.append(ray.put(pa.table(made)))
    return ray.data.from_arrow_refs(refs)


# ------------------------------------------------------------------------------------------ arguments


def _check_model(model, method: str) -> None:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"raytf.{method} takes a keras.Model",
            f"a {type(model).__module__}.{type(model).__name__}",
            "Pass a Keras 3 model",
        )
    if not model.compiled:
        raise ConfigError(f"raytf.{method} needs a compiled model", f"{model.name!r}", "Call model.compile(...) first")
    if keras_objects.given_strategy(model) is not None:
        raise ConfigError(
            f"raytf.{method} takes a model of this process, and gives it to the workers' strategy itself",
            f"one that was made in the scope of a {type(keras_objects.given_strategy(model)).__name__}",
            "Make the model outside of the scope",
        )


def _workers(num_workers, scaling_config, run_config) -> tuple[ScalingConfig, RunConfig]:
    ray_config.check_kinds(scaling_config, run_config)
    if num_workers is not None:
        validation.check_whole("num_workers", num_workers, 1)
        if scaling_config is not None and scaling_config.num_workers != num_workers:
            raise ConfigError(
                "num_workers is given once",
                f"num_workers={num_workers} and a ScalingConfig with {scaling_config.num_workers}",
                "Leave one out",
            )
    scaling_config = scaling_config or ScalingConfig(num_workers=num_workers or 1)
    if not isinstance(scaling_config.num_workers, int) or scaling_config.use_tpu:
        raise ConfigError(
            "raytf.fit has a fixed number of workers, on CPUs or GPUs",
            "use_tpu=True" if scaling_config.use_tpu else f"num_workers={scaling_config.num_workers}",
            "Use raytf.KerasTrainer for elastic runs and TPUs",
        )
    if scaling_config.num_workers == 0:
        raise ConfigError("raytf.fit trains on workers", "num_workers=0", "Call the model's own method: model.fit(...)")
    checks.check_workers(scaling_config)
    run_config = run_config or RunConfig()
    empty = RunConfig(name=run_config.name if run_folder.is_unnamed(run_config) else None)
    for name in ("name", "storage_path", "storage_filesystem", "failure_config", "checkpoint_config", "callbacks"):
        given = getattr(run_config, name)
        if given != getattr(empty, name):
            raise ConfigError(
                "raytf.fit brings what was learnt back into the model, and stores no run to load models from",
                f"RunConfig({name}={given!r})",
                "Use raytf.fit(name=..., storage=...) to resume after a failure, keras.callbacks.ModelCheckpoint for "
                "files, or raytf.KerasTrainer for runs",
            )
    return scaling_config, run_config


def _check_batch(batch_size, workers: ScalingConfig, name: str) -> int:
    batch_size = _BATCH if batch_size is None else batch_size
    validation.check_whole(name, batch_size, 1)
    per_replica_batch(int(batch_size), workers.num_workers * checks.devices(workers))
    return int(batch_size)


def _check_fit(epochs, initial_epoch, shuffle, verbose, validation_split, validation_steps) -> None:
    validation.check_whole("epochs", epochs, 1)
    validation.check_whole("initial_epoch", initial_epoch, 0)
    validation.check_flag("shuffle", shuffle)
    _check_verbose(verbose)
    is_share = isinstance(validation_split, (int, float, np.number)) and 0 <= validation_split < 1
    if validation_split is not None and not is_share:
        rule = "validation_split must be a number of at least 0 and less than 1"
        raise ConfigError(rule, repr(validation_split), "Pass 0.1, for example, or leave it out")
    if validation_steps is not None:
        validation.check_whole("validation_steps", validation_steps, 1)


def _check_verbose(verbose) -> None:
    if not isinstance(verbose, (str, int, np.integer)) or verbose not in ("auto", 0, 1, 2):
        raise ConfigError('verbose must be "auto", 0, 1 or 2', repr(verbose), "Choose one")


def _check_kinds(class_weight, validation_freq) -> None:
    if class_weight is not None and not isinstance(class_weight, Mapping):
        raise ConfigError("class_weight must be a dict of classes to weights", repr(class_weight), "Pass {0: 1.0, ...}")
    for key, weight in (class_weight or {}).items():
        if not isinstance(key, (int, float, np.number)) or not isinstance(weight, (int, float, np.number)):
            rule = "class_weight must be a dict of classes, from 0, to weights; classes without a weight have 1"
            raise ConfigError(rule, f"{{{key!r}: {weight!r}}}", "Pass numbers: {0: 1.0, ...}")
    if isinstance(validation_freq, (list, tuple, set, range)):
        for epoch in validation_freq:
            validation.check_whole("validation_freq's epochs", epoch, 1)
    else:
        validation.check_whole("validation_freq", validation_freq, 1)


def _is_one_epoch(epochs, initial_epoch) -> bool:
    return isinstance(epochs, int) and isinstance(initial_epoch, int) and epochs - initial_epoch == 1


def _check_steps(steps_per_epoch, data: arrays_module.RowData, batch: int, drops: bool) -> None:
    if steps_per_epoch is None:
        return
    validation.check_whole("steps_per_epoch", steps_per_epoch, 1)
    steps = None if data.rows is None else sampling.steps_per_epoch(data.rows, batch, drops)
    if steps_per_epoch != steps:
        has = "an unknown number" if steps is None else f"{steps}"
        raise ConfigError(
            "Every row comes once an epoch, so steps_per_epoch can only be the number of batches",
            f"steps_per_epoch={steps_per_epoch} with {has} of them",
            "Leave it out, or pass as many rows as an epoch is to have",
        )


def _callbacks(callbacks, config: dict[str, Any]) -> list:
    """Returns the callbacks of a call as a list, also those of a function of `config`."""
    if callable(callbacks) and not isinstance(callbacks, (type, keras.callbacks.Callback)):
        callbacks = callbacks(config)
    users = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    validation.check_callbacks(users)
    for callback in users:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(
                "callbacks must be a list of Keras callbacks",
                f"a {type(callback).__name__}",
                "Make objects of their classes",
            )
    return users


def _steps(data: arrays_module.RowData, steps: int | None, batch: int) -> arrays_module.RowData:
    """Returns only the rows of the first steps."""
    if steps is None:
        return data
    validation.check_whole("steps", steps, 1)
    if isinstance(data.dataset, TFData):
        return dataclasses.replace(data, dataset=dataclasses.replace(data.dataset, steps_per_epoch=int(steps)))
    return data.head(steps * batch)


def _inspected(data: arrays_module.RowData, batch: int, name: str, verbose: str | int = 0) -> arrays_module.RowData:
    """Returns the data; for a pipeline with the result of `pipeline.inspect`."""
    source = data.dataset
    if not isinstance(source, TFData):
        return data
    source = source.with_facts(pipeline.inspect(source, Sampling(global_batch=batch), name))
    if verbose:
        print_line(ingest.describe(name, source, "none"))
    return dataclasses.replace(data, dataset=source)


def _validation(given, sample_weight, features, labels) -> arrays_module.RowData:
    if isinstance(given, (tuple, list)) and features is None:
        if not 1 <= len(given) <= 3:
            raise ConfigError(
                "validation_data must be (x, y) or (x, y, sample_weight)",
                f"{len(given)} parts",
                "Pass a tuple of two or three",
            )
        x, y, weights = (*given, None, None)[:3]
        return arrays_module.check_rows(x, y, weights, None, None, None, "validation_data")
    return arrays_module.check_rows(given, None, sample_weight, None, features, labels, "validation_data")
