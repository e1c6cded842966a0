"""Exports the model of a run for use without raytf: as a SavedModel, a Keras file or an ONNX file."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pyarrow.fs import FileType, LocalFileSystem

from raytf import validation
from raytf.console import quiet
from raytf.errors import ConfigError, first_line
from raytf.storage import scratch
from raytf.worker import model_loading, model_source
from raytf.worker.checkpoint_selector import CheckpointSelector, list_checkpoints

if TYPE_CHECKING:
    from ray.train import Checkpoint, Result

FORMATS = ("saved_model", "keras", "onnx")
_CONVERTERS = ("tf2onnx", "onnxruntime")
# Largest difference between an output of the export and the model's, see `_distance`.
_TOLERANCE = 1e-6
# Generated rows of the check, and sizes of axes of any length; the first size that the model accepts is used.
_ROWS, _SIZES = 3, (64, 8, 256)
_NOT_CHECKED = "Load it by raytf.load_model, and write it with Keras' own model.export(path)"


def export(
    source: Result | Checkpoint | str | os.PathLike,
    output: str | os.PathLike,
    format: str = "saved_model",
    *,
    which: str | int = "last",
    average: int = 1,
    metric: str | None = None,
    mode: str = "min",
    build_model: Callable | None = None,
    config: Mapping | None = None,
    custom_objects: Mapping | None = None,
) -> str:
    """Exports the model of a run for inference, and checks that the exported one computes the same.

    Args:
        source: A run, a checkpoint or a file, as in `raytf.load_model`.
        output: Path on this machine that does not exist yet. It is a folder for "saved_model", a file that ends in
            ".keras", or a file for "onnx".
        format: "saved_model", the default, for TensorFlow Serving and `tf.saved_model.load(output).serve(x)`. Or
            "keras", for `keras.saving.load_model(output)`, or "onnx", which needs the packages tf2onnx and onnxruntime.
        which: Checkpoint of a run: "last", the default, "best", or an int, the number of steps since its start.
        average: Number of last checkpoints whose weights are averaged, at least 1; 1 by default.
        metric: Metric that decides which checkpoint is "best"; by default "val_loss", or "loss" without validation.
        mode: "min" or "max": whether the best value of `metric` is the smallest or the largest; "min" by default.
        build_model: Function `build_model(config) -> keras.Model`, for a model that Keras cannot build from its file.
        config: Dict for `build_model`, whose values replace those of the run.
        custom_objects: Dict of classes and functions by name, for Keras.

    Returns:
        The path of the exported model.

    Raises:
        ConfigError: An argument is wrong, or there is no such checkpoint. Or the exported model differs on generated
            rows by more than 1e-6, relative to the largest output or 1. Then there is nothing at `output`.

    Example:
        >>> import keras, os, raytf, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> folder = tempfile.mkdtemp()
        >>> model.save(os.path.join(folder, "model.keras"))
        >>> os.path.basename(raytf.export(os.path.join(folder, "model.keras"), os.path.join(folder, "served")))
        'served'
    """
    choice = {"which": which, "average": average, "metric": metric, "mode": mode}
    check(source, output, format, **choice)
    arguments = {"build_model": build_model, "config": config, "custom_objects": custom_objects}
    # Keras warns that a model which is not compiled cannot be trained
    model = model_loading.load_model(source, compile=False, **choice, **arguments)
    output = os.path.abspath(os.path.expanduser(os.fspath(output)))
    # in the same folder, so that a rename publishes the complete export at once
    parent = os.path.dirname(output)
    with (
        scratch.name_errors(parent),
        tempfile.TemporaryDirectory(prefix=".raytf_export_", dir=parent) as folder,
    ):
        exported = os.path.join(folder, os.path.basename(output))
        with quiet.quiet_native():
            _write(model, exported, format, custom_objects)
        os.rename(exported, output)
    return output


def check(source, output: str | os.PathLike, format: str, **choice) -> None:
    """Raises ConfigError for arguments of `export` that are wrong, before Ray and TensorFlow are imported.

    Args:
        source: As in `export`.
        output: As in `export`.
        format: As in `export`.
        choice: Its which, average, metric and mode.
    """
    validation.check_word("format", format, FORMATS)
    missing = [name for name in _CONVERTERS if importlib.util.find_spec(name) is None]
    if format == "onnx" and missing:
        raise ConfigError(
            f"ONNX is written by {_CONVERTERS[0]}, and checked by {_CONVERTERS[1]}",
            f"format='onnx' without {' and '.join(missing)}",
            f"Install {'them' if len(missing) > 1 else 'it'} (pip install {' '.join(missing)}), or load the model by "
            "raytf.load_model and use a format of Keras' own model.export",
        )
    if not isinstance(output, (str, os.PathLike)):
        raise ConfigError("An export is written to a path", f"a {type(output).__name__}", "Name a folder or file")
    _check_output(os.fspath(output), format)
    chosen = CheckpointSelector(**choice)
    if not hasattr(source, "checkpoint") and not hasattr(source, "as_directory"):
        check_source(source, chosen)


def _check_output(output: str, format: str) -> None:
    path = os.path.abspath(os.path.expanduser(output))
    if "://" in output:
        raise ConfigError("An export is written on this machine", repr(output), "Name a path, and copy it from there")
    if os.path.lexists(path):
        raise ConfigError(
            "An export is written to a path that does not exist",
            repr(output),
            "Choose another path, or remove what is there",
        )
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError("An export is written into a folder that exists", repr(output), "Make the folder")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise ConfigError("An export is written where this process may write", repr(output), "Choose another path")
    if format == "keras" and not path.endswith(".keras"):
        raise ConfigError("The name of a file of Keras ends in .keras", repr(output), f"Call it {output + '.keras'!r}")


def check_source(source, choice: CheckpointSelector) -> None:
    """Raises ConfigError if there is no such checkpoint in the files; Ray's metrics are checked later."""
    if model_source.is_uri(source):
        stored = model_source.StorageLocation.from_uri(source)
        if stored.kind() == FileType.File or stored.is_checkpoint():
            return
    else:
        path = model_source.existing_path(source)
        if not os.path.isdir(path) or model_source.is_checkpoint(path):
            return
        stored = model_source.StorageLocation(LocalFileSystem(), os.path.abspath(path), path)
    path, checkpoints = stored.shown, list_checkpoints(stored.filesystem, stored.path)
    if not checkpoints:
        raise ConfigError(
            "A run's folder needs a checkpoint to load a model from",
            f"{path!r}, which has none",
            "Name the folder of the run, below its storage path, or train longer",
        )
    if choice.which != "best":
        choice.ordered(checkpoints, path)


def _write(model, path: str, format: str, custom_objects: Mapping | None) -> None:
    """Writes a model, loads it and compares outputs; raises ConfigError if it fails or they differ."""
    import keras

    if not isinstance(model, keras.Model):
        raise ConfigError("A model of Keras 3 is exported", f"a {type(model).__module__} model", _NOT_CHECKED)
    specs = _specs(model)
    rows, expected = _find_rows(model, specs)
    writers = {"saved_model": _saved_model, "keras": _keras, "onnx": _onnx}
    with warnings.catch_warnings():
        # the export is not for training
        warnings.filterwarnings("ignore", message=".*compile.*metrics.*")
        try:
            compute = writers[format](model, path, specs, custom_objects)
        except ConfigError:
            raise
        except Exception as error:  # Keras and the converters each raise their own types
            raise ConfigError(
                f"A model is exported as {format} where Keras can write it so",
                f"{model.name!r} ({type(error).__name__}: {first_line(error)[:300]})",
                f"Choose another of {', '.join(FORMATS)}",
            ) from error
    _compare(expected, _flat(compute(rows)), format)


def _saved_model(model, path: str, specs, custom_objects) -> Callable:
    import keras
    import tensorflow as tf

    signature = None
    if _inputs(model) is None:  # Keras does not know the dtypes of a subclassed model's inputs
        signature = [keras.tree.map_structure(lambda s: keras.InputSpec(shape=s.shape, dtype=s.dtype), specs)]
    model.export(path, format="tf_saved_model", verbose=False, input_signature=signature)
    loaded = tf.saved_model.load(path)
    return lambda rows: loaded.serve(rows)  # `loaded.serve` alone would not keep the variables alive


def _keras(model, path: str, specs, custom_objects) -> Callable:
    import keras

    model.save(path)
    try:
        loaded = keras.saving.load_model(path, dict(custom_objects or {}), compile=False, safe_mode=True)
    except Exception as error:
        raise ConfigError(
            "A file of Keras is one that Keras can load without build_model",
            f"{model.name!r} ({type(error).__name__}: {first_line(error)[:300]})",
            "Register its layers (keras.saving.register_keras_serializable), pass custom_objects, or choose another "
            "format",
        ) from error
    return _graph(loaded, specs)


def _onnx(model, path: str, specs, custom_objects) -> Callable:
    import keras
    import onnxruntime
    import tensorflow as tf

    signature = [keras.tree.map_structure(lambda s: tf.TensorSpec(s.shape, s.dtype, s.name), specs)]
    model.export(path, format="onnx", verbose=False, input_signature=signature)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def compute(rows):
        names = [node.name for node in session.get_inputs()]
        return session.run(None, dict(zip(names, map(np.asarray, tf.nest.flatten(rows)), strict=True)))

    return compute


def _inputs(model):
    """Returns the symbolic inputs of a functional or sequential model in their structure; None for other models."""
    import keras

    inputs = getattr(model, "inputs", None)
    if isinstance(model, keras.Sequential):
        return inputs[0] if inputs else None
    return model.input if inputs else None


def _specs(model):
    """Returns a `tf.TensorSpec` for each input of a model, in the structure of the inputs."""
    import keras
    import tensorflow as tf

    inputs, stored = _inputs(model), model_loading.inputs_of(model)
    if inputs is not None:
        return keras.tree.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype, t.name), inputs)
    if stored is None:
        raise ConfigError(
            "An export is checked with rows of the model's inputs, which functional and sequential models have, and "
            "checkpoints of raytf.KerasTrainer",
            f"{model.name!r}, a {type(model).__name__} whose inputs are not known",
            _NOT_CHECKED,
        )
    parts = stored if isinstance(stored, dict) else {"inputs": stored}
    specs = {name: tf.TensorSpec((None, *shape), dtype, name) for name, (shape, dtype) in parts.items()}
    return specs if isinstance(stored, dict) else specs["inputs"]


def _find_rows(model, specs) -> tuple[Any, list[np.ndarray]]:
    """Returns (generated rows that the model accepts, its outputs for them)."""
    import keras

    compute, failed = _graph(model, specs), None
    any_length = any(None in item.shape.as_list()[1:] for item in keras.tree.flatten(specs))
    for size in _SIZES if any_length else _SIZES[:1]:
        numbers = np.random.default_rng(0)
        rows = keras.tree.map_structure(lambda spec: _row(spec, size, numbers), specs)  # noqa: B023 - called at once
        try:
            expected = _flat(compute(rows))
        except Exception as error:  # too short for a pooling layer, or longer than a table of positions
            failed = error
            continue
        if any(_distance(a, b) > 0 for a, b in zip(expected, _flat(compute(rows)), strict=True)):
            raise ConfigError(
                "An export is compared with the model, whose outputs must be the same for the same rows",
                f"{model.name!r}, which gives others each time",
                _NOT_CHECKED,
            )
        return rows, expected
    raise ConfigError(
        "An export is checked with generated rows",
        f"{model.name!r}, which takes none of {_shown(specs)} ({type(failed).__name__}: {first_line(failed)[:300]})",
        _NOT_CHECKED,
    ) from failed


def _row(spec, size: int, numbers: np.random.Generator):
    """Returns rows of an input: numbers from 0 to 1. Integers are 0 or 1, as they may be indices of a table."""
    import tensorflow as tf

    shape = (_ROWS, *(size if length is None else length for length in spec.shape.as_list()[1:]))
    if spec.dtype == tf.string:
        return tf.constant(numbers.choice(["a", "b"], shape).tolist(), tf.string)
    values = numbers.uniform(0, 1, shape) if spec.dtype.is_floating else numbers.integers(0, 2, shape)
    return tf.cast(values, spec.dtype)


def _graph(model, specs) -> Callable:
    """Returns the model as a graph, as in a SavedModel: eager execution may differ in the last digits."""
    import tensorflow as tf

    return tf.function(lambda rows: model(rows, training=False)).get_concrete_function(specs)


def _flat(outputs) -> list[np.ndarray]:
    import keras

    return [np.asarray(tensor) for tensor in keras.tree.flatten(outputs)]


def _compare(wanted: list[np.ndarray], outputs: list[np.ndarray], format: str) -> None:
    if [array.shape for array in wanted] != [array.shape for array in outputs]:
        raise _difference_error(
            format, f"outputs of shapes {[o.shape for o in outputs]} for {[o.shape for o in wanted]}"
        )
    for expected, actual in zip(wanted, outputs, strict=True):
        if not (distance := _distance(expected, actual)) <= _TOLERANCE:  # also false for NaN
            raise _difference_error(format, f"an output that differs by {distance:.1e}")


def _distance(expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest difference of an output, relative to the largest number of the model's, at least 1."""
    if expected.dtype.kind in "OSU":
        return float((expected != actual).any())
    expected, actual = expected.astype("float64"), actual.astype("float64")
    same = (expected == actual) | (
        np.isnan(expected) & np.isnan(actual)
    )  # covers infinities, and a model that has diverged
    largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=1.0)
    return float(np.max(np.abs(expected[~same] - actual[~same]), initial=0)) / largest


def _difference_error(format: str, how: str) -> ConfigError:
    formats = ", ".join(name for name in FORMATS if name != format)
    return ConfigError(
        f"What is exported computes what the model does, to {_TOLERANCE:g}",
        f"format={format!r} with {how}",
        f"Choose another format ({formats})",
    )


def _shown(specs) -> str:
    import keras

    return ", ".join(f"{tuple(spec.shape)} {spec.dtype.name}" for spec in keras.tree.flatten(specs))
