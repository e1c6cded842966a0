"""Datasets that are streamed or kept: the same training for any number of workers, and after a kill."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

import raytf
from raytf.data import ingest, partitions
from raytf.data.sampling import Sampler
from raytf.errors import ConfigError
from tests.cluster import models
from tests.cluster.test_trainer import assert_equal, trainer

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """337 rows in three files, row groups of 20."""
    where = tmp_path_factory.mktemp("parquet")
    table = pa.table({**models.rows(337), "id": np.arange(337)})
    for i in range(3):
        pq.write_table(table.slice(i * 120, 120), where / f"part{i}.parquet", row_group_size=20)
    return where


def streamed(tmp_path, folder, workers, name, **kwargs):
    datasets = {"train": ray.data.read_parquet(str(folder)), "validation": models.dataset(41, 1)}
    config = {"epochs": 2} | kwargs.pop("config", {})
    return trainer(
        tmp_path,
        workers,
        name=name,
        datasets=datasets,
        materialize={"train": False},
        window=100,
        config=config,
        **kwargs,
    )


@pytest.mark.slow
def test_streams_train_alike_on_any_number_of_workers_and_after_a_kill(folder, tmp_path, monkeypatch):
    """Small pieces, so that an epoch has many; what reads dies in the first epoch, the chief in the second."""
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 4000)

    def callbacks(config):
        if "kill" not in config:
            return []
        return [models.kill_once(**config["kill"]), models.kill_server_once(**config["kill_server"])]

    one = streamed(tmp_path, folder, 1, "one").fit()
    kill = {"marker": str(tmp_path / "killed"), "rank_": 0, "epoch": 1, "batch": 5}
    kills = {"kill": kill, "kill_server": {"marker": str(tmp_path / "server"), "epoch": 0, "batch": 3}}
    two = streamed(tmp_path, folder, 2, "two", config=kills, callbacks=callbacks, failures=1).fit()
    assert (tmp_path / "killed").exists() and "[]" not in (tmp_path / "server").read_text()
    assert_equal(one, two)


def test_a_dataset_is_cut_into_pieces_that_come_in_any_order(folder, monkeypatch):
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 3000)
    dataset = ray.data.read_parquet(str(folder)).map_batches(lambda b: {"id": b["id"], "x": b["x0"] * 2})
    found = partitions.cut(dataset)
    assert sum(found.rows) == 337 and len(found.rows) > 10
    starts = np.cumsum([0, *found.rows])
    chosen = [5, 0, 3]
    ids = [row["id"] for row in found.dataset(chosen).iter_rows()]
    assert ids == [i for piece in chosen for i in range(starts[piece], starts[piece + 1])]
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 20_000)
    filtered = partitions.cut(dataset.filter(lambda row: row["id"] % 3 == 0))
    assert sum(filtered.rows) == 113


@pytest.mark.parametrize("change", [lambda d: d.sort("id"), lambda d: d.limit(7), lambda d: d.union(d)])
def test_what_needs_all_rows_at_once_cannot_be_streamed(folder, change):
    with pytest.raises(ConfigError, match="A streamed dataset must be a source"):
        partitions.cut(change(ray.data.read_parquet(str(folder))))


def test_a_server_reads_from_where_it_is_asked(folder, monkeypatch):
    """Two workers, an epoch's end that one reaches before the other, and a start in the middle."""
    from raytf.data.streamed import StreamServer

    monkeypatch.setattr(partitions, "_PIECE_BYTES", 3000)
    found = partitions.cut(ray.data.read_parquet(str(folder)))
    server, order = StreamServer(found), Sampler(rows=found.rows, global_batch=10, shuffle="window", window=50)
    natural = np.cumsum([0, *found.rows])

    def ids(worker, epoch, start, stop):
        parts = server.rows(worker, 2, order, epoch, start, stop)
        return [i for p in parts for i in ray.get(p.block)["id"].to_pylist()[p.first : p.first + p.rows]]

    def expected(epoch, start, stop):
        stream = [i for p in order.pieces(epoch) for i in range(natural[p], natural[p + 1])]
        return stream[start:stop]

    for epoch, start, stop in [(0, 0, 50), (0, 50, 100), (0, 300, 337), (1, 0, 50), (3, 210, 260), (3, 260, 310)]:
        for worker in range(2):
            assert ids(worker, epoch, start, stop) == expected(epoch, start, stop)
    assert ids(0, 3, 10, 60) == expected(3, 10, 60), "a restart goes back"
    with ThreadPoolExecutor() as pool:
        ahead = pool.submit(ids, 1, 3, 300, 337)  # what a worker asked for before it died, and one that starts again
        assert ids(0, 3, 0, 50) == expected(3, 0, 50)
        assert ahead.result(60) == expected(3, 300, 337)
    assert ids(0, 4, 0, 50) == expected(4, 0, 50)
    assert ids(1, 3, 310, 337) == expected(3, 310, 337), "the other worker still ends its epoch"
    assert ids(1, 4, 0, 50) == expected(4, 0, 50)
    assert set(server._runs) == {4}, "epochs that all have left are let go"
    for run in server._runs.values():
        run.end()
    for thread in threading.enumerate():
        if "(_follow)" in thread.name:
            thread.join(30)


def test_what_fits_is_kept_and_the_rest_is_streamed(folder, monkeypatch):
    from ray.train import ScalingConfig

    from raytf.data.stored import StoredDataset
    from raytf.data.streamed import ServedDataset

    def kind(how, datasets):
        return type(ingest.read_all(datasets, how, ScalingConfig(num_workers=2))["train"])

    dataset = ray.data.read_parquet(str(folder))
    assert kind("auto", {"train": dataset}) is StoredDataset
    assert kind(False, {"train": dataset}) is ServedDataset
    monkeypatch.setattr(ingest, "_STORE_FRACTION", 1e-9)
    assert kind("auto", {"train": dataset}) is ServedDataset
    assert kind(True, {"train": dataset}) is StoredDataset
    assert kind("auto", {"train": models.dataset()}) is StoredDataset


def test_full_shuffle_of_a_stream_is_refused(folder, tmp_path):
    with pytest.raises(raytf.ConfigError, match="cannot be shuffled over all rows"):
        streamed(tmp_path, folder, 1, "full", shuffle="full")
