"""`raytf.Predictor`: a run's model as a function of batches, for `ray.data.Dataset.map_batches`."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.data.block import BlockAccessor

from raytf.console import quiet
from raytf.data import columns
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import ColumnSpecs
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset, as_table
from raytf.errors import ConfigError
from raytf.logs import warn_user
from raytf.parallel import model_optimizers
from raytf.worker import inputs as model_inputs
from raytf.worker import model_loading, model_source
from raytf.worker.checkpoint_selector import CheckpointSelector

if TYPE_CHECKING:
    import keras
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from ray.train import Checkpoint, Result


class Predictor:
    """Predicts batches of rows with the model of a run, which each process loads once.

    Pass the class to `Dataset.map_batches` to predict in actors:

        ds.map_batches(raytf.Predictor, fn_constructor_args=(result,), fn_constructor_kwargs={"which": "best"},
                       batch_size=256, compute=ray.data.ActorPoolStrategy(size=4))

    Pass an instance to predict in Ray Data's tasks, also with a model of a notebook:

        ds.map_batches(raytf.Predictor(model, features="image"), batch_size=256)

    Args:
        run: A `ray.train.Result`, a `ray.train.Checkpoint`, a path or a URI, as in `raytf.load_model`. Or a
            `keras.Model`, which is stored once in Ray's object store, with its weights at the first use.
        features: Columns that the model takes, as in `raytf.KerasTrainer`. By default those of the run's training, or
            those with the names of the model's inputs.
        keep: List of columns that are returned in addition to the predictions; all by default.
        which: Checkpoint of a run: "last", the default, "best", or an int, the number of steps since its start. This
            and the arguments that follow are not for a `keras.Model`.
        metric: Metric that decides which checkpoint is "best"; by default "val_loss", or "loss" without validation.
        mode: "min" or "max": whether the best value of `metric` is the smallest or the largest; "min" by default.
        average: Number of last checkpoints whose weights are averaged, at least 1; 1 by default.
        build_model: Function `build_model(config) -> keras.Model`, for a model that Keras cannot build from its file.
        config: Dict for `build_model`, whose values replace those of the run.
        custom_objects: Dict of classes and functions by name, for Keras.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> import keras, numpy, raytf
        >>> model = keras.Sequential([keras.Input((4,), name="x"), keras.layers.Dense(1)])
        >>> predictor = raytf.Predictor(model, keep=["id"])
        >>> batch = predictor({"id": numpy.arange(8), "x": numpy.ones((8, 4))})
        >>> sorted(batch), batch["predictions"].shape
        (['id', 'predictions'], (8, 1))
    """

    def __init__(
        self,
        run: Result | Checkpoint | str | os.PathLike | keras.Model,
        *,
        features: ColumnSpecs | None = None,
        keep: Sequence[str] | None = None,
        which: str | int = "last",
        metric: str | None = None,
        mode: str = "min",
        average: int = 1,
        build_model: Callable | None = None,
        config: Mapping | None = None,
        custom_objects: Mapping | None = None,
    ) -> None:
        names = keep if isinstance(keep, Iterable) else [keep]
        if isinstance(keep, str) or (keep is not None and not all(isinstance(name, str) for name in names)):
            raise ConfigError("keep must be a list of columns' names", repr(keep), 'Pass keep=["id"]')
        model_loading.check_builders(build_model, config, custom_objects)
        self._features = columns.parse(features, "features")
        self._keep = None if keep is None else tuple(keep)
        options = {"which": which, "metric": metric, "mode": mode, "average": average}
        CheckpointSelector(**options)
        options |= {"build_model": build_model, "config": config, "custom_objects": custom_objects}
        self._source = _of_model(run, options) if _is_model(run) else _of_run(run, options)

    def __call__(self, batch: Mapping[str, np.ndarray] | pa.Table | pd.DataFrame) -> dict[str, Any]:
        """Predicts one row for each row of a batch, in order.

        Args:
            batch: Columns by name, an Arrow table or a DataFrame, as from `map_batches`.

        Returns:
            The kept columns, and a column for each output of the model: its key, or "predictions", or "predictions_0",
            ...

        Raises:
            ConfigError: The batch lacks a column, or a prediction has the name of one.
        """
        block = batch if not isinstance(batch, Mapping) else BlockAccessor.batch_to_block(dict(batch))
        values = BlockAccessor.for_block(block).to_batch_format("numpy")
        kept_columns = values if self._keep is None else {name: _column(values, name) for name in self._keep}
        if not len(next(iter(values.values()), ())):
            return kept_columns
        predictions = _loaded(self._source).predict(as_table(block), self._features)
        if duplicates := sorted(kept_columns.keys() & predictions.keys()):
            raise ConfigError(
                "Predictions are columns in addition to those that are kept",
                f"{', '.join(map(repr, duplicates))} in both",
                "Rename it in the dataset, or name other columns in keep=[...]",
            )
        return {**kept_columns, **predictions}


def _column(values: Mapping[str, Any], name: str):
    columns.check_names(columns.parse(name, "keep"), list(values), "keep")
    return values[name]


def _is_model(run) -> bool:
    """Returns whether it is a Keras model; without Keras imported, there is none."""
    return "keras" in sys.modules and isinstance(run, sys.modules["keras"].Model)


class _Source:
    """The source of a model; equal in all processes that one `Predictor` is sent to.

    Args:
        load: Function load() that returns the model.
    """

    def __init__(self, load: Callable):
        self.load, self._key = load, uuid.uuid4().hex

    def __eq__(self, other) -> bool:
        return isinstance(other, _Source) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _of_run(run, how: dict) -> _Source:
    if not hasattr(run, "checkpoint") and not hasattr(run, "as_directory") and not model_source.is_uri(run):
        run = os.path.abspath(model_source.existing_path(run))
    path = getattr(run, "path", run)
    made = model_source.run_of_process(path) if how["build_model"] is None and isinstance(path, str) else None
    return _Source(functools.partial(_load, run, how, made))


def _load(run, how: dict, made: tuple[Callable, dict] | None):
    if made is not None:  # set in the process that trained, which may be another one
        model_source.remember_run(getattr(run, "path", run), *made)
    return model_loading.load_model(run, compile=False, **how)


def _of_model(model, how: dict) -> _Source:
    usual = {"which": "last", "mode": "min", "average": 1}
    if given := sorted(name for name, value in how.items() if value != usual.get(name)):
        raise ConfigError(
            "These arguments say which model of a run is loaded", f"{', '.join(given)} with a model", "Leave them out"
        )
    return _ModelSource(model)


class _ModelSource(_Source):
    """A model of this process; serialized once, when it is first sent."""

    def __init__(self, model):
        super().__init__(lambda: model)
        self._sent: Any = None

    def __getstate__(self) -> dict:
        if self._sent is None:
            from raytf.fitting import transport

            data, sent = transport.serialize_named([("the model", self.load())])
            parts = data, sent.values(), transport.global_settings()
            self._sent = ray.put(parts) if ray.is_initialized() else parts
        return {"_key": self._key, "_sent": self._sent}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.load = self._read

    def _read(self):
        with quiet.quiet_native():
            from raytf.fitting import transport

        data, values, settings = ray.get(self._sent) if isinstance(self._sent, ray.ObjectRef) else self._sent
        transport.apply_settings(settings)
        (model,), _ = transport.deserialize(data, values)
        return model


# ------------------------------------------------------------------------------------------ in the process


@functools.lru_cache(maxsize=2)  # Ray Data may run two Predictors of a pipeline in turn
def _loaded(source: _Source) -> _Loaded:
    """Returns the model of a source; Ray Data's tasks get a copy of their function each, and share a process."""
    return _Loaded(source.load())


class _Loaded:
    """A model, and its predict function.

    Args:
        model: A `keras.Model`.
    """

    def __init__(self, model):
        import tensorflow as tf

        from raytf.compat.tensorflow import separate_function

        self._model = model
        if model_optimizers.is_own(model, "predict"):  # its own `predict` handles the rows
            self._step = lambda rows: model.predict(tf.data.Dataset.from_tensors(rows), verbose=0)
        else:
            step = lambda rows: model.predict_step(rows)
            self._step = step if model.run_eagerly else separate_function(step, reduce_retracing=True)

    def predict(self, table: pa.Table, features) -> dict[str, np.ndarray]:
        """Returns an array for each output, by its column.

        Args:
            table: The rows, at least one.
            features: Parsed columns, or None for those that the model names.
        """
        import numpy as np

        if features is None:
            features = self._own_features(table.column_names)
        spec = BatchSpec(features)
        spec.check(table.column_names)
        rows = _tensors(table, spec)
        self._check_shapes(rows)
        outputs = named_outputs(self._step(rows))
        return {name: np.asarray(output) for name, output in outputs.items()}

    def _check_shapes(self, rows) -> None:
        """Raises ConfigError for rows that the model cannot take, or that a layer would misinterpret."""
        inputs = getattr(self._model, "inputs", None) or []
        if isinstance(rows, dict) and len(rows) < len(inputs):
            missing = [layer_input.name for layer_input in inputs if layer_input.name not in rows]
            raise ConfigError(
                "features must name a column for each input of the model",
                f"{', '.join(map(repr, rows))}, and no {', '.join(map(repr, missing))}",
                "Pass features={name of the input: column}",
            )
        for given, wanted in model_inputs.pairs(self._model, rows):
            if hasattr(given, "shape") and not _fits(given.shape, wanted.shape):
                received = f"{tuple(given.shape[1:])} for {wanted.name!r}, which takes {tuple(wanted.shape[1:])}"
                raise ConfigError("Rows must have the shape of the model's input", received, model_inputs.FIX)
        model_inputs.check_types(self._model, rows)

    def _own_features(self, names: Sequence[str]):
        """Returns the columns of the run's training, or those named like the model's inputs."""
        trained_columns = model_loading.columns_of(self._model)
        if trained_columns is not None:
            if trained_columns.get("map") is not None:
                warn_user(
                    "The run was trained with map=..., which raytf.Predictor does not apply; do so in the dataset, and "
                    "pass features=...",
                )
            return columns.parse(trained_columns["features"], "features")
        names_of_inputs = [layer_input.name for layer_input in getattr(self._model, "inputs", None) or []]
        if names_of_inputs and set(names_of_inputs) <= set(names):
            by_name = {name: name for name in names_of_inputs}
            return columns.parse(by_name if self._takes_names() else names_of_inputs[0], "features")
        raise ConfigError(
            "A Predictor needs features=..., the columns that the model takes, unless the run's checkpoint names them",
            f"none, and a batch with {', '.join(map(repr, names))}",
            "Name the columns as for raytf.KerasTrainer",
        )

    def _takes_names(self) -> bool:
        """Returns whether the model takes a dict of its inputs; several inputs are always fed as a dict."""
        import keras

        model = self._model
        return len(model.inputs) > 1 or (not isinstance(model, keras.Sequential) and isinstance(model.input, dict))


def _fits(given, wanted) -> bool:
    """Returns whether Keras accepts rows of a shape for another one: it adds or drops a last dimension of 1."""
    if given.rank is None:
        return True
    given, wanted = list(given)[1:], list(wanted)[1:]
    if abs(len(given) - len(wanted)) == 1:
        longer = given if len(given) > len(wanted) else wanted
        if longer.pop() != 1:
            return False
    return len(given) == len(wanted) and all(
        None in pair or pair[0] == pair[1] for pair in zip(given, wanted, strict=True)
    )


def _tensors(table: pa.Table, spec: BatchSpec):
    """Returns the rows of a table as tensors for the model, as in training."""
    import tensorflow as tf

    from raytf.data.feed import Feed

    rows = table.num_rows
    block = StoredDataset([table.combine_chunks()], [rows], list(table.column_names))
    feed = Feed(block, spec, Sampling(global_batch=rows, shuffle="none"))
    whole = tf.data.Dataset.from_tensors(tuple(map(tf.convert_to_tensor, feed.span(0, 0, 1))))
    return next(iter(feed.shape.batches(whole, rows)))


def named_outputs(outputs) -> dict[str, Any]:
    """Returns the outputs of a model by column name: its key, "predictions", "predictions_0", ...

    Args:
        outputs: A structure of anything.
    """
    from keras import tree

    by_column = {}
    for path, output in tree.flatten_with_path(outputs):
        keyed = path and isinstance(path[0], str)
        by_column["_".join(map(str, path)) if keyed else "_".join(["predictions", *map(str, path)])] = output
    return by_column
