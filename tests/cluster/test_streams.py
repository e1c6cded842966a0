"""Streams: what can be read, by whom while every CPU is taken, and what is fetched of it; a server that dies."""

from __future__ import annotations

import os
import pickle
import re
import signal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import ScalingConfig

from raytf.data import columns, ingest, partitions, streamed
from raytf.data import reader as reader_module
from raytf.data.sampling import Sampler
from raytf.data.stored import StoredDataset
from raytf.errors import ConfigError
from raytf.runtime import resources
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS = 240


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 1500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Numbers and lists of different lengths, in row groups of 20."""
    where = tmp_path_factory.mktemp("streams")
    table = pa.table({"id": np.arange(ROWS), "words": [[i] * (i % 7) for i in range(ROWS)], "unused": ["-"] * ROWS})
    pq.write_table(table, where / "rows.parquet", row_group_size=20)
    return str(where)


@pytest.fixture
def stream(folder):
    found = ingest.read_all({"train": ray.data.read_parquet(folder)}, False, ScalingConfig(num_workers=2))
    yield found["train"]
    streamed.close(found)


def test_a_dataset_that_cannot_be_read_leaves_no_server_of_the_others(folder, monkeypatch):
    """The driver's error may live on, as in a notebook, and with it what its frames have."""
    started, start = [], streamed._server
    monkeypatch.setattr(streamed, "_server", lambda *args: started.append(start(*args)) or started[-1])
    datasets = {"train": ray.data.read_parquet(folder), "validation": ray.data.range(50)}
    specs = {"features": columns.parse("id", "features"), "labels": columns.parse("words", "labels")}
    with pytest.raises(ConfigError, match="words"):
        ingest.read_all(datasets, {"train": False}, ScalingConfig(num_workers=2), specs)
    (server,) = started
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(server.__ray_ready__.remote(), timeout=60)


def an_order(stream):
    return Sampler(rows=stream.rows, global_batch=20, shuffle="window", window=60)


def ids(stream, order, worker, epoch, start, stop):
    """What a worker gets, by the reader that a feed has."""
    reader = reader_module.StreamReader(stream, [columns.parse("id", "features")], order, worker, 2)
    chunk = start // (order.chunk_steps * order.global_batch)
    return reader.rows(order.epoch(epoch), epoch, chunk).gather(np.arange(start, stop))[0].tolist()


def expected(order, epoch, start, stop):
    natural = np.cumsum([0, *order.rows])
    return [i for p in order.pieces(epoch) for i in range(natural[p], natural[p + 1])][start:stop]


class Even:
    """A callable class that changes the number of rows."""

    def __call__(self, batch):
        return {"id": batch["id"][batch["id"] % 2 == 0]}


def test_other_sources_than_parquet_are_cut_and_counted_at_once(tmp_path, monkeypatch):
    for i in range(4):
        pa.csv.write_csv(pa.table({"id": np.arange(60 * i, 60 * i + 60)}), tmp_path / f"{i}.csv")
    executed = []
    monkeypatch.setattr(partitions, "_dataset", lambda *a, made=partitions._dataset: executed.append(a) or made(*a))
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 150)
    csv = ray.data.read_csv(str(tmp_path))
    for dataset in (csv, csv.map_batches(Even, udf_modifying_row_count=True, concurrency=1).map_batches(lambda b: b)):
        executed.clear()
        found = partitions.cut(dataset)
        assert len(found.rows) == 4 and len(executed) == 1, "one execution counts all"
        step = 60 // found.rows[0]
        assert found.rows == (60 // step,) * 4
        if step == 1:
            rows = [row["id"] for row in found.dataset([2, 0]).iter_rows()]
            assert rows == [*range(120, 180), *range(60)]
    numbers = partitions.cut(ray.data.range(1000))
    assert sum(numbers.rows) == 1000 and len(numbers.rows) > 4


def test_what_is_large_streams_whatever_it_is_read_from(monkeypatch, capsys):
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 16 << 20)
    huge = ray.data.range(10**9)
    found = ingest.read_all({"train": huge}, "auto", ScalingConfig(num_workers=1))
    assert isinstance(found["train"], streamed.StreamedDataset) and sum(found["train"].rows) == 10**9
    streamed.close(found)
    monkeypatch.setattr(ingest, "_STORE_FRACTION", 1e-9)
    found = ingest.read_all({"train": ray.data.range(50).sort("id")}, "auto", ScalingConfig(num_workers=1))
    assert isinstance(found["train"], StoredDataset)
    output = capsys.readouterr().err
    assert "'train', of 0.0 GiB or more, is kept in the object store" in output and "Sort" in output


def test_reading_continues_while_every_cpu_is_held(folder):
    """Parquet takes Ray Data 1 CPU for its list of files, more for their footers, and 1 for each task."""

    @ray.remote
    class Holder:
        def pid(self):
            return os.getpid()

    holder = Holder.options(num_cpus=4).remote()
    ray.get(holder.pid.remote())
    # what Ray counts may be a moment old
    until(lambda: resources.held_by_others() == "4 of 4 CPUs are held: 4 by Holder of this job")
    dataset = ray.data.read_parquet(folder).map_batches(lambda batch: batch, batch_size=32)
    found = ingest.read_all({"a": dataset, "b": dataset}, {"a": False, "b": True}, ScalingConfig())
    order = Sampler(rows=found["a"].rows, global_batch=20, shuffle="none")
    assert ids(found["a"], order, 0, 0, 0, ROWS) == list(range(ROWS))
    assert sum(found["b"].rows) == ROWS
    streamed.close(found)
    ray.kill(holder)


def test_waiting_stream_logs_what_it_waits_for(monkeypatch, capsys):
    monkeypatch.setattr(streamed, "_REPORT_INTERVAL", 0.01)
    with streamed.log_slow_reads("train"):
        signal.sigtimedwait([], 0.1)
    assert re.search("'train' is not read after 0 s; .*CPUs are .*Reading continues", capsys.readouterr().err)


def test_a_server_that_is_killed_comes_back_to_the_same_rows(stream):
    order = an_order(stream)

    def kill():
        os.kill(ray.get(stream.server.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)

    places = [(0, 0, 60), (0, 60, 120), (0, 120, 180), (0, 180, 240), (1, 0, 60), (1, 120, 180)]
    for epoch, start, stop in places:
        reader = reader_module.StreamReader(stream, [columns.parse("id", "features")], order, 0, 2)
        chunk = reader.rows(order.epoch(epoch), epoch, start // 60)
        if (epoch, start) in ((0, 60), (1, 0)):  # what it gave is lost with it, before it was fetched
            kill()
        assert chunk.gather(np.arange(start, stop))[0].tolist() == expected(order, epoch, start, stop)
        if (epoch, start) in ((0, 60), (0, 180)):  # between two requests, twice in a row, and between two epochs
            kill()
        assert ids(stream, order, 1, epoch, start, stop) == expected(order, epoch, start, stop)


def test_server_that_cannot_restart_is_reported_in_a_sentence(stream):
    ray.kill(stream.server)
    with pytest.raises(streamed.StreamError, match="^What reads 'train' has ended and cannot come back: [^\n]*$"):
        ids(stream, an_order(stream), 0, 0, 0, 60)


def test_a_server_of_its_own_lets_go_of_what_it_read_ahead(stream):
    own, order = stream.clone(), an_order(stream)
    ids(own, order, 0, 0, 0, 60)

    def held(self):
        return sum(len(run._blocks) for run in self._runs.values())

    assert ray.get(own.server.__ray_call__.remote(held)) > 0
    own.release_prefetch()
    assert ray.get(own.server.__ray_call__.remote(held)) == 0
    assert ids(own, order, 0, 0, 60, 120) == expected(order, 0, 60, 120)


def test_a_request_does_not_grow_with_the_number_of_pieces():
    order = Sampler(rows=(100,) * 65_536, global_batch=20, shuffle="window")
    assert len(pickle.dumps(streamed.without_rows(order))) < 1000


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_of_other_nodes_blocks_only_a_workers_rows_are_fetched(stream, workers):
    """A cluster of one node; its blocks are taken for another's."""
    order = an_order(stream)
    words = columns.parse(columns.Column("words", ragged=True, bucket=True), "features")
    seen = []
    for worker in range(workers):
        reader = reader_module.StreamReader(stream, [columns.parse("id", "labels"), words], order, worker, workers)
        rows, near = (reader.rows(order.epoch(0), 0, 1) for _ in range(2))
        rows._node_id = "elsewhere"
        positions = np.random.default_rng(0).permutation(np.arange(60, 120))
        assert rows.lengths(positions, 1).tolist() == near.lengths(positions, 1).tolist()
        part = positions[worker::workers]
        rows.fetch(part)
        for far, close in zip(rows.gather(part), near.gather(part), strict=True):
            assert far.tolist() == close.tolist()
        whole = near._sources and sum(table.nbytes for table in near._tables)
        assert rows.fetched_bytes < 1.5 * whole / workers + 500
        assert (rows._table >= 0).sum() == len(part)
        seen += rows.gather(part)[0].tolist()
    assert sorted(seen) == sorted(expected(order, 0, 60, 120))
