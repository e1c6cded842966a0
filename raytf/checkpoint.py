"""The complete state of a training: saved by the chief, restored on every worker, and loaded as a model afterwards.

A checkpoint is a folder:

* `model.keras`: architecture, weights and optimizer state.
* `state.json`: `State` below.
* `seeds.npz`: the state of the model's seed generators (Dropout, augmentation), which Keras leaves out of its file.
* `callbacks.pkl`: for each callback its plain attributes (counters, best values, weights put aside).
* `build.pkl`: `build_model` and its config, for models that Keras cannot build from `model.keras` alone.

Ray Train uploads the folder and only then registers it, so that a kill in between leaves the last good one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import types
import warnings
from collections.abc import Mapping

from raytf.errors import ConfigError

MODEL, STATE, SEEDS, CALLBACKS, BUILD = "model.keras", "state.json", "seeds.npz", "callbacks.pkl", "build.pkl"


@dataclasses.dataclass
class State:
    """Where a training stands.

    Args:
        epoch: epochs that are complete, at least 0.
        step: training steps that were made in all, at least 0.
        seed: the run's seed.
        stopped: whether a callback ended the run before its last epoch.
        history: a dict of metric values for each epoch.
    """

    epoch: int
    step: int
    seed: int
    stopped: bool
    history: list[dict[str, float]]


def save(folder: str, model, state: State, callbacks=(), build: tuple | None = None) -> None:
    """Writes a checkpoint into an empty folder; called by the chief alone.

    Args:
        folder: an existing folder of this machine.
        model: a compiled and built `keras.Model`.
        state: where the training stands.
        callbacks: the user's callbacks, in the order in which they are built.
        build: (build_model, config, inputs), or None; inputs is (shape without the batch, dtype), or a dict of these.
    """
    import cloudpickle
    import numpy as np

    model.save(os.path.join(folder, MODEL))
    np.savez(os.path.join(folder, SEEDS), *[np.asarray(v) for v in _seeds(model)])
    with open(os.path.join(folder, CALLBACKS), "wb") as file:
        cloudpickle.dump([(type(c).__name__, _plain_attributes(c)) for c in callbacks], file)
    if build is not None:
        with open(os.path.join(folder, BUILD), "wb") as file:
            cloudpickle.dump(build, file)
    with open(os.path.join(folder, STATE), "w") as file:
        json.dump(dataclasses.asdict(state), file)


def read_state(folder: str) -> State:
    """The `State` of a checkpoint folder."""
    path = os.path.join(folder, STATE)
    if not os.path.exists(path):
        raise ConfigError(
            f"A checkpoint of raytf.KerasTrainer holds {STATE}", f"{folder!r} without it", "Name such a checkpoint"
        )
    with open(path) as file:
        return State(**json.load(file))


def restore(folder: str, model, config: Mapping | None = None) -> None:
    """Gives a built model the weights, optimizer state and seeds of a checkpoint.

    Args:
        folder: of the checkpoint.
        model: built with `config`.
        config: where its `learning_rate` is another than when the checkpoint was written, the model keeps its own.

    Raises:
        ConfigError: the checkpoint was written by another model.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    import numpy as np

    rate = _new_rate(folder, model, config or {})
    try:
        model.load_weights(os.path.join(folder, MODEL))
        with np.load(os.path.join(folder, SEEDS)) as saved:
            for variable, name in zip(_seeds(model), saved.files, strict=True):
                variable.assign(saved[name])
    except (ValueError, KeyError) as error:
        raise ConfigError(
            "A run of the same name goes on from its last checkpoint, so build_model must still build the same model",
            str(error).splitlines()[0],
            "Give the run another RunConfig(name=...) or storage_path",
        ) from error

    if rate is not None:
        model.optimizer.learning_rate = rate


def _new_rate(folder: str, model, config: Mapping) -> float | None:
    """The learning rate that the model was built with, where the config has changed it since the checkpoint."""
    path = os.path.join(folder, BUILD)
    if "learning_rate" not in config or not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        _, saved, _ = pickle.load(file)
    from raytf.multiworker_callbacks import settable_rate

    rate = settable_rate(model.optimizer)
    return None if rate is None or saved.get("learning_rate") == config["learning_rate"] else float(rate)


def restore_callbacks(folder: str, callbacks) -> None:
    """Gives callbacks the plain attributes that they had; called after their `on_train_begin`, which resets them."""
    with open(os.path.join(folder, CALLBACKS), "rb") as file:
        saved = pickle.load(file)
    if [name for name, _ in saved] != [type(c).__name__ for c in callbacks]:
        raise ConfigError(
            "A run that goes on needs the callbacks that it had",
            f"{[type(c).__name__ for c in callbacks]} after {[name for name, _ in saved]}",
            "Keep the list, or give the run another name",
        )
    for callback, (_, attributes) in zip(callbacks, saved, strict=True):
        vars(callback).update(attributes)


def _seeds(model) -> list:
    """The states of the model's seed generators, and of the global one where something draws from it."""
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR

    shared = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    generators = [g for layer in model._flatten_layers() for g in layer._seed_generators]
    return list({id(g): g.state for g in (*generators, *([shared] if shared is not None else []))}.values())


def _plain_attributes(callback) -> dict:
    return {k: v for k, v in vars(callback).items() if k not in ("params", "_params", "validation_data") and _plain(v)}


def _plain(value) -> bool:
    import numpy as np

    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_plain, value.values()))
    if isinstance(value, (types.FunctionType, np.ufunc)):
        return _found_by_name(value)  # Keras' monitors choose their comparison once, and flip `min_delta` when they do
    return value is None or isinstance(value, (bool, int, float, str, bytes, np.ndarray, np.generic))


def _found_by_name(function) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError):
        return False
    return True


def load_model(source, compile: bool = True):
    """The Keras model of a run, a checkpoint or a folder.

    Args:
        source: a `ray.train.Result`, a `ray.train.Checkpoint`, or the path of a checkpoint folder, of a run's folder
            or of a `.keras` file.
        compile: whether to restore loss, metrics and optimizer too.

    Returns:
        A `keras.Model` with the trained weights, outside any strategy.

    Raises:
        ConfigError: there is no model at `source`.
    """
    checkpoint = getattr(source, "checkpoint", source)
    if checkpoint is None:
        raise ConfigError("A result needs a checkpoint to load a model from", "a result without one", "Train longer")
    if hasattr(checkpoint, "as_directory"):
        with checkpoint.as_directory() as folder:
            return _load(folder, compile)
    path = os.path.expanduser(os.fspath(checkpoint))
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, MODEL)):
        return load_model(_newest(path), compile)
    return _load(path, compile)


def _newest(run: str):
    from ray.train import Result

    try:
        return Result.from_path(run)
    except RuntimeError as error:
        raise ConfigError(
            f"A model is loaded from a run's folder, or from a checkpoint folder that holds {MODEL}",
            repr(run),
            "Look for it under the storage path of the run",
        ) from error


def _load(path: str, compile: bool):
    import keras

    if not os.path.exists(path):
        raise ConfigError("A model is loaded from a path that exists", repr(path), "Check the path")
    file = os.path.join(path, MODEL) if os.path.isdir(path) else path
    build = os.path.join(os.path.dirname(file), BUILD)
    try:
        return keras.saving.load_model(file, compile=compile)
    except (TypeError, ValueError, ImportError) as error:
        if not os.path.exists(build):
            raise
        warnings.warn(
            f"Keras cannot build the model from its file ({str(error).splitlines()[0]}); "
            "it is built with build_model and given the saved weights",
            stacklevel=3,
        )
    with open(build, "rb") as saved:
        build_model, config, inputs = pickle.load(saved)
    model = build_model(dict(config))
    model(_one_row(inputs))  # `Model.build` would leave the layers of a subclassed model without weights
    if compile and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
    model.load_weights(file)
    return model


def _one_row(inputs):
    import keras

    if isinstance(inputs, dict):
        return {name: _one_row(part) for name, part in inputs.items()}
    shape, dtype = inputs
    return keras.ops.zeros((1, *shape), dtype)
