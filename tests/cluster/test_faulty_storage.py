"""Data and checkpoints on an S3 storage that answers 503, is slow, or cuts connections: moto's server, with faults."""

from __future__ import annotations

import itertools
import pathlib
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import tensorflow as tf
from ray.train import ScalingConfig

import raytf
from raytf.data import ingest, streamed
from raytf.data.batch_spec import BatchSpec
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from tests.cluster.test_trainer import trainer
from tests.unit import object_store
from tests.unit.object_store import BUCKET, CUT
from tests.unit.test_tfrecords import example, write

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
ROWS = 4000


@pytest.fixture
def storage():
    with object_store.serving() as made:
        yield made


def every(nth, fault, methods=("GET",)):
    """Every n-th request of some kinds has a fault: a status line, or seconds to wait."""
    count = itertools.count(1)

    def chosen(environ):
        if environ["REQUEST_METHOD"] not in methods or next(count) % nth:
            return None
        return fault if isinstance(fault, str) else time.sleep(fault)

    return chosen


def of_parquet(storage, folder):
    table = pa.table({"x": np.arange(ROWS) / 8, "y": np.arange(ROWS)})
    with storage.filesystem().open_output_stream(f"{BUCKET}/rows.parquet") as file:
        pq.write_table(table, file, row_group_size=500)
    return lambda: ray.data.read_parquet(f"{BUCKET}/rows.parquet", filesystem=storage.filesystem())


def of_tfrecords(storage, folder):
    for part in range(4):
        rows = [example(x=i / 8, y=i) for i in range(part * ROWS // 4, (part + 1) * ROWS // 4)]
        path = write(folder / f"{part}.tfrecord", rows)
        with storage.filesystem().open_output_stream(f"{BUCKET}/{part}.tfrecord") as file:
            file.write(pathlib.Path(path).read_bytes())
    schema = {"x": tf.io.FixedLenFeature([], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}
    paths = [f"{BUCKET}/{part}.tfrecord" for part in range(4)]
    return lambda: raytf.read_tfrecords(paths, schema, filesystem=storage.filesystem())


@pytest.mark.parametrize("fault", ["503 Slow Down", CUT, 0.1], ids=["503", "cut", "slow"])
@pytest.mark.parametrize("made", [of_parquet, of_tfrecords])
def test_rows_are_read_in_spite_of_it(storage, tmp_path, made, fault):
    opened = made(storage, tmp_path)
    spec = BatchSpec.parsed("x", "y")
    storage.fault = every(3, fault)
    for materialize in (True, False):
        read = ingest.read_all({"train": opened()}, materialize, ScalingConfig(num_workers=1), spec.roles)
        try:
            feed = Feed(read["train"], spec, Sampling(global_batch=100, shuffle="none"))
            x, y = (np.concatenate(part) for part in zip(*feed.dataset().as_numpy_iterator(), strict=True))
        finally:
            streamed.close(read)
        np.testing.assert_array_equal(y, np.arange(ROWS))
        np.testing.assert_array_equal(x, np.arange(ROWS) / 8)


@pytest.mark.parametrize("fault", ["503 Slow Down", CUT], ids=["503", "cut"])
def test_a_run_is_kept_and_resumes_in_spite_of_it(storage, tmp_path, fault):
    """The run ends as one on a disk does, and its model is loaded."""
    expected = trainer(tmp_path, 1, name="disk").fit()
    storage.fault = every(5, fault, ("GET", "PUT"))
    place = {"storage_filesystem": storage.filesystem(), "checkpoint_every": "3 steps"}
    result = trainer(f"{BUCKET}/some", 1, **place).fit()
    storage.fault = lambda environ: None
    models_of = [raytf.load_model(found.checkpoint) for found in (expected, result)]
    for one, other in zip(*(model.get_weights() for model in models_of), strict=True):
        np.testing.assert_array_equal(one, other)
