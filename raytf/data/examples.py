"""Parses records of TFRecord files with TensorFlow, in batches, to Arrow tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import tensorflow as tf
from google.protobuf.message import DecodeError
from pyarrow import fs

from raytf.data.records import PIECE_BYTES, Feature, Records
from raytf.errors import ConfigError, one_line

_KINDS = {"int64_list": "int64", "float_list": "float32", "bytes_list": "string"}
_BUFFER = 1 << 20  # bytes that are read of a file at once
_FIX = "Correct the record, or pass read_tfrecords a schema that it fits"


class RecordReader:
    """Reads and parses records of files, fastest in their order: a part of a piece is read from its start.

    Args:
        filesystem: File system of the files. Of one that is not local it has a copy of a piece in memory.
    """

    def __init__(self, filesystem: fs.FileSystem):
        self._filesystem, self._copy = filesystem, ""
        self._piece: Records | None = None

    def is_at(self, piece: Records) -> bool:
        """Returns whether it has read a part of this piece last, so the next part takes no more than itself."""
        return self._piece is piece

    def table(self, piece: Records, features: Sequence[Feature], rows: np.ndarray) -> pa.Table:
        """Returns the table of some rows of a piece, in ascending order.

        Raises:
            ConfigError: A record of the piece does not fit the features, or is damaged.
        """
        try:
            return parse(self.serialized(piece, rows), features)
        except (tf.errors.OpError, ValueError) as error:
            raise self._refused(piece, features, error) from None

    def serialized(self, piece: Records, rows: np.ndarray) -> tf.Tensor:
        """Returns records of a piece in ascending order: string, (rows,)."""
        size = block_rows(piece)
        parts = []
        for number in range(rows[0] // size, rows[-1] // size + 1):
            few = rows[slice(*np.searchsorted(rows, [number * size, (number + 1) * size]))] - number * size
            if not len(few):
                continue
            block, first, last = self._block(piece, number), int(few[0]), int(few[-1])
            # a slice copies no record
            parts.append(block[first : last + 1] if last - first == len(few) - 1 else tf.gather(block, few))
        return parts[0] if len(parts) == 1 else tf.concat(parts, 0)

    def _block(self, piece: Records, number: int) -> tf.Tensor:
        """Returns the records of block `number` of a piece."""
        size = block_rows(piece)
        if piece is not self._piece or number < self._number:
            self._piece, self._number, self._blocks = piece, -1, iter(self._records(piece).batch(size))
        while self._number < number:
            self._last, self._number = next(self._blocks, ()), self._number + 1
            record_count = self._number * size + len(self._last)
            if record_count < min(piece.rows, (self._number + 1) * size):
                self._piece = None
                raise ConfigError(
                    "Files must stay as they were when read_tfrecords has indexed them",
                    f"{piece.path!r} with {record_count} of {piece.rows} records",
                    "Call read_tfrecords again",
                )
        return self._last

    def _records(self, piece: Records) -> tf.data.Dataset:
        """Returns a dataset of the serialized records, without tf.data's tuning, which costs more than it gains."""
        path, start = piece.path, piece.start
        if not isinstance(self._filesystem, fs.LocalFileSystem):
            self.close()
            path, start = self._copied(piece), 0
        # the class of tf.data has no argument for the offset
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type=piece.compression, buffer_size=_BUFFER, byte_offsets=[start]
        )
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        return records.take(piece.rows).with_options(options)

    def _copied(self, piece: Records) -> str:
        """Copies a piece into TensorFlow's file system in memory, and returns its path there."""
        with self._filesystem.open_input_file(piece.path) as file:
            data = file.read() if piece.compression else file.read_at(piece.stop - piece.start, piece.start)
        self._copy = f"ram://raytf-records-{id(self)}"
        with tf.io.gfile.GFile(self._copy, "wb") as copy:
            copy.write(data)
        return self._copy

    def close(self) -> None:
        """Removes the copy."""
        if self._copy:
            tf.io.gfile.remove(self._copy)
            self._piece, self._copy = None, ""

    def _refused(self, piece: Records, features: Sequence[Feature], error: Exception) -> ConfigError:
        """Returns the error of the first record of a piece that cannot be read or parsed."""
        if isinstance(error, tf.errors.NotFoundError):
            return ConfigError(
                "TFRecord files must be on a path that all nodes see",
                one_line(error),
                "Use shared storage, or the URI of an object store",
            )
        iterator = iter(self._records(piece))
        for number in range(piece.first, piece.first + piece.rows):
            try:
                parse(tf.expand_dims(next(iterator), 0), features)
            except tf.errors.DataLossError as damage:
                return ConfigError(
                    "Records must be whole, as their checksums say",
                    f"record {number} of {piece.path!r} ({one_line(damage)})",
                    "Write the file again, or leave it out",
                )
            except (tf.errors.OpError, ValueError) as misfit:
                return ConfigError(
                    "Records must fit the schema", f"record {number} of {piece.path!r}: {one_line(misfit)}", _FIX
                )
            except StopIteration:
                break
        return ConfigError("Records must fit the schema", f"{piece.path!r}: {one_line(error)}", _FIX)


def block_rows(piece: Records) -> int:
    """Returns how many records of a piece are read at once, of about `PIECE_BYTES`: a compressed file is one piece."""
    return max(1, piece.rows * PIECE_BYTES // max(1, piece.stop - piece.start))


def read(filesystem: fs.FileSystem, piece: Records, features: Sequence[Feature]) -> Iterator[pa.Table]:
    """Yields tables of a piece's rows, as `RecordReader.table`."""
    with contextlib.closing(RecordReader(filesystem)) as reader:
        size = block_rows(piece)
        for first in range(0, piece.rows, size):
            yield reader.table(piece, features, np.arange(first, min(piece.rows, first + size)))


# ------------------------------------------------------------------------------------------ parsing


def parse(serialized: tf.Tensor, features: Sequence[Feature]) -> pa.Table:
    """Returns the table of serialized records.

    Raises:
        ValueError: A record does not fit the features, or TensorFlow's error.
    """
    context = {f.name: _spec(f) for f in features if not f.sequence}
    steps = {f.name: _spec(f) for f in features if f.sequence}
    if steps:
        tensors, of_steps, lengths = tf.io.parse_sequence_example(serialized, context or None, steps)
        tensors = {**tensors, **of_steps}
    else:
        tensors, lengths = tf.io.parse_example(serialized, context), {}
    columns = [_column(tensors[f.name], f, lengths.get(f.name)) for f in features]
    return pa.Table.from_arrays(columns, schema=pa.schema([(f.name, f.type) for f in features]))


def _spec(feature: Feature):
    dtype = tf.as_dtype(feature.dtype)
    if feature.sequence and feature.lists == 1:
        return tf.io.FixedLenSequenceFeature(feature.shape, dtype, allow_missing=bool(feature.default))
    if feature.lists:
        return tf.io.RaggedFeature(dtype, value_key=feature.key, row_splits_dtype=tf.int32)
    return tf.io.FixedLenFeature(feature.shape, dtype, feature.default)


def _column(value, feature: Feature, lengths) -> pa.Array:
    if isinstance(value, tf.RaggedTensor):
        values, splits = value.flat_values, [part.numpy() for part in value.nested_row_splits]
        if feature.shape:
            size = int(np.prod(feature.shape))
            if np.any(splits[-1] % size):
                raise ValueError(f"{feature.name!r} must have a multiple of {size} values")
            splits[-1] //= size
    elif lengths is not None:  # padded to the longest list
        few = lengths.numpy().astype(np.int32)
        values = tf.boolean_mask(value, np.arange(value.shape[1]) < few[:, None])
        splits = [np.concatenate([[0], np.cumsum(few)]).astype(np.int32)]
    else:
        values, splits = value, []
    if feature.dtype != "string":
        values = np.asarray(memoryview(values))  # `numpy()` copies
    if feature.is_tensor:
        return pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    array = _binary(values) if feature.dtype == "string" else pa.array(values.reshape(-1))
    for size in reversed(feature.shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    for offsets in reversed(splits):
        array = pa.ListArray.from_arrays(offsets, array)
    return array


def _binary(strings: tf.Tensor) -> pa.Array:
    """Returns strings as they are in Arrow: their bytes, one after another."""
    lengths = tf.strings.length(strings).numpy().ravel()
    if len(lengths) and lengths[0] and (lengths == lengths[0]).all():
        data = tf.io.decode_raw(strings, tf.uint8)  # one copy, without a Python object for each
    else:
        data = b"".join(strings.numpy().ravel())  # tf.strings.reduce_join takes up to eight times as long
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


# ------------------------------------------------------------------------------------------ inference


def inferred(filesystem: fs.FileSystem, pieces: Sequence[Records]) -> list[Feature]:
    """Returns the features that the records have: one value, as many as all have, or a list of any length.

    Raises:
        ConfigError: Files have other features or types, or their records are no `tf.train.Example`.
    """
    seen: dict[tuple[bool, str], dict[str, set]] = {}
    present: dict[str, list[set]] = {}
    with contextlib.closing(RecordReader(filesystem)) as reader:
        for piece in pieces:
            for i, record in enumerate(reader.serialized(piece, np.arange(piece.rows)).numpy()):
                location = f"record {piece.first + i} of {piece.path!r}"
                try:
                    example = tf.train.SequenceExample.FromString(record)
                except DecodeError as error:
                    raise ConfigError("Records must be of tf.train.Example", location, "Use raytf.TFData") from error
                present.setdefault(piece.path, []).append(_record_features(example, location, seen))
    _check_alike(present)
    if not seen:
        raise ConfigError("Records must have features", f"none in {next(iter(present))!r}", "Use raytf.TFData")
    names = set.union(*(keys for rows in present.values() for keys in rows))
    always = {key for key in names if all(key in keys for rows in present.values() for keys in rows)}
    return [_guess(key, sequence, observed, key in always) for (sequence, key), observed in sorted(seen.items())]


def _record_features(example, location: str, seen: dict) -> set:
    """Notes types and lengths of a record's features, and returns their keys."""
    parts = [(False, key, [feature]) for key, feature in example.context.feature.items()]
    parts += [(True, key, list(steps.feature)) for key, steps in example.feature_lists.feature_list.items()]
    keys = set()
    for sequence, key, values in parts:
        observed = seen.setdefault((sequence, key), {"kinds": {}, "sizes": set()})
        for feature in values:
            kind = feature.WhichOneof("kind")
            if kind is None:
                continue
            observed["kinds"].setdefault(_KINDS[kind], location)
            observed["sizes"].add(len(getattr(feature, kind).value))
            keys.add(key)
        if len(observed["kinds"]) > 1:
            (kind_a, first), (kind_b, second) = observed["kinds"].items()
            raise ConfigError(
                "A feature must have one type in all files",
                f"{key!r} is {kind_a} in {first} and {kind_b} in {second}",
                "Write the files alike, or leave some out",
            )
    return keys


def _check_alike(present: dict[str, list[set]]) -> None:
    """Raises ConfigError for a feature that all records of one file have, and none of another."""
    for path, rows in present.items():
        for other, others in present.items():
            missing = set.intersection(*rows) - set.union(*others)
            if missing:
                raise ConfigError(
                    "All files must have the same features, unless a schema defines what is optional",
                    f"{', '.join(map(repr, sorted(missing)))} in {path!r} and not in {other!r}",
                    "Pass schema= with a default_value, or leave files out",
                )


def _guess(key: str, sequence: bool, observed: dict, always: bool) -> Feature:
    dtype = next(iter(observed["kinds"]), "float32")
    size = next(iter(observed["sizes"])) if len(observed["sizes"]) == 1 else None
    shape = () if size in (None, 0, 1) else (size,)
    if sequence:
        return Feature(key, key, dtype, shape if size else (), 1 if size else 2, not always, True)
    return Feature(key, key, dtype, shape if always and size else (), 0 if always and size else 1)
