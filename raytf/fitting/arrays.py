"""Converts x, y and sample weights of `raytf.fit` to blocks of rows, and to the columns of tensors. Driver side.

Arrays are treated as by Keras: floating types become `keras.config.floatx()`, a DataFrame is a matrix, a Series a
column.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import ray
import tensorflow as tf
from keras import tree
from ray.data.extensions import ArrowTensorArray

from raytf.compat.keras import array_slicing, data_adapter_utils
from raytf.data import columns
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column, Columns
from raytf.data.stored import StoredDataset
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError

# Bytes of a block: small enough that workers share the reading, without too many blocks.
_BLOCK_BYTES = 64 << 20
_ROLES = ("features", "labels", "sample_weights")


@dataclass(frozen=True)
class RowData:
    """Rows, and the conversion to tensors.

    Args:
        dataset: An unread `ray.data.Dataset`, a `TFData`, or None.
        table: The rows if they are in memory.
        batch: Content of a batch.
        structure: (x, y, sample weights) as far as present, with a column's name for each tensor. None if `batch`
            defines the structure.
    """

    dataset: Any
    table: pa.Table | None
    batch: BatchSpec
    structure: tuple | None = None

    @property
    def rows(self) -> int | None:
        """Returns the number of rows, or None if unknown."""
        return None if self.table is None else self.table.num_rows

    def head(self, rows: int) -> RowData:
        """Returns only the first rows."""
        if self.table is None:
            return RowData(self.dataset.limit(rows), None, self.batch, self.structure)
        return RowData(None, self.table.slice(0, rows), self.batch, self.structure)

    def stored(self) -> StoredDataset:
        """Puts the table into Ray's object store."""
        block_rows = max(1, int(_BLOCK_BYTES / max(1.0, self.table.nbytes / max(1, self.table.num_rows))))
        parts = [self.table.slice(start, block_rows) for start in range(0, self.table.num_rows, block_rows)]
        return StoredDataset(
            [ray.put(part) for part in parts], [p.num_rows for p in parts], list(self.table.column_names)
        )


def check_rows(x, y, sample_weight, class_weight, features, labels, name: str = "x") -> RowData:
    """Returns the checked data.

    Args:
        x, y, sample_weight: Arguments of `raytf.fit`.
        class_weight: Weights by class, or None.
        features, labels: Columns, if `x` has columns.
        name: Name of `x`, for messages.

    Raises:
        ConfigError: The data cannot be sent to workers, or its parts do not fit each other.
    """
    if isinstance(x, TFData):
        return _pipeline(x, y, sample_weight, class_weight, features, labels, name)
    _refuse_other(x, name)
    if features is None and labels is None and not isinstance(x, (str, os.PathLike, ray.data.Dataset)):
        return _arrays(x, y, sample_weight, class_weight, name)
    return _columns(x, y, sample_weight, class_weight, features, labels, name)


def is_arrays(x) -> bool:
    """Returns whether this process can count and slice the rows."""
    return not isinstance(x, (str, os.PathLike, ray.data.Dataset, TFData))


def _pipeline(x: TFData, y, sample_weight, class_weight, features, labels, name: str) -> RowData:
    other_arguments = {"y": y, "sample_weight": sample_weight, "features": features, "labels": labels}
    if given := [argument for argument, value in other_arguments.items() if value is not None]:
        raise ConfigError(f"{name} is a raytf.TFData, which defines these", ", ".join(given), "Leave them out")
    x.check_pickles()
    x = x if class_weight is None else dataclasses.replace(x, class_weight=class_weight)
    return RowData(x, None, BatchSpec(None))


def _refuse_other(x, name: str) -> None:
    if x is None:
        raise ConfigError(
            f"{name} must hold rows", None, "Pass arrays, a table, a path of Parquet or a ray.data.Dataset"
        )
    kind = type(x)
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "__next__") or kind.__module__.startswith("torch.utils.data"):
        raise ConfigError(
            f"{name} must be rows that can be sent to the workers, and counted",
            f"a generator of type {kind.__name__}",
            "Pass raytf.TFData(make_dataset) of a function that makes it, arrays, a path of Parquet, or a "
            "ray.data.Dataset, such as ray.data.from_items(...).map(...)",
        )


# ------------------------------------------------------------------------------------------ tables with columns


def _columns(x, y, sample_weight, class_weight, features, labels, name: str) -> RowData:
    if y is not None:
        raise ConfigError(
            "Where rows have columns, labels= names those of the labels",
            "y= besides",
            "Use labels=, and leave y out",
        )
    if class_weight is not None:
        raise ConfigError(
            "class_weight is for arrays",
            "class_weight= and columns",
            "Put a column of weights: sample_weight='column'",
        )
    if features is None:
        raise ConfigError(
            "Rows with columns need features= (and labels=), which name columns", f"{name}= alone", "Name the columns"
        )
    batch = BatchSpec(
        **{
            role: columns.parse(spec, shown)
            for role, shown, spec in zip(
                _ROLES, ("features", "labels", "sample_weight"), (features, labels, sample_weight), strict=True
            )
        }
    )
    table = x
    if isinstance(x, (str, os.PathLike)):
        return RowData(_parquet(x, name), None, batch)
    if isinstance(x, ray.data.Dataset):
        return RowData(x, None, batch)
    if isinstance(x, pd.DataFrame):
        table = pa.Table.from_pandas(x, preserve_index=False)
    elif isinstance(x, Mapping):
        table = pa.table({key: _column(np.asarray(value), f"{name}[{key!r}]") for key, value in x.items()})
    if not isinstance(table, pa.Table):
        raise ConfigError(
            "features= and labels= name columns of a table, a path of Parquet or a ray.data.Dataset",
            f"{name} of type {type(x).__name__}",
            "Leave them out for arrays",
        )
    batch.check(table.column_names)
    _check_rows(table.num_rows, name)
    return RowData(None, table, batch)


def _parquet(path, name: str):
    path = os.fspath(path)
    if "://" not in path and not os.path.exists(os.path.expanduser(path)):
        raise ConfigError(f"{name} must be a path of Parquet that exists", repr(path), "Check the path")
    return ray.data.read_parquet(os.path.expanduser(path))


def _check_rows(rows: int, name: str) -> None:
    if not rows:
        raise ConfigError(f"{name} must hold rows", "none", "Check the filter or the file that it comes from")


# ------------------------------------------------------------------------------------------ arrays


def _arrays(x, y, sample_weight, class_weight, name: str) -> RowData:
    roles = ((name, x), (name.replace("x", "y") if name != "x" else "y", y), ("sample_weight", sample_weight))
    x, y, sample_weight = (_as_arrays(part, role) for role, part in roles)
    if sample_weight is not None and y is None:
        raise ConfigError("sample_weight belongs to labels", "sample_weight= without y=", "Pass y, too")
    sample_weight = _weights(y, sample_weight, class_weight)
    arrays: dict[str, np.ndarray] = {}

    def named(role, structure):
        def add(array):
            key = f"{role}{len(arrays)}"
            arrays[key] = array
            return key

        return tree.map_structure(add, structure)

    parts = [(r, p) for r, p in zip("xyw", (x, y, sample_weight), strict=True) if p is not None]
    structure = tuple(named(role, part) for role, part in parts)
    _check_lengths(structure, arrays, {"x": name, "y": roles[1][0], "w": "sample_weight"})
    table = pa.table({key: _column(array, key) for key, array in arrays.items()})
    specs = dict.fromkeys(_ROLES)
    plain = True
    for (_, part), names, role in zip(parts, structure, _ROLES, strict=False):
        flat = isinstance(names, str) or (type(part) is dict and all(isinstance(n, str) for n in names.values()))
        plain = plain and flat and (isinstance(names, str) or all(isinstance(key, str) for key in part))
        specs[role] = names
    for role, names in specs.items():
        if names is not None:
            column_spec = lambda column: Columns((Column(column, ragged=_is_lists(table, column)),), False)
            flat = names if plain else {column: column for column in tree.flatten(names)}
            specs[role] = (
                column_spec(flat)
                if isinstance(flat, str)
                else {key: column_spec(column) for key, column in flat.items()}
            )
    return RowData(None, table, BatchSpec(**specs), None if plain else structure)


def _is_lists(table: pa.Table, column: str) -> bool:
    return pa.types.is_large_list(table.schema.field(column).type)


def _as_arrays(value, name: str):
    """Returns the same structure of NumPy arrays, or of ragged tensors."""
    if value is None:
        return None
    if isinstance(value, pa.Table):
        value = value.to_pandas()
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        value = value.to_numpy(zero_copy_only=False) if isinstance(value, pa.Array) else value.to_numpy()
    if isinstance(value, (list, tuple)) and not any(hasattr(part, "shape") for part in tree.flatten(value)):
        raise ConfigError(
            f"{name} must be an array, a table, or lists and dicts of these",
            f"a {type(value).__name__} of {type(next(iter(tree.flatten(value)), None)).__name__}",
            "Make an array of it: np.array(...)",
        )
    _check_rows(len(tree.flatten(value)), name)
    return tree.map_structure(lambda part: _as_array(part, name), value)


def _as_array(value, name: str):
    if isinstance(value, pa.Table):
        value = value.to_pandas()
    if isinstance(value, tf.RaggedTensor) and value.ragged_rank == 1 and value.shape.rank == 2:
        return value
    fix = _made_dense(value, name)
    if fix is not None:
        raise ConfigError(
            "What is sent to workers must be dense, or lists of numbers of different lengths",
            f"{name} of type {type(value).__name__}",
            f"Make it dense: {fix}",
        )
    if isinstance(value, pd.DataFrame):
        _check_frame(value, name)
        if not value.empty and all(
            isinstance(kind, np.dtype) for kind in value.dtypes
        ):  # pandas makes objects of numbers and booleans
            value = value.astype(np.result_type(*value.dtypes))
    elif isinstance(value, (str, bytes)) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise ConfigError(
            f"{name} must be an array, a table, or lists and dicts of these",
            f"a {type(value).__name__}",
            "Make an array of it: np.array(...)",
        )
    if isinstance(value, np.ndarray) and value.dtype.kind in "USO":
        return value
    if isinstance(value, pd.Series) and not pd.api.types.is_numeric_dtype(value):
        return np.expand_dims(value.to_numpy(dtype=object), -1)
    try:
        array = np.asarray(array_slicing.convert_to_sliceable(value, target_backend="tensorflow"))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name} must be an array of numbers or texts",
            f"a {type(value).__name__}: {error}",
            "Convert it by np.asarray",
        ) from error
    return array


def _made_dense(value, name: str) -> str | None:
    """Returns the expression that converts a sparse or ragged value to an array; None for others."""
    if data_adapter_utils.is_scipy_sparse(value):
        return f"{name}.toarray()"
    if isinstance(value, tf.SparseTensor):
        return f"tf.sparse.to_dense(tf.sparse.reorder({name}))"
    return f"{name}.to_tensor()" if isinstance(value, tf.RaggedTensor) else None


def _check_frame(frame: pd.DataFrame, name: str) -> None:
    if not all(pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes):
        raise ConfigError(
            f"{name} is a DataFrame whose columns become one matrix, so all of them must be numbers",
            ", ".join(f"{column!r} of {kind}" for column, kind in frame.dtypes.items()),
            "Name columns: features={'input': 'column', ...}, labels='column'; or pass a dict of arrays",
        )


def _weights(y, sample_weight, class_weight):
    if class_weight is not None:
        if sample_weight is not None or tree.is_nested(y) or y is None:
            received = "sample_weight, too" if sample_weight is not None else "no y" if y is None else "several outputs"
            raise ConfigError(
                "class_weight is for one output, and without sample_weight", received, "Pass sample_weight alone"
            )
        return np.asarray(data_adapter_utils.class_weight_to_sample_weights(y, class_weight), keras.config.floatx())
    if sample_weight is not None and tree.is_nested(y) and not tree.is_nested(sample_weight):
        return tree.map_structure(lambda _: sample_weight, y)
    return sample_weight


def _check_lengths(structure, arrays: dict, names: dict[str, str]) -> None:
    lengths = {
        key: (int(a.shape[0]) if a.shape.rank else None)
        if isinstance(a, tf.RaggedTensor)
        else (a.shape[0] if a.ndim else None)
        for key, a in arrays.items()
    }
    if None in lengths.values():
        raise ConfigError("Arrays must have a row for each sample", "a single number", "Pass an array of rows")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{names[key[0]]}: {length} rows" for key, length in lengths.items())
        raise ConfigError("x, y and sample_weight must have as many rows as each other", shown, "Correct the arrays")
    _check_rows(next(iter(lengths.values())), names["x"])


def _column(array, name: str):
    """Returns a column of a table, without a copy if possible."""
    if isinstance(array, tf.RaggedTensor):
        return pa.LargeListArray.from_arrays(pa.array(array.row_splits.numpy()), pa.array(array.values.numpy()))
    if array.dtype.kind in "biuf":
        if array.ndim == 1:
            return pa.array(array)
        if not array[:1].size:
            raise ConfigError("Rows must hold numbers", f"{name} of shape {array.shape}", "Leave the array out")
        return ArrowTensorArray.from_numpy(np.ascontiguousarray(array))
    if array.dtype.kind in "USO" and (array.ndim == 1 or array.shape[1:] == (1,)):
        texts = array.reshape(len(array)).tolist()
        if all(isinstance(text, (str, bytes)) for text in texts):
            return pa.array(texts, pa.large_binary() if isinstance(texts[0], bytes) else pa.large_string())
    raise ConfigError(
        "Arrays must hold numbers, or a text in each row",
        f"{name} of dtype {array.dtype}, shape {array.shape}",
        "Convert it, or pass a dict with an array for each column",
    )


def split_validation(x, y, sample_weight, part: float):
    """Splits off the last rows like Keras's `validation_split`. Returns a tuple (x, y, weights) of each part."""
    # Keras slices texts only as objects
    cut = lambda a: a.astype(object) if isinstance(a, np.ndarray) and a.dtype.kind in "US" else a
    try:
        return array_slicing.train_validation_split(
            tree.map_structure(cut, (x, y, sample_weight)), validation_split=part
        )
    except ValueError as error:
        raise ConfigError("validation_split cuts the last rows off arrays", error, "Pass validation_data") from error
