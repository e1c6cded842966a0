"""TFRecord files: what the index finds, what records are parsed to, and the errors for bad ones. Without Ray."""

from __future__ import annotations

import gzip
import os

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import fs

import raytf
from raytf.data import examples, record_files, records, tfrecords
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column, Columns
from raytf.data.feed import Feed
from raytf.data.files import listed
from raytf.data.gather import RowLocations, source
from raytf.data.sampling import Sampling
from raytf.data.stored import StoredDataset
from raytf.runtime.topology import Shard

LOCAL = fs.LocalFileSystem()
IO = tf.io
SCHEMA = {
    "id": IO.FixedLenFeature([], tf.int64),
    "image": IO.FixedLenFeature([2, 3], tf.float32),
    "name": IO.FixedLenFeature([], tf.string),
    "tokens": IO.VarLenFeature(tf.int64),
    "weight": IO.FixedLenFeature([], tf.float32, 1.5),
    "pairs": IO.FixedLenSequenceFeature([2], tf.int64, allow_missing=True),
    "words": IO.RaggedFeature(tf.string, value_key="tags"),
}


def feature(values):
    values = np.asarray(values).ravel().tolist()
    if values and isinstance(values[0], str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode() for value in values]))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def example(**features):
    named = {name: feature(values) for name, values in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()


def row(i):
    more = {} if i % 3 else {"weight": float(i)}
    tags = {"tags": [f"t{j}" for j in range(i % 2)]} if i % 2 else {}
    return example(
        id=i, image=np.arange(6) + float(i), name=f"n{i}", tokens=range(i % 4), pairs=range(2 * (i % 3)), **more, **tags
    )


def write(path, rows, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for serialized in rows:
            writer.write(serialized)
    return str(path)


def read(path, schema=None, sequence=None, system=LOCAL):
    """The tables of a file's pieces, put together."""
    features = tfrecords._features(schema or SCHEMA, sequence)
    pieces = records.index(system, path, system.get_file_info(path).size)
    tables = [table for piece in pieces for table in examples.read(system, piece, features)]
    return pa.concat_tables(tables)


def check(table, rows):
    assert table["id"].to_pylist() == list(rows)
    assert table["name"].to_pylist() == [f"n{i}".encode() for i in rows]
    assert table["tokens"].to_pylist() == [list(range(i % 4)) for i in rows]
    assert table["weight"].to_pylist() == [1.5 if i % 3 else float(i) for i in rows]
    assert table["words"].to_pylist() == [[b"t0"] * (i % 2) for i in rows]
    assert table["pairs"].to_pylist() == [[[2 * j, 2 * j + 1] for j in range(i % 3)] for i in rows]
    places = RowLocations(np.zeros(len(table), int), np.arange(len(table)))
    (image,) = source([table.select(["image"]).combine_chunks()], Columns.from_spec("image", "features")).gather(places)
    np.testing.assert_array_equal(image, [np.arange(6).reshape(2, 3) + i for i in rows])
    values, lengths = source([table], Columns.from_spec(Column("tokens", ragged=True), "features")).gather(places)
    assert lengths.tolist() == [i % 4 for i in rows] and values.dtype == np.int64


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("piece_bytes", [200, 1 << 20])
def test_rows_are_those_that_were_written_in_pieces_of_any_size(tmp_path, monkeypatch, compression, piece_bytes):
    monkeypatch.setattr(records, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(examples, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(records, "_CHUNK", 100)
    path = write(tmp_path / "a.tfrecord", map(row, range(23)), compression)
    check(read(path), range(23))
    pieces = records.index(LOCAL, path, os.path.getsize(path))
    assert len(pieces) == 1 if compression or piece_bytes > 200 else len(pieces) > 5
    assert [piece.first for piece in pieces] == np.cumsum([0, *(piece.rows for piece in pieces[:-1])]).tolist()


def test_files_on_another_file_system(tmp_path):
    memory = fsspec.filesystem("memory")
    system = fs.PyFileSystem(fs.FSSpecHandler(memory))
    for i, compression in enumerate(["", "GZIP"]):
        path = write(tmp_path / f"{i}.tfrecord", map(row, range(5)), compression)
        memory.put(path, f"/records_of_test/{i}.tfrecord")
        check(read(f"/records_of_test/{i}.tfrecord", system=system), range(5))
    found = listed("memory://records_of_test/*.tfrecord")
    assert len(found.paths) == 2 and found.filesystem.equals(system)
    memory.rm("/records_of_test", recursive=True)


@pytest.mark.parametrize("shuffle, bucket", [pytest.param("window", False, marks=pytest.mark.slow), ("none", True)])
def test_workers_read_the_rows_of_any_other_dataset(tmp_path, monkeypatch, shuffle, bucket):
    """In the same batches, from any step on; a window has parts of several pieces, in any order."""
    monkeypatch.setattr(records, "PIECE_BYTES", 2000)
    monkeypatch.setattr(examples, "PIECE_BYTES", 700)
    files = listed(
        [write(tmp_path / f"{part}", map(row, range(part * 40, part * 40 + 40)), "GZIP" * part) for part in range(2)]
    )
    features = tuple(tfrecords._features(SCHEMA, None))
    pieces, names = tfrecords._index_all(files), [feature.name for feature in features]
    rows = [piece.rows for piece in pieces]
    stream = record_files.RecordStream(tuple(rows), names, pieces, features)
    blocks = record_files.RecordBlocks(pieces, rows, names, features)
    assert len(rows) == 4 and blocks.first().get()[0]["id"].to_pylist() == list(range(rows[0]))
    spec = BatchSpec.parsed({"x": "image", "t": Column("tokens", pad="batch", bucket=bucket)}, "id", "weight")
    sampling = Sampling(global_batch=7, seed=3, shuffle=shuffle, window=30)

    def batches(dataset, worker=0, workers=1, first=0):
        feed = Feed(dataset, spec, sampling, Shard(worker, workers))
        feed.set_epoch(1, first)
        return [tf.nest.flatten(batch) for batch in feed.dataset().as_numpy_iterator()]

    expected = batches(StoredDataset(blocks.get(), rows, names))
    shares = [batches(stream, worker, 3, 5) for worker in range(3)]
    assert len(expected) == 12 and len(shares[0]) == 7
    for step, parts in zip(expected[5:], zip(*shares, strict=True), strict=True):
        for whole, *found in zip(step, *parts, strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(found))
    for one, other in zip(expected, batches(blocks), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def steps(i):
    lists = {"frames": [feature([float(j), 0.5]) for j in range(i)], "tags": [feature(range(j)) for j in range(i)]}
    return tf.train.SequenceExample(
        context=tf.train.Features(feature={"id": feature(i)}),
        feature_lists=tf.train.FeatureLists(
            feature_list={name: tf.train.FeatureList(feature=values) for name, values in lists.items()}
        ),
    ).SerializeToString()


def test_sequences(tmp_path):
    path = write(tmp_path / "s.tfrecord", map(steps, range(1, 5)))
    context = {"id": IO.FixedLenFeature([], tf.int64)}
    sequence = {"frames": IO.FixedLenSequenceFeature([2], tf.float32), "tags": IO.VarLenFeature(tf.int64)}
    table = read(path, context, sequence)
    assert table["frames"].to_pylist() == [[[float(j), 0.5] for j in range(i)] for i in range(1, 5)]
    assert table["tags"].to_pylist() == [[list(range(j)) for j in range(i)] for i in range(1, 5)]
    inferred = examples.inferred(LOCAL, records.index(LOCAL, path, os.path.getsize(path)))
    assert {str(f) for f in inferred} == {"id int64", "frames float32 (any, 2)", "tags int64 (any, any)"}


def inferred(*paths):
    pieces = [piece for path in paths for piece in records.index(LOCAL, path, os.path.getsize(path))]
    return [str(feature) for feature in examples.inferred(LOCAL, tfrecords._first_records(pieces))]


def test_features_are_inferred(tmp_path):
    path = write(tmp_path / "a", map(row, range(20)))
    assert inferred(path) == [
        *("id int64", "image float32 (6)", "name string", "pairs int64 (any)", "tags string (any)"),
        *("tokens int64 (any)", "weight float32 (any)"),
    ]


def test_files_that_differ(tmp_path):
    one, other = write(tmp_path / "a", [example(x=1, y=1.0)]), write(tmp_path / "b", [example(x=1)])
    with pytest.raises(raytf.ConfigError, match="same features.*'y' in '.*a' and not in '.*b'"):
        inferred(one, other)
    with pytest.raises(raytf.ConfigError, match="one type.*'x' is int64 in record 0 of '.*a' and float32 in record 0"):
        inferred(one, write(tmp_path / "c", [example(x=1.0, y=1.0)]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"id": [1, 2]}, "record 7 of '.*a': .*id"),
        ({"id": "x"}, "record 7 of '.*a': .*id"),
        ({"image": [1.0]}, "record 7 of '.*a': .*image"),
        ({"pairs": [1]}, "record 7 of '.*a': .*'pairs' must have a multiple of 2"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [300, 1 << 20])
def test_a_record_that_does_not_fit_is_named(tmp_path, monkeypatch, change, message, piece_bytes):
    monkeypatch.setattr(records, "PIECE_BYTES", piece_bytes)
    good = {"id": 1, "image": np.zeros(6), "name": "n", "tokens": [1], "pairs": [1, 2]}
    rows = [example(**good)] * 7 + [example(**{**good, **change})] + [example(**good)] * 3
    with pytest.raises(raytf.ConfigError, match=f"must fit the schema.*{message}"):
        read(write(tmp_path / "a", rows))


def changed(path, at, byte=None):
    """Writes a byte, or cuts the file off."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.truncate() if byte is None else file.write(bytes([byte]))
    return path


def test_damaged_files(tmp_path):
    def whole():
        return write(tmp_path / "a", map(row, range(9)))

    starts = [0, *np.cumsum([len(row(i)) + 16 for i in range(9)]).tolist()]
    with pytest.raises(raytf.ConfigError, match="checksums say; received: record 4 of '.*a'"):
        read(changed(whole(), starts[4] + 20, 255))
    with pytest.raises(raytf.ConfigError, match=f"whose record 4 is damaged .byte {starts[4]}"):
        read(changed(whole(), starts[4], 255))
    with pytest.raises(raytf.ConfigError, match="whose record 8 is cut off"):
        read(changed(whole(), starts[9] - 1))
    with pytest.raises(raytf.ConfigError, match="whose record 4 is cut off"):
        read(changed(whole(), starts[4] + 5))
    (tmp_path / "b").write_text("Not at all records.")
    with pytest.raises(raytf.ConfigError, match="whose first bytes are no record"):
        read(str(tmp_path / "b"))
    zipped = write(tmp_path / "z", map(row, range(90)), "GZIP")
    with pytest.raises(raytf.ConfigError, match="which gzip cannot read"):
        read(changed(zipped, os.path.getsize(zipped) - 20))
    zipped = write(tmp_path / "z", map(row, range(90)), "GZIP")
    with pytest.raises(raytf.ConfigError, match="which gzip cannot read .Error -3"):
        read(changed(zipped, 10, 255))
    for content in (b"Nor are these.", b"\xff" * 40):
        with gzip.open(tmp_path / "g", "wb") as file:
            file.write(content)
        with pytest.raises(raytf.ConfigError, match="whose first bytes are no record"):
            read(str(tmp_path / "g"))
    path = whole()
    lost = records.Records(str(tmp_path / "lost"), 0, 100, 0, 9, "")
    with pytest.raises(raytf.ConfigError, match="path that all nodes see.*lost"):
        list(examples.read(LOCAL, lost, tfrecords._features(SCHEMA, None)))
    (piece,) = records.index(LOCAL, path, os.path.getsize(path))
    changed(path, starts[4])
    with pytest.raises(raytf.ConfigError, match="with 4 of 9 records"):
        list(examples.read(LOCAL, piece, tfrecords._features(SCHEMA, None)))


def test_a_short_record_whose_length_begins_as_a_gzip_file_does(tmp_path):
    path = write(tmp_path / "a", [b"x" * 0x8B1F, b"y"])
    assert (tmp_path / "a").read_bytes()[:2] == b"\x1f\x8b"
    assert [piece.compression for piece in records.index(LOCAL, path, os.path.getsize(path))] == [""]


@pytest.mark.parametrize(
    "schema, sequence, message",
    [
        ({"x": tf.io.SparseFeature("i", "v", tf.int64, 3)}, None, "must be one of .*SparseFeature"),
        ({"x": 1}, None, "must be one of"),
        ([1], None, "schema must be a dict"),
        ({}, None, "must name features"),
        ({"x": IO.FixedLenFeature([], tf.int32)}, None, "int64, float32 or string"),
        ({"x": IO.VarLenFeature(tf.int64)}, {"x": IO.VarLenFeature(tf.int64)}, "each once"),
        (None, {"x": IO.FixedLenFeature([], tf.int64)}, "sequence_schema must be one of"),
    ],
)
def test_schemas_that_are_refused(schema, sequence, message):
    with pytest.raises(raytf.ConfigError, match=message):
        tfrecords._features(schema, sequence)


def test_files_that_are_named_are_read_whatever_their_names(tmp_path, monkeypatch):
    """Of a folder with TFRecord files others are left out, and only of that one."""
    monkeypatch.setattr(tfrecords.ray.data, "read_datasource", lambda source: source)
    for name in ("plain/1", "plain/2", "mixed/a.TFRecord", "mixed/notes.txt", "b.rec"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [row(0)])

    def names(*paths):
        found = tfrecords.read_tfrecords([f"{tmp_path}/{path}" for path in paths], SCHEMA).records
        return [os.path.relpath(part.path, tmp_path) for part in found]

    assert names("mixed", "b.rec", "plain") == ["mixed/a.TFRecord", "b.rec", "plain/1", "plain/2"]
    assert names("mixed/*", "plain/*1", "mixed/notes.txt") == ["mixed/a.TFRecord", "plain/1", "mixed/notes.txt"]


def test_files_are_listed_in_order(tmp_path, monkeypatch):
    for name in ("b/2.csv", "b/10.csv", "a.csv", "a.txt", ".hidden/a.csv", "_more/a.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(*paths):
        return [os.path.relpath(path, tmp_path) for path in listed(list(paths)).paths]

    root = str(tmp_path)
    assert names(root) == ["a.csv", "a.txt", "b/10.csv", "b/2.csv"]
    assert names(f"{root}/b/2.csv", f"{root}/a.txt") == ["b/2.csv", "a.txt"]
    assert names(f"{root}/*.csv") == ["a.csv"] and names(f"file://{root}/b") == ["b/10.csv", "b/2.csv"]
    assert names(f"{root}/**/2.csv", f"{root}/b/1*") == ["b/2.csv", "b/10.csv"]
    monkeypatch.chdir(tmp_path)
    assert names("*/2.csv") == names("b/2*") == ["b/2.csv"]
    for wrong, message in (
        ([], "named by a path"),
        (3, "named by a path"),
        ("nowhere", "exists; received: 'nowhere'"),
        ("*.parquet", "a file to read"),
        ("no-such-thing://x", "known file system"),
    ):
        with pytest.raises(raytf.ConfigError, match=message):
            listed(wrong)
