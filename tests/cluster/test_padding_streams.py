"""Lists of a streamed dataset are filled up to the longest of the global batch, as those of a stored one."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import ScalingConfig

from raytf.data import ingest, partitions, streamed
from raytf.data.batch_spec import BatchSpec
from raytf.data.columns import Column
from raytf.data.feed import Feed
from raytf.data.sampling import Sampling
from raytf.runtime.topology import Shard

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS = 90


@pytest.fixture
def folder(tmp_path):
    words = [[i] * (1 + (i * i) % 9) for i in range(ROWS)]
    pq.write_table(pa.table({"id": np.arange(ROWS), "words": words}), tmp_path / "rows.parquet", row_group_size=20)
    return str(tmp_path)


@pytest.mark.parametrize("bucket", [False, True])
def test_a_streams_lists_are_filled_up_alike_on_all_workers(folder, bucket, monkeypatch):
    monkeypatch.setattr(partitions, "_PIECE_BYTES", 1500)
    found = ingest.read_all({"train": ray.data.read_parquet(folder)}, False, ScalingConfig(num_workers=2))
    spec = BatchSpec.parsed({"words": Column("words", pad="batch", bucket=bucket)}, "id")
    how = Sampling(global_batch=8, seed=2, shuffle="window", window=32)
    try:
        assert isinstance(found["train"], streamed.StreamedDataset)
        single = Feed(found["train"].clone(), spec, how)
        alone = list(single.dataset().as_numpy_iterator())
        stream = found["train"].clone()
        feeds = [Feed(stream, spec, how, Shard(worker, 2)) for worker in range(2)]
        iterators = [feed.dataset().as_numpy_iterator() for feed in feeds]
        many = list(zip(*iterators, strict=True))
    finally:
        streamed.close(found)
    for (words, ids), parts in zip(((b[0]["words"], b[1]) for b in alone), many, strict=True):
        assert words.shape[1] == max(1 + (i * i) % 9 for i in ids)
        np.testing.assert_array_equal(words, np.concatenate([part[0]["words"] for part in parts]))
        np.testing.assert_array_equal(ids, np.concatenate([part[1] for part in parts]))
