"""Trains a model for two steps, on one device or as one of two workers, and records results; see `train/verify`.

Each run is a process of its own, with the same seeds, first rows and initial weights. All random numbers are replaced
by constants, as replicas draw different numbers on purpose.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf import timeouts
from raytf.collectives import communicator, ring_token
from raytf.collectives.exchange import NO_NUMBERS
from raytf.compat import keras_objects
from raytf.compat.patching import patched
from raytf.data import pipeline
from raytf.data.batch_spec import BatchSpec
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import definition_line
from raytf.parallel import compiled_update, model_optimizers
from raytf.parallel.constant_draws import constant_draws
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.runtime.topology import Shard, tf_config
from raytf.worker import context
from raytf.worker.fit import build_from_data

# Weights change by so many units in the last place, to measure the effect of rounding.
_UNITS = 4
_SEED = 20_261
# At the default initial scale of LossScaleOptimizer few rows may overflow where many do not, which lowers the scale.
_LOSS_SCALE = 64.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerificationTask:
    """Arguments of a verification.

    Args:
        build: Function that returns the compiled model; called in a strategy's scope.
        batch: Columns of a batch.
        rows: The first rows of the user's data.
        validation: The first rows of the validation data, or None.
        global_batch: Rows of a step.
        structure: Function `structure(dataset)` that returns the dataset in the model's structure, or None if a feed
            has that.
        validation_batch: Columns of a validation batch; None: those of the training, without its map.
        validation_structure: Structure of the validation; None: as in the training.
        most_bytes: Largest size of a model's variables in bytes; larger models are skipped.
        whole: The same with the training's global batch, for models with code of the user's, or None.
    """

    build: Callable[[], Any]
    batch: BatchSpec
    rows: StoredDataset | TFData
    validation: StoredDataset | TFData | None
    global_batch: int
    structure: Callable | None = None
    validation_batch: BatchSpec | None = None
    validation_structure: Callable | None = None
    most_bytes: int = 64 << 20
    whole: VerificationTask | None = None

    def with_whole_batch(self, train: tuple | None, validation: tuple | None) -> VerificationTask:
        """Returns the task with results of `verify.whole_batch`, which may be None."""
        if train is None:
            return self
        held_out = self.validation if validation is None else validation[0]
        return dataclasses.replace(
            self, whole=dataclasses.replace(self, rows=train[0], validation=held_out, global_batch=train[1])
        )

    def dataset(self, shard: Shard, validation: bool = False) -> tf.data.Dataset | None:
        """Returns the dataset of a worker, or None without validation."""
        rows = self.validation if validation else self.rows
        if rows is None:
            return None
        batch, structure = self.batch, self.structure
        if validation:
            batch = self.validation_batch or dataclasses.replace(batch, map=None)
            structure = self.validation_structure or structure
        if isinstance(rows, TFData):
            made = pipeline.two_steps(rows, shard, self.global_batch)
        else:
            made = Feed(rows, batch, Sampling(global_batch=self.global_batch, shuffle="none"), shard).dataset()
        return made if structure is None else structure(made)


def as_worker(
    trial: VerificationTask, eagerly: bool, rank: int, addresses: list[str], token: bytes, share: Callable[[list], None]
) -> dict:
    """Trains as one of two workers.

    Args:
        trial: Arguments of the verification.
        eagerly: Whether to run the steps eagerly, which saves the time for tracing.
        rank: Rank of this worker, 0 or 1.
        addresses: Addresses of both workers.
        token: Token of their ring.
        share: Function that the chief calls with the initial values of the model's variables.

    Returns:
        The results, see `_train_two_steps`.
    """
    os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    ring_token.keep_token(token)

    def begin(model, variables):
        for layer in keras_objects.layers_of(model):
            if getattr(layer, "synchronized", None) is False:  # by design each worker normalizes with its own rows
                layer.synchronized = True
        if rank == 0:
            share([np.asarray(v) for v in variables])

    try:
        return _train_two_steps(trial, eagerly, Shard(rank, 2), begin)
    except tf.errors.InvalidArgumentError as error:
        if "Gradients of gradients through BatchNormalization" not in str(error):
            raise
        return {"skipped": "gradients of gradients through a BatchNormalization"}


def on_one_device(
    trial: VerificationTask, eagerly: bool, initial: Callable[[], list[np.ndarray]], with_same_draws: bool
) -> dict:
    """Trains on one device.

    Args:
        trial: See `as_worker`.
        eagerly: See `as_worker`.
        initial: Function that returns the initial values of the two workers' variables.
        with_same_draws: Whether to train with other seeds, and with weights that differ in their last bits.

    Returns:
        The results, see `_train_two_steps`.
    """
    os.environ.pop("TF_CONFIG", None)

    def begin(model, variables):
        values = initial()
        if [v.shape for v in values] != [tuple(v.shape) for v in variables]:
            raise ValueError("build_model makes another model each time it is called")
        trained = {id(v) for v in model.trainable_variables}
        draw = np.random.default_rng(0)
        for variable, value in zip(variables, values, strict=True):
            if with_same_draws and id(variable) in trained and np.issubdtype(value.dtype, np.floating):
                value = value + draw.choice([-_UNITS, _UNITS], value.shape) * np.spacing(value)
            variable.assign(value)
        if with_same_draws:
            _set_seeds(_SEED + 1)

    return _train_two_steps(trial, eagerly, Shard(), begin)


def _set_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)


def _narrowest(model) -> int:
    """Returns the bits of the narrowest floating-point numbers that a model computes with: 16, 32 or 64."""
    dtypes = [str(layer.compute_dtype) for layer in keras_objects.layers_of(model)]
    return next((bits for bits in (16, 32) if any(dtype.endswith(f"float{bits}") for dtype in dtypes)), 64)


def _train_two_steps(trial: VerificationTask, eagerly: bool, shard: Shard, begin: Callable) -> dict:
    """Returns the results of two steps by name, or {"skipped": reason}.

    The result has "digest". On rank 0 it also has "logs", "weights", "states", "slots", "rates" and "bits". On one
    device it also has "traits" and, if needed, "whole_s", the estimated seconds of `VerificationTask.whole`.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    config = TensorflowConfig(
        seed=_SEED, timeout_s=timeouts.get().strategy_of_verify, hang_timeout_s=None, first_step_timeout_s=20.0
    )
    with context.prepared(WorkerSetup(config=config)):
        strategy = context.get_strategy()
        keras.utils.set_random_seed(_SEED)
        with strategy.scope():
            model = trial.build()
            keras_objects.make_shared_seed()
        size = sum(communicator.bytes_of(v) for v in model.variables)
        if size <= trial.most_bytes:
            train = trial.dataset(shard)
            with strategy.scope():
                build_from_data(model, train)
            size = sum(communicator.bytes_of(v) for v in model.variables)
        if size > trial.most_bytes:
            return {"skipped": f"a model of {size >> 20} MiB, more than {trial.most_bytes >> 20}"}
        variables = [*model.variables, *model_optimizers.variables(model)]
        variables = list(filter(_is_number, variables))
        for optimizer in model_optimizers.optimizers_of(model).values():
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                optimizer.initial_scale = _LOSS_SCALE
                if optimizer.built:
                    optimizer.dynamic_scale.assign(_LOSS_SCALE)
        begin(model, variables)
        return _fit_two_steps(trial, eagerly, model, train, shard)


def _fit_two_steps(trial: VerificationTask, eagerly: bool, model, train, shard: Shard) -> dict:
    seeds = {id(v) for v in keras_objects.seeds_of(model)}
    states = [v for v in model.non_trainable_variables if id(v) not in seeds and v.dtype != "string"]
    initial = [np.asarray(v) for v in model.trainable_variables]
    model.jit_compile = False
    model.run_eagerly, model.steps_per_execution = eagerly, 1
    python, began = _of_python(model), time.monotonic()
    with constant_draws(), patched(compiled_update, "enabled", False):  # two steps do not pay for XLA's time
        history = model.fit(train, validation_data=trial.dataset(shard, validation=True), verbose=0, shuffle=False)
    seconds = time.monotonic() - began
    weights = [np.asarray(v) for v in model.trainable_variables]
    rates, slots = _rates_and_slots(model)
    crc = 0
    for value in [*weights, *(value for _, value in [*rates, *slots])]:
        crc = zlib.crc32(np.ascontiguousarray(value), crc)
    results: dict[str, Any] = {"digest": crc}
    if shard.index == 0:
        results |= {
            "logs": {name: np.asarray(values[0]) for name, values in history.history.items() if values},
            "weights": [
                (v.path, old, new) for v, old, new in zip(model.trainable_variables, initial, weights, strict=True)
            ],
            "states": [(v.path, np.asarray(v), str(v.aggregation)) for v in states],
            "slots": slots,
            "rates": rates,
            "bits": _narrowest(model),
        }
    if shard.count > 1:
        return results
    changed = sorted(name for name, value in _of_python(model).items() if python.get(name) != value)
    custom_parts = custom_code(model)
    if trial.whole is not None and any(custom_parts.values()):
        results["whole_s"] = seconds * trial.whole.global_batch / trial.global_batch
    return results | {"traits": custom_parts | {"python": changed}}


def _rates_and_slots(model) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, np.ndarray]]]:
    """Returns the (name, value) of each optimizer's learning rate, and of each of its other variables."""
    optimizers = model_optimizers.optimizers_of(model)
    rates = [(name, np.asarray(o.learning_rate)) for name, o in optimizers.items() if hasattr(o, "learning_rate")]
    known = {id(keras_objects.rate_of(optimizer)) for optimizer in optimizers.values()}
    slots = {id(v): v for v in model_optimizers.variables(model) if id(v) not in known and _is_number(v)}
    return rates, [(v.path, np.asarray(v)) for v in slots.values()]


def _is_number(variable) -> bool:
    return tf.as_dtype(variable.dtype) not in NO_NUMBERS


# ------------------------------------------------------------------------------------------ what the user wrote


def custom_code(model) -> dict[str, Any]:
    """Returns the user's code in a model by kind, with names and lines, to find the cause of a difference."""
    result: dict[str, Any] = {"methods": {}, "metrics": [], "losses": [], "optimizers": [], "layers": []}
    for name in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        method = getattr(type(model), name)
        if not _is_kerass(method) or name in vars(model):
            result["methods"][name] = definition_line(vars(model).get(name, method))
    loss = keras_objects.compiled_parts(model)[0]
    if loss is not None and loss.built:
        given = [_unwrapped_loss(entry.loss) for entry in keras_objects.flat_losses(loss)]
        result["losses"] = [_described(item) for item in given if _is_own(item)]
    for metric in model.metrics:
        for item in [metric, *getattr(metric, "metrics", ())]:
            function = keras_objects.function_of(item)
            if _is_own(item) or _is_own(function):
                result["metrics"].append((item.name, _described(function or item), function is not None))
    result["optimizers"] = [
        _described(item) for item in model_optimizers.optimizers_of(model).values() if _is_own(item)
    ]
    result["layers"] = [
        _described(layer) for layer in keras_objects.layers_of(model, with_itself=False) if _is_own(layer)
    ]
    return json.loads(json.dumps(result))


# Attributes that Keras changes during training.
_OF_KERAS = frozenset(
    (
        *("built", "history", "optimizer", "run_eagerly", "jit_compile", "steps_per_execution"),
        *("stop_training", "stop_evaluating", "stop_predicting", "train_function", "test_function"),
    )
)


def _of_python(model) -> dict[str, str]:
    """Returns Python state of the user's own layers by attribute: numbers, arrays and lengths of collections."""
    state = {}
    for layer in keras_objects.layers_of(model):
        attributes = vars(layer).items() if _is_own(layer) else ()
        for name, value in attributes:
            if name.startswith("_") or name in _OF_KERAS:
                continue
            if isinstance(value, (int, float, np.ndarray, np.generic)):
                state[f"{layer.name}.{name}"] = repr(value)
            elif isinstance(value, (list, dict, set, tuple)):
                state[f"{layer.name}.{name}"] = str(len(value))
    return state


def _is_kerass(function) -> bool:
    return (getattr(function, "__module__", "") or "").partition(".")[0] in ("keras", "raytf")


def _is_own(value) -> bool:
    """Returns whether a function, or the class of an object, is the user's."""
    kind = value if inspect.isroutine(value) else type(value)
    return value is not None and not _is_kerass(kind) and kind.__module__ != "builtins"


def _unwrapped_loss(loss):
    """Returns the user's loss without the wrappers of raytf and Keras."""
    inner = getattr(loss, "loss", loss)
    return getattr(inner, "fn", inner)


def _described(value) -> str:
    kind = value if inspect.isroutine(value) else type(value)
    return f"{kind.__name__} ({definition_line(kind)})"
