"""Ray Data's sources feed a training: rows are those that were written, in their order, stored or streamed."""

from __future__ import annotations

import io
import json
import sys
import tarfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from pyarrow import feather
from ray.train import ScalingConfig

from raytf.data import ingest, streamed
from raytf.data.batch_spec import BatchSpec
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

ROWS = 90
TABLE = pa.table({"a": np.arange(ROWS) / 8, "b": np.arange(ROWS) % 7.0, "label": np.arange(ROWS)})
PARTS = [TABLE.slice(start, ROWS // 3) for start in range(0, ROWS, ROWS // 3)]


def of_json(folder):
    for i, part in enumerate(PARTS):
        part.to_pandas().to_json(folder / f"{i}.jsonl", orient="records", lines=True)
    return ray.data.read_json(str(folder))


def of_feather(folder):
    for i, part in enumerate(PARTS):
        feather.write_feather(part, folder / f"{i}.feather")
    paths = pa.table({"path": [str(folder / f"{i}.feather") for i in range(3)]})

    def read(batch):
        return pa.concat_tables([feather.read_table(path) for path in batch["path"].to_pylist()])

    return ray.data.from_arrow(paths).map_batches(read, batch_format="pyarrow")


def of_numpy(folder):
    for i, part in enumerate(PARTS):
        np.save(folder / f"{i}.npy", part.to_pandas().to_numpy())

    def named(batch):
        a, b, label = batch["data"].T
        return {"a": a, "b": b, "label": label.astype("int64")}

    return ray.data.read_numpy(str(folder)).map_batches(named, udf_modifying_row_count=False)


def of_webdataset(folder):
    for i, part in enumerate(PARTS):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            for row in part.to_pylist():
                for ending, text in {"json": json.dumps(row), "cls": str(row["label"])}.items():
                    entry = tarfile.TarInfo(f"{row['label']:04d}.{ending}")
                    entry.size = len(text)
                    tar.addfile(entry, io.BytesIO(text.encode()))

    def named(batch):
        rows = pd.DataFrame(list(batch["json"]))
        return {"a": rows["a"], "b": rows["b"], "label": np.asarray(batch["cls"], "int64")}

    return ray.data.read_webdataset(str(folder)).map_batches(named, udf_modifying_row_count=False)


def of_lance(folder):
    import lance

    for part in PARTS:
        lance.write_dataset(part, str(folder / "rows.lance"), mode="append" if part is not PARTS[0] else "create")
    return ray.data.read_lance(str(folder / "rows.lance"))


def of_delta(folder):
    import deltalake

    for part in PARTS:
        deltalake.write_deltalake(str(folder), part, mode="append")
    return ray.data.read_delta(str(folder))


def of_iceberg(folder):
    from pyiceberg.catalog import sql

    where = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    catalog = sql.SqlCatalog("tests", **where)
    catalog.create_namespace("tests")
    table = catalog.create_table("tests.rows", schema=TABLE.schema)
    for part in PARTS:
        table.append(part)
    return ray.data.read_iceberg(
        table_identifier="tests.rows", catalog_kwargs={"name": "tests", "type": "sql", **where}
    )


def of_huggingface(folder):
    import datasets

    return ray.data.from_huggingface(datasets.Dataset(TABLE))


def of_parquet_partitions(folder):
    for i, part in enumerate(PARTS):
        (folder / f"part={i}").mkdir()
        pq.write_table(part, folder / f"part={i}" / "rows.parquet")
    return ray.data.read_parquet(str(folder))


SOURCES = [of_json, of_feather, of_numpy, of_webdataset, of_lance, of_delta, of_iceberg, of_huggingface]
UNORDERED = [of_delta, of_iceberg]  # their files have the order of the table's log


@pytest.fixture
def without_threads():
    """Ends the threads that pyiceberg keeps."""
    yield
    if concurrent := sys.modules.get("pyiceberg.utils.concurrent"):
        concurrent.ExecutorFactory.get_or_create().shutdown()
        concurrent.ExecutorFactory._instance = None


@pytest.mark.usefixtures("without_threads")
@pytest.mark.parametrize("source", [*SOURCES, of_parquet_partitions], ids=lambda source: source.__name__[3:])
def test_a_source_feeds_a_training(source, tmp_path):
    spec = BatchSpec.parsed(["a", "b"], "label")
    dataset, seen = source(tmp_path), []
    for materialize in (True, False):
        read = ingest.read_all({"train": dataset}, materialize, ScalingConfig(num_workers=1), spec.roles)
        try:
            assert isinstance(read["train"], streamed.StreamedDataset) == (not materialize)
            feed = Feed(read["train"], spec, Sampling(global_batch=16, shuffle="none"))
            features, labels = (np.concatenate(part) for part in zip(*feed.dataset().as_numpy_iterator(), strict=True))
        finally:
            streamed.close(read)
        seen.append(labels.tolist())
        order = np.argsort(labels) if source in UNORDERED else np.arange(ROWS)
        np.testing.assert_array_equal(labels[order], np.arange(ROWS))
        np.testing.assert_allclose(features[order], np.stack([TABLE["a"], TABLE["b"]], 1))
    assert seen[0] == seen[1]
