"""The complete state of a training: saved by the chief, restored on every worker, and loaded as a model.

A checkpoint is a folder, see `docs/reference/checkpoint-format.md`. Nothing in it is unpickled or selects the code to
run. An attacker with write access can spoil a training, but not start a program.

Only folders that are whole are listed, so that after a kill the last good one remains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import numbers
import os
import posixpath
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileType, LocalFileSystem, copy_files

from raytf.compat import keras_objects
from raytf.console import quiet
from raytf.data import columns
from raytf.errors import ConfigError, first_line, one_line, without_escapes
from raytf.parallel import model_optimizers
from raytf.storage import checkpoint_files, gather_io, plain_values, scratch, snapshot_store
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
    first_whole,
    newest_first,
    read_state,
    read_state_of,
)
from raytf.worker import legacy_models, random_state
from raytf.worker.callback_state import CallbackStates
from raytf.worker.checkpoint_selector import CheckpointSelector, StoredCheckpoint, list_checkpoints
from raytf.worker.mean_weights import average_models

if TYPE_CHECKING:
    import keras
    from ray.train import Checkpoint, Result

__all__ = [
    "CheckpointSnapshot",
    "CheckpointState",
    "StorageLocation",
    "check_folder",
    "checkpoint_parts",
    "columns_of",
    "existing_path",
    "inputs_of",
    "is_checkpoint",
    "is_uri",
    "last_state",
    "load_model",
    "metrics_of",
    "read_state",
    "read_state_of",
    "remember_run",
    "restore",
    "restore_callbacks",
    "restore_random",
    "run_of_process",
    "save",
    "write",
]

# Largest number of values of a row for a model's first call; more is an error of the file.
_MOST_INPUT_VALUES = 1 << 28
# build_model and config of the runs of this process, by the path of the run.
_runs_of_process: dict[str, tuple[Callable, dict]] = {}
# Notes of the checkpoints of loaded models, by model; see `inputs_of` and `columns_of`.
_loaded_models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class CheckpointSnapshot:
    """A checkpoint of the current state of a training: `moment(folder)` writes it, `checkpoint_parts` returns it.

    Args:
        model: See `checkpoint_parts`.
        state: See `checkpoint_parts`.
        states: See `checkpoint_parts`.
        build: See `checkpoint_parts`.
        writers: Number of workers that write it together, at least 1.
        agreed: Function `agreed(name)` that broadcasts the chief's name to all workers; needed with several writers.

    Attributes:
        everyone: Whether each worker has files of its own; only the chief has.
    """

    everyone = False

    model: Any
    state: CheckpointState
    states: CallbackStates | None = None
    build: tuple | None = None
    writers: int = 1
    agreed: Callable[[str], str] | None = None

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
        ConfigError: An optimizer trains variables of others than the model, or `get_state` of a callback returns a
            value that is not plain.
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


def write(folder: str, model, found: Mapping[str, Any], version: int) -> None:
    """Writes the files of a checkpoint into an empty folder, arrays directly from their own memory.

    Args:
        folder: Path of an existing folder on this machine.
        model: A compiled and built `keras.Model`.
        found: Result of `checkpoint_parts`.
        version: Version of the state.
    """
    for part, pieces in _pieces(model, found):
        with open(os.path.join(folder, part), "xb") as file:
            file.writelines(pieces)
    checkpoint_files.write_manifest(folder, version)


def checkpoint_files_of(model, found: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files of a checkpoint by name, in memory, with the arguments of `write`."""
    contents = {part: b"".join(pieces) for part, pieces in _pieces(model, found)}
    return {**contents, MANIFEST: snapshot_store.manifest({part: [content] for part, content in contents.items()})}


def _pieces(model, found: Mapping[str, Any]) -> Iterator[tuple[str, list]]:
    """Yields (name, pieces of memory) of each file but the manifest."""
    import numpy as np

    from raytf.worker.model_file import ModelFile

    yield MODEL, ModelFile(model).pieces()
    for part, content in found.items():
        if isinstance(content, str):
            yield part, [content.encode()]
        else:
            yield part, gather_io.npz_pieces({key: np.asarray(value, order="C") for key, value in content.items()})


def _described(build_model: Callable, config: Mapping, inputs) -> dict:
    """Returns the content of `build.json` for (build_model, config, inputs)."""
    kept, left_out = {}, {}
    for name, value in config.items():
        try:
            kept[str(name)] = plain_values.encode(value)
        except TypeError:
            left_out[str(name)] = f"{type(value).__module__}.{type(value).__qualname__}"
    path = (
        f"{getattr(build_model, '__module__', '?')}:{getattr(build_model, '__qualname__', type(build_model).__name__)}"
    )
    return {"build_model": path, "config": kept, "left_out": left_out, "inputs": plain_values.encode(inputs)}


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
            warnings.warn(
                "The checkpoint is of format 1, of which model, optimizer, seeds and history are read: callbacks "
                "start from scratch, and a learning_rate that was changed in config is not seen",
                stacklevel=2,
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


def remember_run(run: str, build_model: Callable, config: Mapping) -> None:
    """Stores the build_model and config of a run of this process, as defaults of `load_model`.

    Args:
        run: Path of the run in its storage.
        build_model: The trainer's function.
        config: The trainer's config.
    """
    _runs_of_process[run.rstrip("/")] = build_model, dict(config)


def load_model(
    source: Result | Checkpoint | str | os.PathLike,
    compile: bool = True,
    *,
    which: str | int = "last",
    average: int = 1,
    metric: str | None = None,
    mode: str = "min",
    build_model: Callable | None = None,
    config: Mapping | None = None,
    custom_objects: Mapping | None = None,
    legacy_keras: bool = False,
) -> keras.Model:
    """Loads the Keras model of a run, a checkpoint or a file, without running code from it.

    Keras builds the model from its file if all layers are Keras' own, registered, or in `custom_objects`. It refuses
    layers that contain code (`Lambda` of a lambda). Other models are built by `build_model`, and get the saved weights;
    for a run of the same process the trainer's `build_model` is used.

    Args:
        source: A `ray.train.Result`, a `ray.train.Checkpoint`, or the path or URI ("s3://bucket/run") of a run's
            folder, a checkpoint's folder or a `.keras` file. If a run's last checkpoint is damaged, the one before it
            is taken, with a warning.
        compile: Whether to restore loss, metrics and optimizer too.
        which: Checkpoint of a run: "last", "best", or an int, the number of steps since the start of the run.
        average: Number of last checkpoints whose weights are averaged, at least 1. This includes the moving statistics
            of BatchNormalization. All else, such as the optimizer's state, is that of the last one.
        metric: Metric that decides which checkpoint is "best", at the ends of epochs: "val_accuracy", ... By default
            "val_loss", or "loss" for runs without validation.
        mode: "min" or "max": whether the best value of `metric` is the smallest or the largest.
        build_model: Function `build_model(config) -> keras.Model`, as in the training.
        config: Dict for `build_model`, whose values replace those of the run. The checkpoint contains what is JSON.
        custom_objects: Dict of classes and functions by name, for Keras.
        legacy_keras: Whether the file is one of Keras 2, as of a run with `TensorflowConfig(legacy_keras=True)`.
            Without it such a file only gives weights to `build_model`. Files with a `Lambda`, or with functions of
            other packages, are refused.

    Returns:
        A `keras.Model` with the trained weights, outside of any strategy; for a file of Keras 2 a `tf_keras.Model`.

    Raises:
        ConfigError: There is no model at `source`, it cannot be built, or there is no such checkpoint.
        DamagedCheckpointError: Files of the checkpoint differ from its checksums. It is a `ConfigError`.

    Example:
        >>> import keras, os, raytf, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.keras")
        >>> model.save(path)
        >>> raytf.load_model(path).count_params()
        5
    """
    arguments = (compile, build_model, config, custom_objects, legacy_keras)
    choice = CheckpointSelector(which=which, average=average, metric=metric, mode=mode)
    if hasattr(source, "checkpoint"):
        kept = _checkpoints_of(source)
        if not kept:
            raise ConfigError(
                "A result needs a checkpoint to load a model from", "a result without one", "Train longer"
            )
        return _load_chosen(kept, source.path, choice, arguments)
    if hasattr(source, "as_directory"):
        _check_single(choice, source.path)
        return _load_whole([source], arguments)
    if is_uri(source):
        return _load_stored(StorageLocation.at(source), choice, arguments)
    path = existing_path(source)
    if os.path.isdir(path):
        if not is_checkpoint(path):
            return _load_run(StorageLocation(LocalFileSystem(), os.path.abspath(path), path), choice, arguments)
        _check_single(choice, path)
        if _is_ours(path):
            check_folder(path)
        with checkpoint_files.whole_folder(path) as whole:
            return _load(os.path.join(whole, MODEL), os.path.abspath(path), *arguments)
    if not path.endswith(".keras"):
        raise ConfigError("A model's file is a .keras file", repr(path), "Load others by Keras itself")
    _check_single(choice, path)
    return _load(path, os.path.abspath(os.path.dirname(path)), *arguments)


def is_uri(source) -> bool:
    """Whether the source is a URI of a storage, and not a path on this machine."""
    return isinstance(source, str) and "://" in source


@dataclasses.dataclass(frozen=True)
class StorageLocation:
    """A location in a storage.

    Args:
        filesystem: A `pyarrow.fs.FileSystem`.
        path: Path in the file system.
        shown: Text for messages.
    """

    filesystem: Any
    path: str
    shown: str

    @staticmethod
    def at(uri: str) -> StorageLocation:
        """Returns the location of a URI; raises ConfigError if the storage or the location does not exist."""
        from raytf.compat.ray_train import get_fs_and_path

        shown = re.sub(r"//[^/]*@", "//", uri)  # without credentials
        try:
            filesystem, path = get_fs_and_path(uri, None)
            stored = StorageLocation(filesystem, path.rstrip("/"), shown)
            exists = stored.kind() != FileType.NotFound
        except (ValueError, ImportError, OSError) as error:
            raise ConfigError(
                "A model is loaded from a path, or from the URI of a storage that can be read",
                f"{shown!r}, for which there is {one_line(error)}",
                "Correct the URI, or what gives access to the storage",
            ) from error
        if not exists:
            raise ConfigError("A model is loaded from a place that exists", repr(shown), "Check the URI")
        return stored

    def kind(self) -> FileType:
        """Returns the type of the location."""
        return self.filesystem.get_file_info(self.path).type

    def is_checkpoint(self) -> bool:
        """Whether it is the folder of a checkpoint, see the function `is_checkpoint`."""
        parts = [posixpath.join(self.path, part) for part in (MODEL, STATE, SEEDS, MANIFEST)]
        return any(info.type != FileType.NotFound for info in self.filesystem.get_file_info(parts))


def existing_path(source) -> str:
    """Returns the path `source`; raises ConfigError if it is no path, or does not exist."""
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "A model is loaded from a Result, a Checkpoint or a path",
            f"a {type(source).__name__}",
            "Pass what fit() returned, or the folder of the run",
        )
    path = os.path.expanduser(os.fspath(source))
    if not os.path.exists(path):
        fix, location = "Check the path", ""
        if not os.path.isabs(path):
            fix, location = "Check the path; in processes of the cluster use one from the root", f" in {os.getcwd()}"
        raise ConfigError("A model is loaded from a path that exists", f"{path!r}{location}", fix)
    return path


def inputs_of(model):
    """Returns the model inputs in the checkpoint of a loaded model, as passed to `save`; None without any."""
    return _loaded_models.get(model, {}).get("inputs")


def columns_of(model) -> dict[str, Any] | None:
    """Returns the columns in the checkpoint of a loaded model; None without any.

    "features" are columns as in a trainer's argument. "map" describes the trainer's `map`, or is None.
    """
    identity = _loaded_models.get(model, {}).get("identity") or {}
    described = identity.get("columns")
    if not isinstance(described, dict) or described.get("features") is None:
        return None
    return {"features": columns.read(described["features"]), "map": identity.get("map")}


def run_of_process(run: str) -> tuple[Callable, dict] | None:
    """Returns (build_model, config) of a run of this process, or of one of its checkpoints, by its path."""
    return next((build for path, build in _runs_of_process.items() if f"{run}/".startswith(f"{path}/")), None)


def is_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint's, whole or not, and not a run's."""
    return os.path.lexists(os.path.join(folder, MODEL)) or _is_ours(folder)


def _is_ours(folder: str) -> bool:
    """Whether a folder contains files of raytf in addition to a model's file."""
    return any(os.path.lexists(os.path.join(folder, part)) for part in (STATE, SEEDS, MANIFEST))


def _is_bare(folder: str) -> bool:
    """Whether a checkpoint is only a model's file: of Ray's callback, or of Keras 2."""
    return os.path.isfile(os.path.join(folder, MODEL)) and not _is_ours(folder)


def _check_single(choice: CheckpointSelector, path: str) -> None:
    if choice.needs_run:
        raise ConfigError(
            "which and average choose among the checkpoints of a run",
            f"{path!r}, which is one",
            "Name the folder of the run, or its Result",
        )


def _load_stored(stored: StorageLocation, choice: CheckpointSelector, arguments):
    """Loads the model at a location in a storage."""
    from ray.train import Checkpoint

    if stored.kind() == FileType.File:
        name = posixpath.basename(stored.path)
        if not name.endswith(".keras"):
            raise ConfigError("A model's file is a .keras file", repr(stored.shown), "Load others by Keras itself")
        _check_single(choice, stored.shown)
        size = stored.filesystem.get_file_info(stored.path).size or 0
        with scratch.temporary_folder(size) as folder:
            copy_files(stored.path, os.path.join(folder, name), source_filesystem=stored.filesystem)
            return _load(os.path.join(folder, name), posixpath.dirname(stored.path), *arguments)
    if not stored.is_checkpoint():
        return _load_run(stored, choice, arguments)
    _check_single(choice, stored.shown)
    return _load_whole([Checkpoint(stored.path, filesystem=stored.filesystem)], arguments)


def _load_run(stored: StorageLocation, choice: CheckpointSelector, arguments):
    """Loads the model of a run's folder. If Ray's list of checkpoints is unusable, it lists those in the folder."""
    from ray.train import Result

    from raytf.compat.ray_train import CheckpointManagerInitializationError

    try:
        with quiet.quiet_result_reading():
            result = Result.from_path(stored.path, storage_filesystem=stored.filesystem)
    except (RuntimeError, ValueError, OSError, AssertionError, KeyError, CheckpointManagerInitializationError) as error:
        kept = list_checkpoints(stored.filesystem, stored.path)
        if kept:
            taken = (
                "it is chosen among those that lie there"
                if choice.needs_run
                else "the newest one that is whole is taken"
            )
            warnings.warn(
                f"Ray's list of the checkpoints in {stored.shown!r} cannot be used ({first_line(error)}); {taken}",
                stacklevel=3,
            )
            return _load_chosen(kept, stored.shown, choice, arguments)
        raise ConfigError(
            f"A model is loaded from a run's folder, or from a checkpoint folder that holds {MODEL}",
            f"{stored.shown!r}, in which there is neither",
            "Look for it below the storage path of the run, or train longer: `raytf runs DIR` lists runs",
        ) from error
    kept = _checkpoints_of(result)
    if not kept:
        raise ConfigError("A run's folder needs a checkpoint to load a model from", repr(result.path), "Train longer")
    return _load_chosen(kept, result.path, choice, arguments)


def _checkpoints_of(result) -> list[StoredCheckpoint]:
    """Returns the checkpoints of a result: those of ends of epochs first, each kind newest first."""
    metrics = {checkpoint.path: values for checkpoint, values in result.best_checkpoints or ()}
    listed = _checkpoints(result) if result.checkpoint is not None else []
    ends = [StoredCheckpoint(c.filesystem, c.path, metrics.get(c.path) or {}) for c in listed]
    return ends + list_checkpoints(result.filesystem, result.path, others=False)


def _load_chosen(kept: list[StoredCheckpoint], run: str, choice: CheckpointSelector, arguments):
    """Loads the model of the selected checkpoints of a run."""
    from ray.train import Checkpoint

    candidates = iter(
        [Checkpoint(checkpoint.path, filesystem=checkpoint.filesystem) for checkpoint in choice.ordered(kept, run)]
    )
    if choice.average == 1:
        return _load_whole(candidates, arguments)

    def models():
        for i in range(choice.average):
            try:
                yield _load_whole(candidates, (arguments[0] and i == 0, *arguments[1:]))
            except checkpoint_files.DamagedCheckpointError as error:
                raise ConfigError(
                    "A mean is that of checkpoints that are whole",
                    f"average={choice.average} with {i} in {run!r}",
                    "Take fewer",
                ) from error

    return average_models(models())


def _checkpoints(result) -> list:
    """Returns the checkpoints of a result with a checkpoint: the last one, then the others, newest first."""
    older = [c for c, _ in result.best_checkpoints or () if c.path != result.checkpoint.path]
    return [result.checkpoint, *newest_first(older)]


def last_state(result) -> CheckpointState:
    """Returns the `CheckpointState` of a `ray.train.Result` with a checkpoint; the weights stay in the storage.

    Raises:
        DamagedCheckpointError: No checkpoint has a readable state.
    """
    return first_whole(_checkpoints(result), read_state_of)[1]


def _load_whole(candidates, arguments):
    with contextlib.ExitStack() as stack:

        def opened(candidate):
            with scratch.name_errors():  # a checkpoint of another storage is copied to this machine
                folder = stack.enter_context(candidate.as_directory())
            if _is_bare(folder):
                return folder
            check_folder(folder, name=posixpath.basename(candidate.path.rstrip("/")))
            return folder

        candidate, folder = first_whole(candidates, opened)
        whole = stack.enter_context(checkpoint_files.whole_folder(folder))
        return _load(os.path.join(whole, MODEL), candidate.path, *arguments)


def _load(file: str, place: str, *arguments):
    """Loads a model from a file of Keras.

    Args:
        file: Path on this machine.
        place: Path of its checkpoint in the storage.
        arguments: compile, build_model, config, custom_objects and legacy_keras.
    """
    model = _load_file(file, place, *arguments)
    folder = os.path.dirname(file)
    _loaded_models[model] = {"identity": _identity(folder)}
    if not getattr(model, "inputs", None):
        _loaded_models[model]["inputs"] = _build(file)["inputs"]
    return model


def _identity(folder: str) -> dict:
    """Returns the identity of the run in the state next to a model's file; {} without a readable state."""
    try:
        return read_state(folder).identity if os.path.lexists(os.path.join(folder, STATE)) else {}
    except checkpoint_files.DamagedCheckpointError:  # a checkpoint itself is already checked; this is another folder
        return {}


def _load_file(file: str, place: str, compile: bool, build_model, config, custom_objects, legacy: bool):
    checkpoint_files.check_archive(file, place)
    if checkpoint_files.keras_version(file).startswith("2."):
        if build_model is not None:
            return legacy_models.load_weights(file, build_model, config)
        return legacy_models.load(file, compile, custom_objects) if legacy else legacy_models.refuse_keras_2_file(place)
    with quiet.quiet_native():
        import keras

        if build_model is None:
            try:
                with scratch.name_errors():  # Keras unpacks vocabularies to this folder
                    return keras.saving.load_model(file, dict(custom_objects or {}), compile, safe_mode=True)
            except scratch.ScratchError:
                raise
            except Exception as error:
                known = run_of_process(place)
                if known is None:
                    raise _not_built(file, error) from error
                reason = _keras_message(error)
            warnings.warn(
                f"Keras cannot build the model from its file ({reason}); "
                "it is built with the trainer's build_model and given the saved weights",
                stacklevel=6,
            )
            build_model, run_config = known
            return _built(file, build_model, {**run_config, **_build(file)["config"], **(config or {})}, compile)
        return _built(file, build_model, {**_build(file)["config"], **(config or {})}, compile)


def _build(file: str) -> dict:
    """Returns the content of `build.json` next to a file of Keras, with defaults if it is missing."""
    folder = os.path.dirname(file)
    defaults = {"build_model": None, "config": {}, "left_out": {}, "inputs": None}
    if not os.path.lexists(os.path.join(folder, BUILD)):
        return defaults
    described = checkpoint_files.read_json(folder, BUILD)
    try:
        described = (
            defaults
            | {"config": plain_values.decode(described["config"]), "inputs": plain_values.decode(described["inputs"])}
            | {name: described[name] for name in ("build_model", "left_out")}
        )
        if type(described["config"]) is not dict or type(described["left_out"]) is not dict:
            raise ValueError("its config is no object")
    except (ValueError, KeyError) as error:
        name = os.path.basename(os.path.normpath(folder))
        raise checkpoint_files.damaged_error(name, f"{BUILD}: {first_line(error)}") from error
    return described


def _keras_message(error: Exception) -> str:
    """Returns the cause in Keras' message without the whole config, which comes from an untrusted file."""
    cause = without_escapes(error).rpartition("Exception encountered: ")[2]
    text = first_line(cause).split(" Full object config")[0]
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def _not_built(file: str, error: Exception) -> ConfigError:
    described = _build(file)
    origin = f", which was {str(described['build_model'])[:200]!r}" if described["build_model"] else ""
    missing = ", ".join(f"{str(k)[:80]!r}" for k in described["left_out"])
    missing = f" and config={{...}} with {missing}, which a checkpoint cannot keep" if missing else ""
    return ConfigError(
        "Keras builds a model from its file if all of its layers are Keras' own, registered or in custom_objects, and "
        "none holds code",
        f"{file} ({_keras_message(error)})",
        f"Pass build_model=... of the training{origin}{missing}, or custom_objects={{name: class}}",
    )


def _built(file: str, build_model: Callable, config: dict, compile: bool):
    """Returns a model of `build_model` with the weights of a file."""
    import keras

    described = _build(file)
    missing = {k: v for k, v in described["left_out"].items() if k not in config}
    if not callable(build_model):
        raise ConfigError(
            "build_model must be the function that built the model", repr(build_model), "Pass build_model=that function"
        )
    try:
        model = build_model(dict(config))
    except KeyError as error:
        raise ConfigError(
            "build_model needs a config with the keys that it reads",
            f"{error} is missing" + (f"; the checkpoint could not keep {missing}" if missing else ""),
            "Pass config={...} with what is missing",
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError("build_model must give a keras.Model", f"a {type(model).__name__}", "Return the model")
    if not model_optimizers.has_call(model):
        model_optimizers.build(model, None)
    elif model_optimizers.decides_itself(model) and not model_optimizers.unbuilt(model):
        model.built = True  # it may not accept a call on the inputs alone
    elif described["inputs"] is not None:
        _call(model, _one_row(described["inputs"]))
    elif not model.built:
        raise ConfigError(
            "A model without build.json next to its file must be built by build_model",
            "one without weights",
            "Call it on a row, or its build(), in build_model",
        )
    if compile and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
        model_optimizers.build_as_saved(os.path.dirname(file), model)
    with warnings.catch_warnings():
        if not compile:
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
        try:
            model.load_weights(file)
        except (ValueError, KeyError) as error:
            raise _other_model(error) from error
    return model


def _call(model, row) -> None:
    """Creates a model's weights; `Model.build` would leave out layers of a subclassed one."""
    try:
        model(row)
    except Exception as error:  # Keras, TensorFlow and the user's layers each raise their own types
        raise _other_model(error) from error


def _other_model(error: Exception) -> ConfigError:
    return ConfigError(
        "build_model must build the model that was saved", _short_message(error), "Pass the training's, and its config"
    )


def _short_message(error: Exception) -> str:
    """Returns Keras' message; the sentence after "Example error message" is the one that names the difference."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and "Example error message" in lines[0] else lines[:1])[:400]


def _one_row(inputs):
    import keras

    if isinstance(inputs, dict):
        return {name: _one_row(part) for name, part in inputs.items()}
    is_valid = isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple)
    sizes = inputs[0] if is_valid else (-1,)
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(sizes) > _MOST_INPUT_VALUES:
        raise checkpoint_files.damaged_error(BUILD, "its inputs have no right shape")
    return keras.ops.zeros((1, *inputs[0]), inputs[1])
