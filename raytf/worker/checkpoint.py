"""The complete state of a training: saved by the chief, and restored on every worker.

`model_loading` loads a model from it.

A checkpoint is a folder, see `docs/reference/checkpoint-format.md`. Nothing in it is unpickled or selects the code to
run. An attacker with write access can spoil a training, but not start a program.

Only folders that are whole are listed, so that after a kill the last good one remains.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raytf.compat import keras_objects
from raytf.errors import ConfigError, first_line
from raytf.logs import warn_user
from raytf.parallel import model_optimizers
from raytf.storage import checkpoint_files, gather_io, plain_values, snapshot_store
from raytf.storage.checkpoint_files import (
    ARRAYS,
    BUILD,
    CALLBACKS,
    MANIFEST,
    METRICS,
    MODEL,
    RANDOM,
    SEEDS,
    STATE,
    CheckpointState,
    check_folder,
    read_state,
)
from raytf.worker import random_state
from raytf.worker.callback_state import CallbackStates


@dataclasses.dataclass(frozen=True)
class CheckpointSnapshot:
    """A checkpoint of the current state of a training: `snapshot(folder)` writes it, `checkpoint_parts` returns it.

    Args:
        model: See `checkpoint_parts`.
        state: See `checkpoint_parts`.
        states: See `checkpoint_parts`.
        build: See `checkpoint_parts`.
        writers: Number of workers that write it together, at least 1.
        broadcast_name: Broadcasts the chief's name of a checkpoint to all workers; needed with several writers.

    Attributes:
        everyone: Whether each worker has files of its own; only the chief has.
    """

    everyone = False

    model: Any
    state: CheckpointState
    states: CallbackStates | None = None
    build: tuple | None = None
    writers: int = 1
    broadcast_name: Callable[[str], str] | None = None

    @property
    def step(self) -> int:
        """Returns the number of steps in all."""
        return self.state.step

    def __call__(self, folder: str) -> None:
        save(folder, self.model, self.state, self.states, self.build)

    def parts(self) -> dict[str, Any]:
        """Returns the parts of the checkpoint, see the function `checkpoint_parts`."""
        return checkpoint_parts(self.model, self.state, self.states, self.build)

    def files(self) -> dict[str, bytes]:
        """Returns the files of the checkpoint, see the function `checkpoint_files_of`."""
        return checkpoint_files_of(self.model, self.parts())


def save(
    folder: str,
    model,
    state: CheckpointState,
    states: CallbackStates | None = None,
    build: tuple | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint into an empty folder; only the chief calls it.

    Args:
        folder: Path of an existing folder on this machine.
        model: See `checkpoint_parts`.
        state: See `checkpoint_parts`.
        states: See `checkpoint_parts`.
        build: See `checkpoint_parts`.
        metrics: See `checkpoint_parts`.
    """
    write(folder, model, checkpoint_parts(model, state, states, build, metrics), state.version)


def checkpoint_parts(
    model,
    state: CheckpointState,
    states: CallbackStates | None = None,
    build: tuple | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the contents of a checkpoint's files in memory, except for `model.keras` and the manifest.

    Args:
        model: A compiled and built `keras.Model`.
        state: `CheckpointState` of the training.
        states: States of the user's callbacks, or None.
        build: Tuple (build_model, config, inputs), or None; inputs is (shape without the batch, dtype), or a dict of
            these.
        metrics: Arrays of `metrics.npz` by name, within an epoch, or None.

    Returns:
        Dict by name of the file: a string, or the arrays of an npz by name.

    Raises:
        ConfigError: An optimizer trains variables outside of the model, or `get_state` of a callback returns values
            that are not plain.
    """
    import numpy as np

    entries, arrays = ([], []) if states is None else states.state()
    contents = {
        SEEDS: {f"arr_{i}": np.asarray(v) for i, v in enumerate(keras_objects.seeds_of(model))},
        RANDOM: random_state.random_states(),
        model_optimizers.FILE: json.dumps(model_optimizers.noted(model)),
        CALLBACKS: json.dumps({"callbacks": entries}),
        ARRAYS: {str(i): array for i, array in enumerate(arrays)},
        STATE: state.to_json(),
    }
    if build is not None:
        contents[BUILD] = json.dumps(_described(*build))
    if metrics is not None:
        contents[METRICS] = dict(metrics)
    return contents


def write(folder: str, model, parts: Mapping[str, Any], version: int) -> None:
    """Writes the files of a checkpoint into an empty folder, arrays directly from their own memory.

    Args:
        folder: Path of an existing folder on this machine.
        model: A compiled and built `keras.Model`.
        parts: Result of `checkpoint_parts`.
        version: Version of the state.
    """
    for part, pieces in _pieces(model, parts):
        with open(os.path.join(folder, part), "xb") as file:
            file.writelines(pieces)
    checkpoint_files.write_manifest(folder, version)


def checkpoint_files_of(model, parts: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files of a checkpoint by name, in memory, with the arguments of `write`."""
    contents = {part: b"".join(pieces) for part, pieces in _pieces(model, parts)}
    return {**contents, MANIFEST: snapshot_store.manifest({part: [content] for part, content in contents.items()})}


def _pieces(model, parts: Mapping[str, Any]) -> Iterator[tuple[str, list]]:
    """Yields (name, pieces of memory) of each file but the manifest."""
    import numpy as np

    from raytf.worker.model_file import ModelFile

    yield MODEL, ModelFile(model).pieces()
    for part, content in parts.items():
        if isinstance(content, str):
            yield part, [content.encode()]
        else:
            yield part, gather_io.npz_pieces({key: np.asarray(value, order="C") for key, value in content.items()})


def _described(build_model: Callable, config: Mapping, inputs) -> dict:
    """Returns the content of `build.json` for (build_model, config, inputs)."""
    plain_config, left_out = {}, {}
    for name, value in config.items():
        try:
            plain_config[str(name)] = plain_values.encode(value)
        except TypeError:
            left_out[str(name)] = f"{type(value).__module__}.{type(value).__qualname__}"
    path = (
        f"{getattr(build_model, '__module__', '?')}:{getattr(build_model, '__qualname__', type(build_model).__name__)}"
    )
    return {"build_model": path, "config": plain_config, "left_out": left_out, "inputs": plain_values.encode(inputs)}


def rate_of(config: Mapping) -> float | None:
    """Returns the learning rate of a config, or None if it is not a finite number."""
    rate = config.get("learning_rate")
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not math.isfinite(rate):
        return None
    return float(rate)


def restore(folder: str, model, config: Mapping | None = None) -> bool:
    """Restores weights, optimizer state and seeds of a built model from a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        model: Model that was built with `config`.
        config: Config of the run, or None. If its `learning_rate` has changed since the checkpoint, the model keeps
            its own.

    Returns:
        Whether the model has kept its own learning rate.

    Raises:
        ConfigError: The checkpoint is of another model.
        DamagedCheckpointError: The checkpoint is not whole.
    """
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    rate = _new_rate(folder, model, config or {})
    check_folder(folder, contents=False)
    model_optimizers.build_as_saved(folder, model)
    name = os.path.basename(os.path.normpath(folder))
    try:
        with checkpoint_files.whole_folder(folder) as whole:
            file = os.path.join(whole, MODEL)
            checkpoint_files.check_archive(file, name)
            model.load_weights(file)
        with checkpoint_files.npz_arrays(folder, SEEDS) as saved:
            values = [saved[name] for name in saved.files]
        seeds = keras_objects.seeds_of_layers(model)
        if len(values) > len(seeds):  # in that run a callback drew from the global seed, in this one none did yet
            seeds += keras_objects.shared_seed() or keras_objects.make_shared_seed()
        for variable, value in zip(seeds, values, strict=True):
            variable.assign(value)
    except OSError as error:  # of HDF5
        raise checkpoint_files.damaged_error(name, f"{MODEL}: {first_line(error)}") from error
    except (ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "A run of the same name resumes from its last checkpoint, so build_model must still build the same model",
            first_line(error),
            "Give the run another RunConfig(name=...) or storage_path",
        ) from error
    if rate is not None:
        model.optimizer.learning_rate = rate
    return rate is not None


def _new_rate(folder: str, model, config: Mapping) -> float | None:
    """Returns the learning rate of the built model if the config has changed it since the checkpoint, else None."""
    saved_rate, new_rate = read_state(folder).learning_rate, rate_of(config)
    if saved_rate is None or new_rate is None or saved_rate == new_rate:
        return None
    from raytf.parallel.callbacks import settable_rate

    rate = settable_rate(model.optimizer)
    return None if rate is None else float(rate)


def restore_callbacks(folder: str, states: CallbackStates, chief: bool = True) -> None:
    """Restores the states of callbacks; call it after their `on_train_begin`, which resets them.

    Args:
        folder: Folder of the checkpoint.
        states: States of the user's callbacks, which were tracked from their construction.
        chief: Whether this worker is the chief, which writes the files.

    Raises:
        DamagedCheckpointError: The checkpoint has another content.
    """
    if not os.path.lexists(os.path.join(folder, CALLBACKS)):
        if chief:
            warn_user(
                "The checkpoint is of format 1, of which model, optimizer, seeds and history are read: callbacks "
                "start from scratch, and a learning_rate that was changed in config is not seen",
            )
        return
    name = os.path.basename(os.path.normpath(folder))
    entries = checkpoint_files.read_json(folder, CALLBACKS).get("callbacks")
    with checkpoint_files.npz_arrays(folder, ARRAYS) as arrays:
        arrays_by_name = {key: arrays[key] for key in arrays.files}
    try:
        states.restore(entries if isinstance(entries, list) else [None], arrays_by_name, chief)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise checkpoint_files.damaged_error(name, f"{CALLBACKS}: {first_line(error)}") from error


def restore_random(folder: str) -> None:
    """Restores Python's `random` and NumPy's global generator, if the checkpoint contains their states.

    Raises:
        DamagedCheckpointError: The checkpoint has another content.
    """
    if not os.path.lexists(os.path.join(folder, RANDOM)):
        return
    with checkpoint_files.npz_arrays(folder, RANDOM) as arrays:
        random_state.restore_random_states({name: arrays[name] for name in arrays.files})


def metrics_of(folder: str) -> list[list]:
    """Returns the arrays of each metric in a checkpoint within an epoch, in the order of the model's metrics.

    Raises:
        DamagedCheckpointError: The checkpoint has another content.
    """
    by_metric: dict[int, dict[int, Any]] = {}
    with checkpoint_files.npz_arrays(folder, METRICS) as arrays:
        for name in arrays.files:
            metric, _, variable = name.partition(".")
            by_metric.setdefault(int(metric), {})[int(variable)] = arrays[name]
    return [
        [variables[i] for i in sorted(variables)]
        for variables in (by_metric.get(m, {}) for m in range(max(by_metric, default=-1) + 1))
    ]
