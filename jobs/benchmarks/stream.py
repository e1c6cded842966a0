"""A Parquet dataset of ten times Ray's object store, one epoch into the step: rows a second, and the worker's memory.

python jobs/benchmarks/stream.py

raytf chooses by itself to stream it, and shuffles it by windows; "to_tf" is Ray's own way without a shuffle, and gets a
quarter of the files, still more than the store holds, as it takes minutes for all. Memory is what the consuming process
alone holds (its unique set size), at its peak, over what it held before.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time

import common

STORE = 192 << 20
COLUMNS, BATCH, ROW_GROUP, FILES = 32, 1024, 50_000, 8
TO_TF_FILES = 2
ROWS = 10 * STORE // (4 * COLUMNS + 8)


def write(folder: str, rows: int) -> None:
    """The dataset, in files of several row groups."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for i in range(FILES):
        count = rows // FILES
        columns = {f"x{j}": rng.normal(size=count).astype("float32") for j in range(COLUMNS)}
        columns["y"] = rng.integers(0, 10, count)
        pq.write_table(pa.table(columns), os.path.join(folder, f"part{i}.parquet"), row_group_size=ROW_GROUP)


class _Peak(threading.Thread):
    """The most memory that this process held alone while it ran."""

    def __init__(self):
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.first = self.most = self._now()

    @staticmethod
    def _now() -> int:
        import psutil

        return psutil.Process().memory_full_info().uss

    def run(self):
        while not self._ended.wait(0.1):
            self.most = max(self.most, self._now())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc):
        self._ended.set()
        self.join()


def once(way: str, folder: str, address: str) -> None:
    """One epoch, in a process of its own."""
    import ray
    from ray.train import ScalingConfig

    common.connect(address)
    files = [os.path.join(folder, f"part{i}.parquet") for i in range(FILES if way == "raytf" else TO_TF_FILES)]
    dataset, names = ray.data.read_parquet(files), [f"x{j}" for j in range(COLUMNS)]
    kind = "to_tf"
    if way == "raytf":
        from raytf.data import ingest
        from raytf.data.batch_spec import BatchSpec
        from raytf.data.feed import Feed
        from raytf.data.sampling import Sampling

        found = ingest.read_all({"train": dataset}, "auto", ScalingConfig(num_workers=1))["train"]
        kind = type(found).__name__
        batch = BatchSpec.parsed(names, "y")
        batches = Feed(found, batch, Sampling(global_batch=BATCH, shuffle="window")).dataset()
    else:
        batches = dataset.to_tf(names, "y", batch_size=BATCH)
    with _Peak() as peak:
        began = time.perf_counter()
        count = common.count_rows(batches)
        seconds = time.perf_counter() - began
    common.give({"kind": kind, "rows": count, "rate": count / seconds, "peak": peak.most - peak.first})


def main(arguments=None):
    from raytf.runtime.allocator import allocator

    options = common.parser(__doc__).parse_args(arguments)
    repeats, rows = (1, ROWS // 20) if options.smoke else (options.repeats, ROWS)
    figures, shown = {"raytf": [], "to_tf": []}, []
    with (
        tempfile.TemporaryDirectory(prefix="raytf_stream_") as folder,
        common.ray_cluster(store_bytes=STORE) as address,
    ):
        write(folder, rows)
        for _ in range(repeats):
            for way, found in figures.items():
                found.append(common.measure(__file__, "--once", way, folder, address, environment=allocator(1)))
    base = common.spread(one["rate"] for one in figures["to_tf"])[0]
    for way, found in figures.items():
        median, least, most = common.spread(one["rate"] for one in found)
        peak = common.spread(one["peak"] for one in found)[0] / 2**20
        row = [way, found[0]["kind"], f"{median / 1000:,.0f}", f"{least / 1000:,.0f} to {most / 1000:,.0f}"]
        shown.append([*row, f"{median / base:.1f}x", f"{peak:,.0f}"])
    size = rows * (4 * COLUMNS + 8) / 2**20
    title = f"Stream: {size:,.0f} MiB of {COLUMNS} columns through a store of {STORE >> 20} MiB, median of {repeats}"
    head = ["way", "kind", "1000 rows/s", "spread", "against to_tf", "worker's peak, MiB"]
    common.finish(options, "stream", common.table(title, head, shown), figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(*sys.argv[2:5])
    else:
        main()
