"""Converts gathered arrays to batches of tensors: the part of the feed that runs in TensorFlow's graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from raytf.data.batch_spec import BatchSpec
from raytf.data.gather import ColumnSource, Lists
from raytf.errors import one_line


@dataclass
class Batcher:
    """Converter of superbatches to batches.

    Args:
        spec: Contents of a batch.
        sources: The `ColumnSource` of each column.
    """

    spec: BatchSpec
    sources: Sequence[ColumnSource]

    @property
    def computes(self) -> bool:
        """Returns whether a batch needs computation, the user's `map` or the decoding of images."""
        return self.spec.map is not None or any(not c.stacked and c.parts[0].image for c in self.spec.columns)

    @property
    def heavy(self) -> bool:
        """Returns whether a batch needs more than a slice of a superbatch."""
        return self.computes or any(isinstance(source, Lists) for source in self.sources)

    @property
    def row_bytes(self) -> float:
        """Returns the approximate bytes of a row."""
        return sum(source.row_bytes for source in self.sources)

    @property
    def signature(self) -> tuple[tf.TensorSpec, ...]:
        """Returns the specs of a superbatch.

        It has an array for each source, or two for lists (values and lengths). Then follow, for each column that is
        padded by global batch, the longest lengths by step, and the seeds.
        """
        specs = []
        for source in self.sources:
            if isinstance(source, Lists):
                specs += [tf.TensorSpec((None,), source.dtype), tf.TensorSpec((None,), tf.int64)]
            else:
                specs.append(tf.TensorSpec((None, *source.shape), _tf_dtype(source.dtype)))
        specs += [tf.TensorSpec((None,), tf.int64)] * len(self.spec.padded)
        return (*specs, *([tf.TensorSpec((None, 2), tf.int32)] if self.spec.map else []))

    def batches(
        self, dataset: tf.data.Dataset, rows: int, *, static: bool = False, empty: bool = False
    ) -> tf.data.Dataset:
        """Converts superbatches to batches in the user's structure, with images decoded and the user's `map` applied.

        Args:
            dataset: Dataset of superbatches of `signature`, each of whole batches except the last.
            rows: Number of rows of a batch.
            static: Whether all batches have this number of rows.
            empty: Whether a batch without rows is added at the end.
        """
        if self._ragged:
            dataset = dataset.flat_map(lambda *flat: self._cut(*self._split(flat), rows, static))
        else:
            if any(isinstance(source, Lists) for source in self.sources):
                dataset = dataset.map(lambda *flat: tuple(self._split(flat)[0]))
            dataset = dataset.rebatch(rows, drop_remainder=static)
        if empty and not self.spec.padded:  # with padding each step of a superbatch already makes a batch
            nothing = tuple(tf.zeros([n or 0 for n in spec.shape], spec.dtype) for spec in self.signature)
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(nothing).map(self._nothing))
        if self.computes:
            return dataset.map(self._finish, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        plain = len(self.spec.structure) > 1 and not any(isinstance(spec, dict) for spec in self.spec.structure)
        return dataset if self._ragged or plain else dataset.map(self._finish)

    def _nothing(self, *flat):
        (split, longest), zero = self._split(flat), tf.zeros([1], tf.int64)
        return self._part(split, [cut[0] for cut in self._cuts(split, longest, zero, zero)])

    @property
    def _ragged(self) -> bool:
        """Returns whether lists are sliced and padded one batch at a time."""
        lists = zip(self.spec.columns, self.sources, strict=True)
        return any(isinstance(source, Lists) and not isinstance(c.parts[0].pad, int) for c, source in lists)

    def _split(self, flat) -> tuple[list, list]:
        """Splits a superbatch into its parts.

        Returns:
            A tuple (parts, longest lengths by step). The parts are a tensor of all rows for each column, and the seeds.
            A column of lists has (values, row splits) instead.
        """
        flat, out = iter(flat), []
        for columns, source in zip(self.spec.columns, self.sources, strict=True):
            if not isinstance(source, Lists):
                out.append(next(flat))
                continue
            values, splits = next(flat), tf.concat([[0], tf.cumsum(next(flat))], 0)
            (column,) = columns.parts
            whole = isinstance(column.pad, int)
            out.append(_pad(_lists(values, splits), column, column.pad) if whole else (values, splits))
        remaining = list(flat)
        return [*out, *remaining[len(self.spec.padded) :]], remaining[: len(self.spec.padded)]

    def _cut(self, split, longest, rows: int, static: bool) -> tf.data.Dataset:
        """Slices a superbatch with lists into batches."""
        first = split[0]
        total = tf.size(first[1], tf.int64) - 1 if isinstance(first, tuple) else tf.shape(first, tf.int64)[0]
        if longest:  # this worker may have no row of the last step
            begins = tf.minimum(tf.range(tf.size(longest[0], tf.int64)) * rows, total)
        else:
            begins = tf.range(0, total // rows * rows if static else total, rows, tf.int64)
        # computed for all batches at once: the overhead of an operation exceeds its work on one batch
        cuts = self._cuts(split, longest, begins, tf.minimum(begins + rows, total))

        def cut_batch(*cut):
            part = self._part(split, cut)
            return _of_rows(part, rows) if static else part

        return tf.data.Dataset.from_tensor_slices(cuts).map(cut_batch)

    def _cuts(self, split, longest, begins, ends) -> tuple:
        """Computes the slices of batches.

        They are begin, rows, rows + 1; begin and size of each list column's values; and the longest lengths. Each is
        int64, (batches, 1).
        """
        cuts = [begins, ends - begins, ends - begins + 1]
        for part in split:
            if isinstance(part, tuple):
                first = tf.gather(part[1], begins)
                cuts += [first, tf.gather(part[1], ends) - first]
        return tuple(cut[:, None] for cut in (*cuts, *longest))

    def _part(self, split, cut):
        """Slices one batch, and finishes it unless `batches` does so later."""
        begin, rows, more, *list_slices = cut
        lists, parts = iter(list_slices[: len(list_slices) - len(self.spec.padded)]), []
        longest = iter(list_slices[len(list_slices) - len(self.spec.padded) :])
        for i, column_part in enumerate(split):
            if not isinstance(column_part, tuple):
                parts.append(
                    tf.slice(column_part, begin, rows)
                    if column_part.shape.rank == 1
                    else column_part[begin[0] : begin[0] + rows[0]]
                )
                continue
            first, size = next(lists), next(lists)
            ragged = _lists(tf.slice(column_part[0], first, size), tf.slice(column_part[1], begin, more) - first)
            (column,) = self.spec.columns[i].parts
            parts.append(_pad(ragged, column, next(longest)[0]) if column.pads_batch else ragged)
        return tuple(parts) if self.computes or not self._ragged else self._finish(*parts)

    def _finish(self, *flat):
        flat = list(flat)
        seeds = flat.pop() if self.spec.map else None
        for i, columns in enumerate(self.spec.columns):
            if not columns.stacked and columns.parts[0].image:
                flat[i] = decode_images(flat[i], columns.parts[0].image, columns.parts[0].draft)
        flat = iter(flat)
        parts = tuple({k: next(flat) for k in s} if isinstance(s, dict) else next(flat) for s in self.spec.structure)
        if self.spec.map:
            mapped = self.spec.map(*parts, seeds)
            parts = mapped if isinstance(mapped, tuple) else (mapped,)
        return parts if len(parts) > 1 else parts[0]


def _of_rows(batch, rows: int):
    def sized(tensor):
        return tf.ensure_shape(tensor, [rows, *tensor.shape[1:]]) if isinstance(tensor, tf.Tensor) else tensor

    return tf.nest.map_structure(sized, batch)


def _lists(values: tf.Tensor, splits: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def _pad(ragged: tf.RaggedTensor, column, length: int | tf.Tensor) -> tf.Tensor:
    """Returns the lists padded to `length`, which is at least the longest length."""
    value = tf.cast(column.pad_value, ragged.dtype)
    if isinstance(length, int):
        return ragged.to_tensor(value, shape=[None, length])
    filled = ragged.to_tensor(value, shape=tf.stack([tf.constant(-1, length.dtype), length]))
    filled.set_shape([None, None])
    return filled


def decode_images(files: tf.Tensor, shape: tuple[int, int, int], draft: bool = False) -> tf.Tensor:
    """Decodes image files to pixels.

    Args:
        files: Contents of PNG, JPEG, GIF or BMP files: string, (rows,).
        shape: (height, width, channels). Images of another size are resized bilinearly, and rounded.
        draft: Whether large JPEG files are decoded at a smaller size first.

    Returns:
        uint8, (rows, height, width, channels).
    """
    height, width, channels = shape

    def decoded(file):
        return tf.io.decode_image(file, channels=channels, expand_animations=False)

    def drafted(file):
        times = tf.reduce_min(tf.image.extract_jpeg_shape(file)[:2] // [height, width])
        ways = [functools.partial(tf.io.decode_jpeg, file, channels=channels, ratio=ratio) for ratio in (1, 2, 4, 8)]
        return tf.switch_case(tf.reduce_sum(tf.cast(times >= [2, 4, 8], tf.int32)), ways)

    def decode_image(file):
        image = tf.cond(tf.io.is_jpeg(file), lambda: drafted(file), lambda: decoded(file)) if draft else decoded(file)
        image.set_shape([None, None, channels])
        fits = tf.reduce_all(tf.shape(image)[:2] == [height, width])

        def resized():
            return tf.cast(tf.round(tf.image.resize(image, [height, width])), tf.uint8)

        return tf.ensure_shape(tf.cond(fits, lambda: image, resized), shape)

    return tf.map_fn(decode_image, files, fn_output_signature=tf.TensorSpec(shape, tf.uint8))


def why_unreadable(data: bytes) -> str | None:
    """Returns why an image file cannot be decoded, or None. A JPEG is decoded at an eighth of its size."""
    try:
        if data[:2] == b"\xff\xd8":
            tf.io.decode_jpeg(data, ratio=8)
        else:
            tf.io.decode_image(data, expand_animations=False)
    except tf.errors.OpError as error:
        return one_line(error)
    return None


def shape_of_image(data: bytes) -> tuple[int, int, int]:
    """Returns the height, the width and the number of channels of an image file."""
    height, width, channels = tf.io.decode_image(data, expand_animations=False).shape
    return height, width, channels


def _tf_dtype(dtype: np.dtype) -> tf.DType:
    return tf.string if dtype.hasobject else tf.as_dtype(dtype)
