"""What a stream costs where it is shared: a request by the number of pieces, the start of an epoch, a worker's traffic.

python jobs/benchmarks/stream_scale.py

The constants of the model in STREAMS.md in this folder. Pieces are one block in memory, read and mapped again and
again: what is measured is not reading. "share" is what a worker fetches of blocks that are all on other nodes, against
its part of the rows: 2 and 3 workers fetch through Ray, more are simulated by the same function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time

import common
import numpy as np

PIECES, ROWS, COLUMNS, BATCH, WINDOW = (1024, 16_384, 65_536), 4096, 32, 1000, 65_536
WORKERS = (2, 3, 100, 1000)


def seconds(function, repeats: int) -> float:
    """Median seconds of a call."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return common.spread(found)[0]


def pieces_of(count: int):
    """So many pieces of a dataset that is mapped."""
    import pyarrow as pa
    import ray

    from raytf.data import partitions

    rng = np.random.default_rng(0)
    table = pa.table({f"x{i}": rng.normal(size=ROWS).astype("float32") for i in range(COLUMNS)})
    found = partitions.cut(ray.data.from_arrow(table).map_batches(lambda batch: batch, udf_modifying_row_count=False))
    return dataclasses.replace(found, rows=found.rows * count, numbers=np.zeros(count, int)), table


def requests(count: int, repeats: int) -> dict:
    """Costs that may depend on the number of pieces; seconds."""
    import ray

    from raytf.data import streamed
    from raytf.data.sampling import Sampler

    found, table = pieces_of(count)
    whole = Sampler(rows=found.rows, global_batch=BATCH, shuffle="window", window=WINDOW)
    order = streamed.without_rows(whole)
    server = streamed.StreamServer(found)
    stop = whole.chunk_steps * BATCH
    server.rows(0, 2, order, 0, 0, 1)  # Ray's processes are there
    server.release_prefetch()
    began = time.perf_counter()
    server.rows(0, 2, order, 1, 0, 1)
    start = time.perf_counter() - began
    while server.rows(0, 2, order, 1, 0, stop) is None:
        pass
    inside = seconds(lambda: server.rows(0, 2, order, 1, 0, stop), repeats)
    server.release_prefetch()
    stream = streamed.open_stream(found, table.column_names, table, 2, "benchmark")
    stream.request(0, 2, order, 0, 0, stop)
    before = ray.get(stream.server.__ray_call__.remote(lambda self: time.process_time()))
    call = seconds(lambda: stream.request(0, 2, order, 0, 0, stop), repeats)
    after = ray.get(stream.server.__ray_call__.remote(lambda self: time.process_time()))
    streamed.close({"train": stream})
    return {
        "pieces": count,
        "start": start,
        "inside": inside,
        "call": call,
        "cpu": (after - before) / repeats,
        "bytes": len(pickle.dumps(order)),
    }


def share(workers: int) -> dict:
    """Returns bytes that the workers fetch of a chunk whose blocks are on other nodes, the most against a worker's
    part."""
    from raytf.data import columns, reader, sampling, streamed

    found, table = pieces_of(2 * WINDOW // ROWS)
    place = sampling.Sampler(rows=found.rows, global_batch=BATCH, shuffle="window", window=WINDOW)
    epoch, steps = place.epoch(0), slice(0, place.chunk_steps)
    start, stop = epoch.bounds(0)
    names = columns.parse(table.column_names, "features")
    stream = streamed.open_stream(found, table.column_names, table, workers, "benchmark") if workers <= 3 else None
    fetched = []
    for worker in range(workers):
        worker_rows = sampling.worker_part(epoch.positions(0), BATCH, worker, workers, steps)
        if stream is None:
            blocks = np.sort(worker_rows) // ROWS
            parts = [np.sort(worker_rows)[blocks == b] % ROWS for b in np.unique(blocks)]
            taken = reader._take(parts, table.column_names, *[table] * len(parts))
            fetched.append(sum(one.nbytes for one in taken))
            continue
        rows = reader.StreamReader(stream, [names], place, worker, workers).rows(epoch, 0, 0)
        rows._node_id = "elsewhere"
        rows.fetch(worker_rows)
        fetched.append(rows.fetched_bytes)
    if stream is not None:
        streamed.close({"train": stream})
    part = (stop - start) * table.nbytes / ROWS / workers
    return {"workers": workers, "fetched": max(fetched), "share": max(fetched) / part}


def near_data(repeats: int) -> float:
    """Returns seconds of a task that takes rows out of a block on the block's own node."""
    import pyarrow as pa
    import ray

    from raytf.data import reader

    block = ray.put(pa.table({"x": np.zeros(100_000)}))
    rows = np.arange(0, 100_000, 100)
    return seconds(lambda: ray.get(reader._local.remote(reader._take, [rows], (["x"],), block)), repeats)


def main(arguments=None):
    options = common.parser(__doc__).parse_args(arguments)
    counts, workers, repeats = ((64, 4096), (2, 100), 20) if options.smoke else (PIECES, WORKERS, 200)
    with contextlib.ExitStack() as stack:
        stack.enter_context(common.ray_cluster())
        from raytf.data import stored

        stack.enter_context(stored.quiet())
        costs = [requests(count, repeats) for count in counts]
        shares = [share(count) for count in workers]
        task = near_data(repeats)
    rows = [
        [
            f"{one['pieces']:,}",
            f"{one['start']:.2f}",
            f"{1e6 * one['inside']:.0f}",
            f"{1e3 * one['cpu']:.2f}",
            f"{1e3 * one['call']:.2f}",
            one["bytes"],
        ]
        for one in costs
    ]
    head = [
        "pieces",
        "first rows of an epoch, s",
        "request in the server, us",
        "its process, ms",
        "through Ray, ms",
        "order, bytes",
    ]
    shown = common.table("A stream by its number of pieces", head, rows)
    rows = [[f"{one['workers']:,}", f"{one['fetched']:,}", f"{one['share']:.2f}"] for one in shares]
    title = f"A chunk of {WINDOW:,} rows on other nodes; a task there takes {1e3 * task:.1f} ms"
    shown += "\n" + common.table(title, ["workers", "most bytes of a worker", "against its share"], rows)
    common.finish(options, "stream_scale", shown, {"requests": costs, "shares": shares, "task": task})


if __name__ == "__main__":
    main()
