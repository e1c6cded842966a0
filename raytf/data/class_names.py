"""Adds the paths of images, and the names of their classes, to predictions. Driver side, without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import ray
from ray.data.block import BlockAccessor

from raytf.data import stored
from raytf.errors import ConfigError


def with_names(predictions, images, classes: Sequence[str] | None, threshold: float | None):
    """Returns predictions with the columns `path` and `class`, unless an output of the model has such a name.

    Args:
        predictions: A `ray.data.Dataset` with a row for each image, in their order.
        images: A `ray.data.Dataset` with the column `path`.
        classes: Names of the classes by number, or None if they are unknown.
        threshold: Probability above which an output of one number is the second of two classes. None if the output is
            no probability.

    Raises:
        ConfigError: There are more images than predictions, or fewer: files have changed meanwhile.
    """
    tables = [stored.as_table(block) for block in stored.read(images.select_columns(["path"])).get()]
    if not tables:
        raise no_image("none that can be decoded")
    paths = pa.concat_tables(tables)
    predicted = stored.read(predictions)
    if paths.num_rows != sum(predicted.rows):
        raise ConfigError(
            "Files must stay as they are while they are predicted",
            f"{sum(predicted.rows)} predictions, and {paths.num_rows} images after them",
            "Predict again",
        )
    refs, first = [], 0
    for ref, rows in zip(predicted.refs, predicted.rows, strict=True):
        part = paths["path"].slice(first, rows)
        refs.append(ray.put(_named(stored.as_table(ray.get(ref)), part, classes, threshold)))
        first += rows
    return ray.data.from_arrow_refs(refs)


def no_image(received: str) -> ConfigError:
    """Returns the error of a folder without an image that can be read."""
    return ConfigError("A folder of images must hold some", received, "Check the path and the files")


def _named(table: pa.Table, paths: pa.ChunkedArray, classes: Sequence[str] | None, threshold: float | None) -> pa.Table:
    added: dict[str, pa.ChunkedArray | pa.Array] = {"path": paths}
    if classes is not None and table.num_columns == 1:
        (values,) = BlockAccessor.for_block(table).to_batch_format("numpy").values()
        numbers = numbers_of(values, len(classes), threshold)
        if numbers is not None:
            added["class"] = pa.array([classes[number] for number in numbers], pa.string())
    return pa.table({**added, **{name: table.column(name) for name in table.column_names}})


def numbers_of(outputs: np.ndarray, classes: int, threshold: float | None) -> np.ndarray | None:
    """Returns the number of the class of each row, or None if the outputs are not those of a classifier.

    Args:
        outputs: One value for each class in a row, or one probability of the second class.
        classes: Number of classes.
        threshold: As in `with_names`.
    """
    if outputs.ndim == 2 and outputs.shape[1] == classes > 1:
        return outputs.argmax(axis=1)
    if classes == 2 and threshold is not None and outputs.size == len(outputs):
        return (outputs.reshape(-1) > threshold).astype(int)
    return None
