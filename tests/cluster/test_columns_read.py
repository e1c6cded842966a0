"""Only the columns that tensors are made of are read, and kept."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.train import ScalingConfig

from raytf.data import ingest, stored
from raytf.data import streamed as streamed_module
from raytf.data.columns import Column, parse
from raytf.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

SPECS = {"features": parse(["a", "b.c"], "features"), "labels": parse("label", "labels"), "sample_weights": None}


@pytest.fixture
def dataset(tmp_path):
    import ray

    columns = {name: np.arange(300.0) for name in ("a", "b.c", "label", "junk")}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=100)
    return ray.data.read_parquet(str(tmp_path))


def read(dataset, specs=SPECS, how=True):
    return ingest.read_all({"train": dataset}, how, ScalingConfig(num_workers=1), specs)["train"]


def test_parquet_files_are_read_by_column(dataset):
    from ray.data._internal.logical.optimizers import LogicalOptimizer

    plan = LogicalOptimizer().optimize(stored.projected(dataset, SPECS)._logical_plan)
    assert [op.name.split("(")[0] for op in plan.dag.post_order_iter()] == ["ListFiles", "ReadFilesParquetV2"]
    found = read(dataset)
    (table,) = found.get()
    assert table.column_names == ["label", SPECS["features"].stored]
    assert table.column(1).type == pa.list_(pa.float32(), 2) and table.column(1).num_chunks == 1
    assert table.column(1).to_pylist()[7] == [7, 7]
    streamed = read(dataset, how=False)
    try:
        assert streamed.sample.column_names == ["a", "b.c", "label"] and sum(streamed.rows) == 300
    finally:
        streamed_module.close({"train": streamed})


def test_what_comes_before_sees_all_columns(dataset):
    counted = dataset.map_batches(
        lambda table: table.append_column("columns", pa.array([table.num_columns] * len(table))),
        batch_format="pyarrow",
    )
    specs = {"features": parse(["a"], "features"), "labels": parse("columns", "labels")}
    (table,) = read(counted, specs).get()
    assert table.column_names[0] == "columns" and set(table.column(0).to_pylist()) == {4}
    with pytest.raises(ConfigError, match="labels must name columns of the dataset, which has 'a'.*'columns'; rec"):
        read(counted, specs | {"labels": parse("nope", "labels")})


def test_wrong_columns_are_reported_before_workers_start(dataset):
    with pytest.raises(ConfigError, match="features must name columns of the dataset, which has 'a'.*'junk'; received"):
        read(dataset, SPECS | {"features": parse(["a", "nope"], "features")})
    holes = dataset.map_batches(_holes, batch_format="pyarrow")
    with pytest.raises(ConfigError, match=r"1 null\(s\) inside the rows of 'pair'"):
        read(holes, {"features": parse("pair", "features")})
    (table,) = read(holes, {"features": parse(Column("pair", fill=7), "features")}).get()
    assert table.column("pair").to_pylist()[299] == [299, 7]


def _holes(table):
    return pa.table({"pair": [[int(a), None if a == 299 else 0] for a in table.column("a").to_pylist()]})
