"""Loads the Keras model of a run, a checkpoint or a file: `raytf.load_model`.

Nothing is unpickled, and no file selects the code to run. A function of the caller's builds a model that Keras cannot
build from its file alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSelector, FileType, LocalFileSystem, copy_files

from raytf import logs, validation
from raytf.console import quiet
from raytf.data import columns
from raytf.errors import ConfigError, first_line, without_escapes
from raytf.logs import warn_user
from raytf.parallel import model_optimizers
from raytf.storage import checkpoint_files, plain_values, scratch
from raytf.storage.checkpoint_files import (
    BUILD,
    MODEL,
    STATE,
    CheckpointState,
    check_folder,
    first_whole,
    newest_first,
    read_state,
    read_state_of,
)
from raytf.storage.folder_contents import local_folder
from raytf.worker import legacy_models, model_source
from raytf.worker.checkpoint_selector import CheckpointSelector, StoredCheckpoint, list_checkpoints
from raytf.worker.mean_weights import average_models

logger = logs.get_logger(__name__)

if TYPE_CHECKING:
    import keras
    from ray.train import Checkpoint, Result

# Largest number of values of a row for a model's first call; more is an error of the file.
_MOST_INPUT_VALUES = 1 << 28
# File that Tune writes into the folder of each trial.
_TRIAL_CONFIG = "params.json"
# Notes of the checkpoints of loaded models, by model; see `inputs_of` and `columns_of`.
_loaded_models: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


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
    layers that contain code (`Lambda` of a lambda). Other models are built by `build_model`, and get the saved weights.
    For a run of the same process the trainer's `build_model` is used.

    Args:
        source: A `ray.train.Result` or a `ray.train.Checkpoint`. Or the path or URI ("s3://bucket/run") of a run's
            folder, a checkpoint's folder or a `.keras` file. If a run's last checkpoint is damaged, the one before it
            is taken, with a warning.
        compile: Whether to restore loss, metrics and optimizer, too; True by default.
        which: Checkpoint of a run: "last", the default, "best", or an int, the number of steps since its start.
        average: Number of last checkpoints whose weights are averaged, at least 1, which is the default. This includes
            the moving statistics of BatchNormalization. All else, such as the optimizer's state, is that of the last
            one.
        metric: Metric that decides which checkpoint is "best", at the ends of epochs: "val_accuracy", ... By default
            "val_loss", or "loss" for runs without validation.
        mode: "min" or "max": whether the best value of `metric` is the smallest or the largest; "min" by default.
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
    check_builders(build_model, config, custom_objects)
    for name, value in {"compile": compile, "legacy_keras": legacy_keras}.items():
        validation.check_flag(name, value)
    choice = CheckpointSelector(which=which, average=average, metric=metric, mode=mode)
    if hasattr(source, "checkpoint"):
        checkpoints = _checkpoints_of(source)
        if not checkpoints:
            raise ConfigError(
                "A result needs a checkpoint to load a model from", "a result without one", "Train longer"
            )
        return _load_chosen(checkpoints, source.path, choice, arguments)
    if hasattr(source, "as_directory"):
        _check_single(choice, source.path)
        return _load_whole([source], arguments)
    if model_source.is_uri(source):
        return _load_stored(model_source.StorageLocation.from_uri(source), choice, arguments)
    path = model_source.existing_path(source)
    if os.path.isdir(path):
        if not model_source.is_checkpoint(path):
            return _load_run(
                model_source.StorageLocation(LocalFileSystem(), os.path.abspath(path), path), choice, arguments
            )
        _check_single(choice, path)
        if model_source.is_ours(path):
            check_folder(path)
        with checkpoint_files.whole_folder(path) as whole:
            return _load(os.path.join(whole, MODEL), os.path.abspath(path), *arguments)
    if not path.endswith(".keras"):
        raise ConfigError("A model's file is a .keras file", repr(path), "Load others by Keras itself")
    _check_single(choice, path)
    return _load(path, os.path.abspath(os.path.dirname(path)), *arguments)


def check_builders(build_model, config, custom_objects) -> None:
    """Raises ConfigError for arguments of `load_model` of another type, by which a model is built."""
    validation.check_function("build_model", build_model, "build_model(config)")
    validation.check_mapping("config", config, '{"units": 64}')
    validation.check_mapping("custom_objects", custom_objects, '{"MyLayer": MyLayer}')


def inputs_of(model):
    """Returns the model inputs in the checkpoint of a loaded model, as passed to `save`; None without any."""
    return _loaded_models.get(model, {}).get("inputs")


def columns_of(model) -> dict[str, Any] | None:
    """Returns the columns in the checkpoint of a loaded model; None without any.

    "features", "labels" and "sample_weights" are columns as in a trainer's arguments, or None. "map" describes the
    trainer's `map`, or is None. "classes" are the values that the numbers of a column represent, by column; checkpoints
    of earlier versions have none.
    """
    identity = _loaded_models.get(model, {}).get("identity") or {}
    described = identity.get("columns")
    if not isinstance(described, dict) or described.get("features") is None:
        return None
    roles = {role: described.get(role) for role in ("features", "labels", "sample_weights")}
    return {
        **{role: None if entry is None else columns.read(entry) for role, entry in roles.items()},
        "map": identity.get("map"),
        "classes": _read_classes(identity.get("classes", {})),
    }


def _read_classes(entry: Any) -> dict[str, list[str]]:
    """Returns the classes by column; raises DamagedCheckpointError for a value of another form."""
    lists = entry.values() if isinstance(entry, dict) else [None]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        raise checkpoint_files.damaged_error(STATE, "its classes are no lists of names")
    return entry


def _check_single(choice: CheckpointSelector, path: str) -> None:
    if choice.needs_run:
        raise ConfigError(
            "which and average choose among the checkpoints of a run",
            f"{path!r}, which is one",
            "Name the folder of the run, or its Result",
        )


def _load_stored(stored: model_source.StorageLocation, choice: CheckpointSelector, arguments):
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


def _load_run(stored: model_source.StorageLocation, choice: CheckpointSelector, arguments):
    """Loads the model of a run's folder. If Ray's list of checkpoints is unusable, it lists those in the folder."""
    from ray.train import Result

    from raytf.compat.ray_train import CheckpointManagerInitializationError

    try:
        with quiet.quiet_result_reading():
            result = Result.from_path(stored.path, storage_filesystem=stored.filesystem)
    except (RuntimeError, ValueError, OSError, AssertionError, KeyError, CheckpointManagerInitializationError) as error:
        checkpoints = list_checkpoints(stored.filesystem, stored.path)
        if checkpoints:
            is_trial = stored.filesystem.get_file_info(posixpath.join(stored.path, _TRIAL_CONFIG)).is_file
            taken = "choosing among those in the folder" if choice.needs_run else "using the newest whole one"
            if not is_trial:  # a trial has no such list
                logger.warning(
                    f"Ray's list of the checkpoints in {stored.shown!r} cannot be used ({first_line(error)}); {taken}"
                )
            return _load_chosen(checkpoints, stored.shown, choice, arguments)
        raise ConfigError(
            f"A model is loaded from a run's folder, or from a checkpoint folder that holds {MODEL}",
            f"{stored.shown!r}, in which there is neither",
            "Look for it below the storage path of the run, or train longer: `raytf runs DIR` lists runs",
        ) from error
    checkpoints = _checkpoints_of(result)
    if not checkpoints:
        raise ConfigError("A run's folder needs a checkpoint to load a model from", repr(result.path), "Train longer")
    return _load_chosen(checkpoints, result.path, choice, arguments)


def _checkpoints_of(result) -> list[StoredCheckpoint]:
    """Returns the checkpoints of a result: those of ends of epochs first, each kind newest first."""
    metrics = {checkpoint.path: values for checkpoint, values in result.best_checkpoints or ()}
    listed = _checkpoints(result) if result.checkpoint is not None else []
    ends = [StoredCheckpoint(c.filesystem, c.path, metrics.get(c.path) or {}) for c in listed]
    return ends + list_checkpoints(result.filesystem, result.path, others=False)


def _load_chosen(checkpoints: list[StoredCheckpoint], run: str, choice: CheckpointSelector, arguments):
    """Loads the model of the selected checkpoints of a run."""
    from ray.train import Checkpoint

    candidates = iter(
        [
            Checkpoint(checkpoint.path, filesystem=checkpoint.filesystem)
            for checkpoint in choice.ordered(checkpoints, run)
        ]
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
                    "Average fewer checkpoints",
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
    tried: list = []
    with contextlib.ExitStack() as stack:

        def opened(candidate):
            tried.append(candidate)
            folder = stack.enter_context(local_folder(candidate))
            if model_source.is_bare(folder):
                return folder
            check_folder(folder, name=posixpath.basename(candidate.path.rstrip("/")))
            return folder

        try:
            candidate, folder = first_whole(candidates, opened)
        except checkpoint_files.DamagedCheckpointError:
            if tried:
                _refuse_foreign(tried[0])
            raise
        whole = stack.enter_context(checkpoint_files.whole_folder(folder))
        return _load(os.path.join(whole, MODEL), candidate.path, *arguments)


def _refuse_foreign(checkpoint) -> None:
    """Raises ConfigError for a checkpoint of a train loop's own files, of which raytf knows nothing."""
    infos = checkpoint.filesystem.get_file_info(FileSelector(checkpoint.path, allow_not_found=True))
    names = sorted(info.base_name for info in infos)
    if names and not {MODEL, checkpoint_files.STATE, checkpoint_files.MANIFEST} & set(names):
        raise ConfigError(
            f"raytf.load_model reads checkpoints of raytf, in which is {MODEL}",
            f"{checkpoint.path!r} with {', '.join(names[:5])}",
            "Load what the train loop has written as it wrote it, or report checkpoints with raytf.ReportCallback()",
        )


def _load(file: str, shown_path: str, *arguments):
    """Loads a model from a file of Keras.

    Args:
        file: Path on this machine.
        shown_path: Path of its checkpoint in the storage.
        arguments: compile, build_model, config, custom_objects and legacy_keras.
    """
    model = _load_file(file, shown_path, *arguments)
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


def _load_file(file: str, shown_path: str, compile: bool, build_model, config, custom_objects, legacy: bool):
    checkpoint_files.check_archive(file, shown_path)
    if checkpoint_files.keras_version(file).startswith("2."):
        if build_model is not None:
            return legacy_models.load_weights(file, build_model, config)
        return (
            legacy_models.load(file, compile, custom_objects)
            if legacy
            else legacy_models.refuse_keras_2_file(shown_path)
        )
    with quiet.quiet_native():
        import keras

        if build_model is None:
            try:
                with scratch.name_errors():  # Keras unpacks vocabularies to this folder
                    return keras.saving.load_model(file, dict(custom_objects or {}), compile, safe_mode=True)
            except scratch.ScratchError:
                raise
            except Exception as error:
                known = model_source.run_of_process(shown_path)
                if known is None:
                    raise _not_built(file, error) from error
                reason = _keras_message(error)
            warn_user(
                f"Keras cannot build the model from its file ({reason}); "
                "it is built with the trainer's build_model and given the saved weights",
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
