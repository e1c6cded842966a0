"""From gathered arrays to batches of tensors: the part of the feed that runs in TensorFlow's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from raytf import columns as columns_module
from raytf.columns import Columns
from raytf.errors import ConfigError
from raytf.sources import Lists, Source


class Tensors:
    """What a batch consists of.

    Args:
        structure: (features, labels, weights) as far as there are any; each `Columns`, or a dict of them.
        map: the user's function of a batch and its seeds, or None.
    """

    def __init__(self, structure: tuple, map: Callable | None):
        self._structure, self._map = structure, map
        self.columns: list[Columns] = [c for spec in structure for c in columns_module.flat(spec)]
        buckets = [i for i, c in enumerate(self.columns) if not c.stacked and c.parts[0].bucket]
        if len(buckets) > 1:
            raise ConfigError(
                "One column at most can say which rows share a batch",
                f"bucket=True for {', '.join(self.columns[i].names[0] for i in buckets)}",
                "Leave it for one",
            )
        self.bucket: int | None = buckets[0] if buckets else None
        self.seeded = map is not None

    def of(self, sources: Sequence[Source]) -> Shape:
        """With the shapes and dtypes of the sources of these columns."""
        return Shape(self._structure, self.columns, sources, self._map)


@dataclass
class Shape:
    """How superblocks become batches."""

    structure: tuple
    columns: list[Columns]
    sources: Sequence[Source]
    map: Callable | None

    @property
    def _computes(self) -> bool:
        return self.map is not None or any(not c.stacked and c.parts[0].image for c in self.columns)

    @property
    def heavy(self) -> bool:
        """Whether a batch is more than cut out of a superblock."""
        return self._computes or any(isinstance(source, Lists) for source in self.sources)

    @property
    def row_bytes(self) -> float:
        """About how many bytes a row takes."""
        return sum(source.row_bytes for source in self.sources)

    @property
    def signature(self) -> tuple[tf.TensorSpec, ...]:
        """Of a superblock: an array for each source, two for lists (values and lengths), and seeds."""
        specs = []
        for source in self.sources:
            if isinstance(source, Lists):
                specs += [tf.TensorSpec((None,), source.dtype), tf.TensorSpec((None,), tf.int64)]
            else:
                specs.append(tf.TensorSpec((None, *source.shape), _tf_dtype(source.dtype)))
        return (*specs, *([tf.TensorSpec((None, 2), tf.int32)] if self.map else []))

    def batch(self, dataset: tf.data.Dataset, rows: int) -> tf.data.Dataset:
        """Superblocks to batches of this worker's rows of a step."""
        if any(isinstance(source, Lists) for source in self.sources):
            dataset = dataset.map(self._lists)
        if any(isinstance(spec, tf.RaggedTensorSpec) for spec in dataset.element_spec):
            return dataset.flat_map(lambda *flat: self._cut(flat, rows))
        return dataset.rebatch(rows)

    def _lists(self, *flat):
        flat, out = iter(flat), []
        for columns, source in zip(self.columns, self.sources, strict=True):
            if not isinstance(source, Lists):
                out.append(next(flat))
                continue
            ragged = tf.RaggedTensor.from_row_lengths(next(flat), next(flat), validate=False)
            (column,) = columns.parts
            whole = isinstance(column.pad, int)
            out.append(_pad(ragged, column, column.pad) if whole else ragged)
        return (*out, *flat)

    def _cut(self, flat, rows):
        """Batches of a superblock that holds lists."""
        first = flat[0]
        total = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first, tf.int64)[0]

        def one(step):
            return self._padded(part[step * rows : (step + 1) * rows] for part in flat)

        return tf.data.Dataset.range((total + rows - 1) // rows).map(one)

    def empty(self) -> tf.data.Dataset:
        """One batch without rows, as `batch` gives them."""
        dataset = tf.data.Dataset.from_tensors(
            tuple(tf.zeros([n or 0 for n in spec.shape], spec.dtype) for spec in self.signature)
        )
        if any(isinstance(source, Lists) for source in self.sources):
            dataset = dataset.map(self._lists)
        if any(isinstance(spec, tf.RaggedTensorSpec) for spec in dataset.element_spec):
            return dataset.flat_map(lambda *flat: tf.data.Dataset.from_tensors(self._padded(flat)))
        return dataset

    def _padded(self, parts) -> tuple:
        """Lists filled up to the longest of the batch where that is asked for."""
        parts = list(parts)
        for i, columns in enumerate(self.columns):
            if not columns.stacked and columns.parts[0].pad == "batch":
                parts[i] = _pad(parts[i], columns.parts[0], None)
        return tuple(parts)

    def finish(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Batches to what the model takes: images decoded, the user's `map` applied, in the user's structure."""
        if self._computes:
            return dataset.map(self._finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return dataset.map(self._finish)

    def _finish(self, *flat):
        flat = list(flat)
        seeds = flat.pop() if self.map else None
        for i, columns in enumerate(self.columns):
            if not columns.stacked and columns.parts[0].image:
                flat[i] = decode_images(flat[i], columns.parts[0].image)
        flat = iter(flat)
        parts = tuple({k: next(flat) for k in s} if isinstance(s, dict) else next(flat) for s in self.structure)
        if self.map:
            mapped = self.map(*parts, seeds)
            parts = mapped if isinstance(mapped, tuple) else (mapped,)
        return parts if len(parts) > 1 else parts[0]


def _pad(ragged: tf.RaggedTensor, column, length: int | None) -> tf.Tensor:
    value = tf.cast(column.pad_value, ragged.dtype)
    return ragged.to_tensor(value, shape=[None, length])


def decode_images(files: tf.Tensor, shape: tuple[int, int, int]) -> tf.Tensor:
    """Image files to pixels.

    Args:
        files: PNG, JPEG, GIF or BMP files: string, (rows,).
        shape: (height, width, channels); others are resized bilinearly, and rounded.

    Returns:
        uint8, (rows, height, width, channels).
    """
    height, width, channels = shape

    def one(file):
        image = tf.io.decode_image(file, channels=channels, expand_animations=False)
        image.set_shape([None, None, channels])
        fits = tf.reduce_all(tf.shape(image)[:2] == [height, width])

        def resized():
            return tf.cast(tf.round(tf.image.resize(image, [height, width])), tf.uint8)

        return tf.ensure_shape(tf.cond(fits, lambda: image, resized), shape)

    return tf.map_fn(one, files, fn_output_signature=tf.TensorSpec(shape, tf.uint8))


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.hasobject else tf.as_dtype(dtype)
