"""Seconds to the first batch of an epoch that resumes at its step 1,000,000, against one that begins at its first step.

python jobs/benchmarks/seek.py

Eight million rows in batches of eight: from Arrow tables in memory, of which a worker of three gets its part, in each
of raytf's orders; and streamed from Parquet files through Ray Data to one worker. Each measurement is of another epoch,
so that nothing of the one before is left. What both take alike is `tf.data`'s start and the read of a partition.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import common

BATCH, STEP = 8, 1_000_000
FILES, ROW_GROUP = 8, 100_000
# (shuffle, whether rows of similar length share a batch)
WAYS = {
    "full": ("full", False),
    "window": ("window", False),
    "none": ("none", False),
    "full, bucketed": ("full", True),
    "window, bucketed": ("window", True),
}
STREAMED = "window, streamed"


def _table(first: int, last: int, lists: bool):
    """Rows with their numbers; lists of one to five of them."""
    import numpy as np
    import pyarrow as pa

    rows = np.arange(first, last)
    columns = {"row": pa.array(rows), "x": pa.array(rows.astype("float32"))}
    if lists:
        lengths = rows % 5 + 1
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
        columns["x"] = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.repeat(rows, lengths)))
    return pa.table(columns)


def _edges(rows: int, parts: int) -> list[tuple[int, int]]:
    return [(rows * i // parts, rows * (i + 1) // parts) for i in range(parts)]


def once(way: str, step: str, repeats: str, folder: str, address: str) -> None:
    """One way in this process; gives the seconds to the first batch at step 0 and at `step`, of each repeat."""
    from ray.train import ScalingConfig

    from raytf.data import ingest
    from raytf.data.batch_spec import BatchSpec
    from raytf.data.columns import Column
    from raytf.data.feed import Feed
    from raytf.data.sampling import Sampling
    from raytf.data.stored import StoredDataset
    from raytf.runtime.topology import Shard

    shuffle, bucket = WAYS.get(way, ("window", False))
    rows = BATCH * (int(step) + 1000)
    shard = Shard(1, 3)
    if way == STREAMED:
        import ray.data

        common.connect(address)
        read = ingest.read_all({"train": ray.data.read_parquet(folder)}, False, ScalingConfig(num_workers=1))
        dataset, shard = read["train"], Shard(0, 1)
    else:
        tables = [_table(*edges, bucket) for edges in _edges(rows, 64)]
        dataset = StoredDataset(tables, [len(table) for table in tables], tables[0].column_names)
    x = Column("x", pad="batch", bucket=True) if bucket else ["x"]
    feed = Feed(dataset, BatchSpec.parsed(x, "row"), Sampling(global_batch=BATCH, seed=3, shuffle=shuffle), shard)

    def first(epoch: int, step: int) -> float:
        began = time.perf_counter()
        feed.set_epoch(epoch, step)
        next(iter(feed.dataset()))
        return time.perf_counter() - began

    first(0, 0)
    found = [(first(2 * i + 1, 0), first(2 * i + 2, int(step))) for i in range(int(repeats))]
    common.give(found)


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    step, repeats = (1000, 1) if options.smoke else (STEP, options.repeats)
    figures, rows = {}, []
    with tempfile.TemporaryDirectory(prefix="raytf_seek_") as folder, common.ray_cluster() as address:
        import pyarrow.parquet as pq

        for i, edges in enumerate(_edges(BATCH * (step + 1000), FILES)):
            pq.write_table(_table(*edges, False), os.path.join(folder, f"{i}.parquet"), row_group_size=ROW_GROUP)
        for way in [*WAYS, STREAMED]:
            found = common.measure(__file__, "--once", way, str(step), str(repeats), folder, address)
            figures[way] = found
            begins, seeks = (common.spread(one[i] for one in found) for i in range(2))
            more = common.spread(seek - begin for begin, seek in found)
            rows.append([way, begins[0], seeks[0], seeks[2], more[0], more[2]])
    head = ["order", "step 0, s", f"step {step:,}, s", "worst", "more than step 0, s", "worst"]
    common.finish(options, "seek", common.table(f"Seek: to the first batch, median of {repeats}", head, rows), figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:7])
    else:
        main()
