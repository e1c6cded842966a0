"""Rows a second from a Ray Dataset into the training step, one worker: raytf, Ray's `to_tf`, and pyarrow alone.

python jobs/benchmarks/feed.py             # data in the object store; every way in turn, medians

"to_tf" is `Dataset.to_tf` as a Ray Train loop calls it, and with its shuffle buffer. Both end, as raytf does, in the
same counting `tf.data` reduction in TensorFlow's graph, as `fit` takes batches. "pyarrow" hands out the same batches as
NumPy arrays and does nothing with them: out of Parquet in the page cache, with images as binary of a fixed size, which
it reads fastest; or cut from the blocks in memory, each copied, as its memory is not TensorFlow's to keep.

TFRecord: `raytf.read_tfrecords` with its index and a first epoch; a later epoch; and one out of the object store, with
`materialize=True`. Against `TFRecordDataset` with `parse_example` of batches, in parallel, each in the files' order and
shuffled; and against `ray.data.read_tfrecords` with `to_tf`.
"""

from __future__ import annotations

import sys
import time

import common

SIZES = {"columns": 1_000_000, "images": 200_000, "tokens": 200_000}
# a way that is slow gets fewer rows
TO_TF_ROWS = {("columns", 64): 50_000, ("columns", 1024): 500_000, ("images", 32): 50_000, ("images", 128): 100_000}
TO_TF_ROWS[("tokens", 128)] = 10_000
CASES = [("columns", 64), ("columns", 1024), ("images", 32), ("images", 128), ("tokens", 128)]
WAYS = ("pyarrow, memory", "pyarrow, Parquet", "to_tf", "to_tf shuffled", "raytf unshuffled", "raytf")
BARS = {("columns", 64): 10, ("columns", 1024): 15, ("images", 32): 12, ("images", 128): 7, ("tokens", 128): 50}
RATIOS = [("raytf", "to_tf"), ("raytf", "to_tf shuffled"), ("raytf unshuffled", "to_tf")]
RATIOS += [("raytf unshuffled", "pyarrow, Parquet"), ("raytf unshuffled", "pyarrow, memory")]
BLOCK_ROWS = 50_000
RECORD_FILES = {"numbers": 8, "bytes": 8}  # of BLOCK_ROWS each: 32 floats, or 784 bytes; and a label
RAY_ROWS = 10_000
BUFFER_ROWS = 16_384  # of the shuffle buffers of `tf.data` and `to_tf`
IN_ORDER = ("raytf unshuffled, first epoch", "raytf unshuffled, later")
SHUFFLED = ("raytf, first epoch", "raytf, later", "raytf, materialized")
RECORD_WAYS = ("tf.data", *IN_ORDER, "tf.data shuffled", *SHUFFLED, "Ray to_tf")
RECORD_RATIOS = [(way, "tf.data") for way in IN_ORDER] + [(way, "tf.data shuffled") for way in SHUFFLED]
RECORD_RATIOS += [("raytf unshuffled, first epoch", "Ray to_tf")]


def tables(kind: str, rows: int) -> list:
    """Arrow tables of a kind, in blocks."""
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(0)
    made = []
    for start in range(0, rows, BLOCK_ROWS):
        n = min(BLOCK_ROWS, rows - start)
        label = pa.array(rng.integers(0, 10, n))
        if kind == "columns":
            columns = {f"x{i}": rng.normal(size=n).astype("float32") for i in range(32)}
        elif kind == "images":
            pixels = rng.integers(0, 255, (n, 28, 28), dtype=np.uint8)
            columns = {"image": pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)}
        else:
            lengths = rng.integers(16, 257, n)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            values = rng.integers(0, 30_000, offsets[-1], dtype=np.int32)
            columns = {"tokens": pa.ListArray.from_arrays(offsets, values)}
        made.append(pa.table({**columns, "label": label}))
    return made


def _features(kind: str):
    import raytf

    if kind == "columns":
        return [f"x{i}" for i in range(32)]
    return "image" if kind == "images" else raytf.Column("tokens", ragged=True)


def _pyarrow(dataset, kind: str, batch: int):
    import ray

    count = 0
    for bundle in dataset.iter_internal_ref_bundles():
        for ref in bundle.block_refs:
            for part in ray.get(ref).to_batches(max_chunksize=batch):
                for column in part.columns:
                    if kind == "tokens" and hasattr(column, "offsets"):
                        start, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
                        column.values[start:stop].to_numpy().copy(), column.offsets.to_numpy().copy()
                    elif hasattr(column, "to_numpy_ndarray"):
                        column.to_numpy_ndarray().copy()
                    else:
                        column.to_numpy().copy()
                count += part.num_rows
    return count


def _write(path: str, tables: list, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "images":
        fixed = [table["image"].combine_chunks().storage.flatten() for table in tables]
        fixed = [
            pa.FixedSizeBinaryArray.from_buffers(pa.binary(784), len(a) // 784, [None, a.buffers()[1]]) for a in fixed
        ]
        tables = [pa.table({"image": a, "label": t["label"]}) for a, t in zip(fixed, tables, strict=True)]
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def _parquet(path: str, batch: int) -> int:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 0
    for part in pq.ParquetFile(path).iter_batches(batch_size=batch):
        for column in part.columns:
            if isinstance(column, pa.ListArray):
                column.flatten().to_numpy(), column.offsets.to_numpy()
            elif isinstance(column, pa.FixedSizeBinaryArray):
                np.frombuffer(column.buffers()[1], np.uint8)
            else:
                column.to_numpy()
        count += part.num_rows
    return count


def _to_tf(dataset, kind: str, batch: int, shuffled: bool):
    import tensorflow as tf

    features = {"columns": [f"x{i}" for i in range(32)], "images": "image", "tokens": "tokens"}[kind]
    options = {}
    if kind == "images":  # its own inference does not know Arrow's tensors
        options["feature_type_spec"] = tf.TensorSpec((None, 28, 28), tf.uint8)
        options["label_type_spec"] = tf.TensorSpec((None,), tf.int64)
    if shuffled:
        options |= {"local_shuffle_buffer_size": BUFFER_ROWS, "local_shuffle_seed": 0}
    return common.count_rows(dataset.to_tf(features, "label", batch_size=batch, **options))


def _raytf(blocks, kind: str, batch: int, shuffle: str):
    from raytf.data.feed import Feed
    from raytf.data.sampling import Sampling

    feed = Feed(blocks, _spec(kind), Sampling(global_batch=batch, shuffle=shuffle))
    return feed.dataset


def _spec(kind: str):
    from raytf.data.batch_spec import BatchSpec

    return BatchSpec.parsed(_features(kind), "label")


def once(kind: str, batch: str, repeats: str, scale: str, address: str, ways: str) -> None:
    """Some ways on one kind of data, in a process of its own."""
    import os
    import tempfile

    import ray

    from raytf.data import stored

    batch, repeats = int(batch), int(repeats)
    common.connect(address)
    rows = int(SIZES[kind] * float(scale))
    made = tables(kind, rows)
    whole = ray.data.from_arrow(made).materialize()
    few = ray.data.from_arrow(tables(kind, int(TO_TF_ROWS[kind, batch] * float(scale)))).materialize()
    folder = tempfile.TemporaryDirectory(prefix="raytf_feed_")
    path = os.path.join(folder.name, "rows.parquet")
    _write(path, made, kind)
    del made
    blocks = stored.read(whole, _spec(kind).roles)
    ready = {
        way: _raytf(blocks, kind, batch, shuffle) for way, shuffle in (("raytf unshuffled", "none"), ("raytf", "full"))
    }
    runs = {
        "pyarrow, memory": lambda: _pyarrow(whole, kind, batch),
        "pyarrow, Parquet": lambda: _parquet(path, batch),
        "to_tf": lambda: _to_tf(few, kind, batch, False),
        "to_tf shuffled": lambda: _to_tf(few, kind, batch, True),
        "raytf unshuffled": lambda: common.count_rows(ready["raytf unshuffled"]()),
        "raytf": lambda: common.count_rows(ready["raytf"]()),
    }
    runs = {way: run for way, run in runs.items() if way in ways.split(";")}
    _measure(f"{kind} {batch}", runs, repeats)
    folder.cleanup()


def _write_records(folder: str, kind: str, rows: int) -> list[str]:
    """Files that are copies of one, as writing takes longer than reading."""
    import os
    import shutil

    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(0)
    first = os.path.join(folder, "0.tfrecord")
    with tf.io.TFRecordWriter(first) as writer:
        for i in range(rows):
            if kind == "numbers":
                x = tf.train.Feature(float_list=tf.train.FloatList(value=rng.random(32)))
            else:
                x = tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(784)]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 10]))
            features = tf.train.Features(feature={"x": x, "label": label})
            writer.write(tf.train.Example(features=features).SerializeToString())
    paths = [first, *(os.path.join(folder, f"{i}.tfrecord") for i in range(1, RECORD_FILES[kind]))]
    for path in paths[1:]:
        shutil.copy(first, path)
    return paths


def once_records(kind: str, batch: str, repeats: str, scale: str, address: str) -> None:
    """Every way of reading TFRecord files, in a process of its own."""
    import os
    import tempfile

    import ray
    import tensorflow as tf
    from ray.train import ScalingConfig

    import raytf
    from raytf.data import ingest
    from raytf.data.batch_spec import BatchSpec
    from raytf.data.feed import Feed
    from raytf.data.sampling import Sampling

    batch, repeats = int(batch), int(repeats)
    common.connect(address)
    folder = tempfile.TemporaryDirectory(prefix="raytf_records_")
    paths = _write_records(folder.name, kind, int(BLOCK_ROWS * float(scale)))
    x = tf.io.FixedLenFeature([32], tf.float32) if kind == "numbers" else tf.io.FixedLenFeature([], tf.string)
    schema = {"x": x, "label": tf.io.FixedLenFeature([], tf.int64)}
    spec = BatchSpec.parsed("x", "label")

    def plain(shuffled: bool):
        data = tf.data.TFRecordDataset(paths)
        data = (data.shuffle(BUFFER_ROWS) if shuffled else data).batch(batch)
        data = data.map(lambda rows: tf.io.parse_example(rows, schema), num_parallel_calls=tf.data.AUTOTUNE)
        return common.count_rows(data.map(lambda row: (row["x"], row["label"])).prefetch(tf.data.AUTOTUNE))

    few = os.path.join(folder.name, "few")  # Ray's reader is slow
    os.mkdir(few)
    small = _write_records(few, kind, int(RAY_ROWS * float(scale)))[:1]

    def rays():
        return common.count_rows(ray.data.read_tfrecords(small).to_tf("x", "label", batch_size=batch))

    def feed(shuffle: str, materialize: bool | str = "auto"):
        data = {"train": raytf.read_tfrecords(paths, schema)}
        read = ingest.read_all(data, materialize, ScalingConfig(num_workers=1), spec.roles)
        return Feed(read["train"], spec, Sampling(global_batch=batch, shuffle=shuffle))

    in_order, shuffled, materialized = feed("none"), feed("window"), feed("window", True)
    ways = (
        lambda: plain(False),
        lambda: common.count_rows(feed("none").dataset()),
        lambda: common.count_rows(in_order.dataset()),
        lambda: plain(True),
        lambda: common.count_rows(feed("window").dataset()),
        lambda: common.count_rows(shuffled.dataset()),
        lambda: common.count_rows(materialized.dataset()),
        rays,
    )
    runs = dict(zip(RECORD_WAYS, ways, strict=True))
    _measure(f"TFRecord {kind} {batch}", runs, repeats)
    folder.cleanup()


def _measure(title: str, runs: dict, repeats: int) -> None:
    """Prints rows a second of each way, in turn."""
    found = {way: [] for way in runs}
    for repeat in range(repeats + 1):
        for way, run in runs.items():
            began = time.perf_counter()
            count = run()
            print(f"{title} {way}: {count} rows in {time.perf_counter() - began:.2f} s", file=sys.stderr)
            if repeat:  # the first warms up
                found[way].append(count / (time.perf_counter() - began))
    common.give(found)


def _ratio(middle: dict, way: str, other: str) -> str:
    return f"{middle[way] / middle[other]:.2f}x" if way in middle and other in middle else ""


def main(arguments=None):
    from raytf.runtime.allocator import allocator

    parser = common.parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--only-tfrecord", action="store_true", help="leave out what is not of TFRecord files")
    options = parser.parse_args(arguments)
    repeats, scale = (1, 0.05) if options.smoke else (options.repeats, 1)
    figures, rows = {}, []
    with common.ray_cluster(store_bytes=3 << 30) as address:
        for kind, batch in () if options.only_tfrecord else CASES:
            arguments = (kind, str(batch), str(repeats), str(scale), address, ";".join(options.ways))
            # the allocator as on raytf's workers, for all ways
            found = common.measure(__file__, "--once", *arguments, environment=allocator(1))
            figures[f"{kind} {batch}"] = found
            middle = {way: common.spread(rates)[0] for way, rates in found.items()}
            rows.append(
                [
                    f"{kind}, {batch}",
                    *(f"{middle[way] / 1000:,.0f}" if way in middle else "" for way in WAYS),
                    *(_ratio(middle, *pair) for pair in RATIOS),
                    f"{BARS[kind, batch]}x",
                ]
            )
    ratios = [*(f"{way} / {other}" for way, other in RATIOS), "bar of to_tf"]
    title = f"Feed: 1000 rows/s into the step, median of {repeats}"
    shown = common.table(title, ["rows, batch", *WAYS, *ratios], rows) + "\n" if rows else ""
    shown += _records(options, repeats, scale, figures)
    common.finish(options, "feed", shown, figures)


def _records(options, repeats: int, scale: float, figures: dict) -> str:
    """Measures TFRecord files, and returns their table."""
    from raytf.runtime.allocator import allocator

    rows = []
    with common.ray_cluster(store_bytes=3 << 30) as address:
        for kind in RECORD_FILES:
            arguments = ("--records", kind, "128", str(repeats), str(scale), address)
            found = figures[f"TFRecord {kind} 128"] = common.measure(__file__, *arguments, environment=allocator(1))
            middle = {way: common.spread(rates)[0] for way, rates in found.items()}
            rows.append(
                [
                    f"{kind}, 128",
                    *(f"{middle[way] / 1000:,.1f}" for way in RECORD_WAYS),
                    *(_ratio(middle, *pair) for pair in RECORD_RATIOS),
                ]
            )
    ratios = [f"{way} / {other}" for way, other in RECORD_RATIOS]
    title = f"TFRecord: 1000 rows/s into the step, median of {repeats}"
    return common.table(title, ["rows, batch", *RECORD_WAYS, *ratios], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:8])
    elif sys.argv[1:2] == ["--records"]:
        once_records(*sys.argv[2:7])
    else:
        main()
