"""`raytf.read_tfrecords`: TFRecord files as a Ray Dataset. Files are indexed once; tasks parse them with TensorFlow.

The index has the offset and the length of each record. The files are divided by it into pieces of some MB. Each piece
is read independently, and has a known number of rows. This module needs no TensorFlow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from pyarrow import fs

from raytf import logs
from raytf.data.file_source import FilePart, FileSource, in_task, in_tasks
from raytf.data.files import Files, listed, retried
from raytf.data.records import FIRST_RECORDS, OTHER_FILES, OTHER_RECORDS, TYPES, Feature, Records, index, spread
from raytf.errors import ConfigError

logger = logs.get_logger(__name__)

# Bytes of all files up to which this process indexes them itself: local ones at a GiB a second and more, while a task
# of Ray takes seconds to start.
_INDEXED_BY_DRIVER, _INDEXED_BY_DRIVER_LOCAL = 256 << 20, 1 << 30


def read_tfrecords(
    paths: str | os.PathLike | Sequence,
    schema: Mapping[str, Any] | None = None,
    *,
    sequence_schema: Mapping[str, Any] | None = None,
    filesystem: fs.FileSystem | None = None,
) -> ray.data.Dataset:
    """Returns a Ray Dataset of TFRecord files, with a column for each feature, in the order of files and records.

    The files are indexed once, and parsed by TensorFlow in batches, only for the columns that are used. Trainers take
    the result like any other Ray Dataset: materialized or streamed, and shuffled as their arguments say.

    Args:
        paths: A path or URI of a file or folder, a pattern such as `data/*.tfrecord`, or a list of these. Of a folder
            or pattern with files that have "tfrecord" in their names, others are left out. Files may be compressed by
            gzip.
        schema: Feature spec, as of `tf.io.parse_example`: a dict of `tf.io.FixedLenFeature`, `VarLenFeature`,
            `RaggedFeature` or `FixedLenSequenceFeature`. Features of any length become lists, to be used with
            `raytf.Column(..., ragged=True)` or `pad=`; strings become bytes. By default it is inferred from the first
            records, and logged.
        sequence_schema: The same for the feature lists of `tf.train.SequenceExample` records; `schema` is then for
            their context.
        filesystem: A `pyarrow.fs.FileSystem`, on which the paths are. By default the URI names it.

    Returns:
        A `ray.data.Dataset`.

    Raises:
        ConfigError: There are no files, one is damaged, or the schema cannot be used. While rows are read, it is also
            raised for a record that does not fit the schema or is damaged. It then names file and record.

    Example:
        >>> import raytf, tensorflow as tf
        >>> with tf.io.TFRecordWriter("rows.tfrecord") as writer:
        ...     for i in range(3):
        ...         value = tf.train.Feature(int64_list=tf.train.Int64List(value=[i]))
        ...         row = tf.train.Example(features=tf.train.Features(feature={"x": value}))
        ...         writer.write(row.SerializeToString())
        >>> raytf.read_tfrecords("rows.tfrecord", {"x": tf.io.FixedLenFeature([], tf.int64)}).count()
        3
    """
    features = _features(schema, sequence_schema)
    files = listed(paths, filesystem, preferred="tfrecord")
    records = _index_all(files)
    if not records:
        raise ConfigError("TFRecord files must hold records", f"none in {len(files.paths)} file(s)", "Check the path")
    if features is None:
        features = in_task(_inferred, files.filesystem, _first_records(records))
        rows = sum(part.rows for part in records)
        logger.info(
            f"{rows:,} records in {len(files.paths)} TFRecord file(s), with the features of the first records: "
            f"{'; '.join(map(str, features))}"
        )
    return ray.data.read_datasource(RecordSource(files, records, features))


class RecordSource(FileSource):
    """Ray Data's view of TFRecord files.

    Args:
        files: All files.
        records: Their pieces.
        features: Their features.
    """

    def __init__(self, files: Files, records: Sequence[Records], features: Sequence[Feature]):
        pieces = [FilePart(part.path, part, part.stop - part.start, part.rows) for part in records]
        schema = pa.schema([(feature.name, feature.type) for feature in features])
        read = functools.partial(_read, {feature.name: feature for feature in features})
        super().__init__("TFRecord", files, pieces, schema, read)
        self.records, self.features = records, features
        self.is_local = files.is_local


def _read(features: Mapping, filesystem: fs.FileSystem, piece: Records, schema: pa.Schema) -> Iterator[pa.Table]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from raytf.data import examples

    yield from examples.read(filesystem, piece, [features[name] for name in schema.names])


def _inferred(filesystem: fs.FileSystem, pieces: Sequence[Records]) -> list[Feature]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from raytf.data import examples

    return examples.inferred(filesystem, pieces)


# ------------------------------------------------------------------------------------------ the index


def _index_all(files: Files) -> list[Records]:
    everything = list(zip(files.paths, files.sizes, strict=True))
    if sum(files.sizes) <= (_INDEXED_BY_DRIVER_LOCAL if files.is_local else _INDEXED_BY_DRIVER):
        return _indexed(files.filesystem, everything)
    parts = min(len(everything), 4 * int(ray.cluster_resources().get("CPU", 1)))
    calls = [(files.filesystem, everything[i::parts]) for i in range(parts)]
    indexed = [piece for pieces in in_tasks(_indexed, calls) for piece in pieces]
    order = {path: i for i, path in enumerate(files.paths)}
    return sorted(indexed, key=lambda piece: (order[piece.path], piece.start))


def _indexed(filesystem: fs.FileSystem, files: Sequence[tuple[str, int]]) -> list[Records]:
    return [piece for path, size in files for piece in retried(index, filesystem, path, size)]


def _first_records(pieces: Sequence[Records]) -> list[Records]:
    """Returns the records from which features are inferred, with fewer rows than the pieces."""
    starts = [piece for piece in pieces if not piece.first]
    others = starts[1:]
    chosen = spread(len(others), OTHER_FILES)
    looked_at = [(starts[0], FIRST_RECORDS), *((others[i], OTHER_RECORDS) for i in chosen)]
    return [replace(piece, rows=min(piece.rows, rows)) for piece, rows in looked_at]


# ------------------------------------------------------------------------------------------ schemas


def _features(schema: Mapping | None, sequence_schema: Mapping | None) -> list[Feature] | None:
    """Returns the features of feature specs, or None for none."""
    if schema is None and sequence_schema is None:
        return None
    features = []
    for role, spec in (("schema", schema or {}), ("sequence_schema", sequence_schema or {})):
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{role} must be a dict of features", repr(spec), 'Use {"x": tf.io.FixedLenFeature(...)}')
        features += [_feature(name, part, role == "sequence_schema") for name, part in spec.items()]
    names = [feature.name for feature in features]
    if not names or len(set(names)) < len(names):
        raise ConfigError("A schema must name features, each once", repr(names), "Correct schema or sequence_schema")
    return features


def _feature(name: str, spec: Any, sequence: bool) -> Feature:
    kind = type(spec).__name__
    dtype = getattr(getattr(spec, "dtype", None), "name", str(getattr(spec, "dtype", None)))
    known = ("VarLenFeature", "RaggedFeature", "FixedLenSequenceFeature", *(() if sequence else ("FixedLenFeature",)))
    if kind not in known or dtype not in TYPES or getattr(spec, "partitions", ()):
        raise ConfigError(
            f"A feature of {'sequence_schema' if sequence else 'schema'} must be one of {', '.join(known)} of tf.io, "
            "without partitions, of int64, float32 or string",
            f"{name!r}: {spec!r}",
            "Pass one of these, such as tf.io.FixedLenFeature([], tf.int64)",
        )
    key = getattr(spec, "value_key", None) or name
    if kind in ("VarLenFeature", "RaggedFeature"):
        return Feature(name, key, dtype, (), 1 + sequence, None, sequence)
    shape = spec.shape.as_list() if hasattr(spec.shape, "as_list") else np.atleast_1d(spec.shape).tolist()
    shape = tuple(int(size) for size in shape)
    default = np.asarray(spec.default_value).tolist() if spec.default_value is not None else None
    if kind == "FixedLenSequenceFeature":
        return Feature(name, key, dtype, shape, 1, spec.allow_missing, sequence)
    return Feature(name, key, dtype, shape, 0, default)
