"""Where the rows of a run's datasets are kept: in the object store, or read anew in every epoch. Driver side."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow.fs
import ray
from ray.data._internal.logical.operators import ListFiles

from raytf import blocks as blocks_module
from raytf import pieces as pieces_module
from raytf import streams
from raytf.blocks import Blocks, as_table
from raytf.errors import ConfigError
from raytf.pieces import Pieces

STORAGES = ("auto", "object_store", "stream")
# Of the smallest node's object store: every node may come to hold every block, beside what Ray keeps there.
_SHARE = 0.3
# Parquet is about so much smaller than what it holds; only says which datasets are looked at more closely.
_PACKED = 8
_SAMPLE_ROWS = 1000


def read_all(datasets: Mapping, storage: str | Mapping[str, str], scaling_config) -> dict[str, Blocks | streams.Stream]:
    """Each of a run's datasets, at the same time: most of a small one's time is Ray's start-up.

    Args:
        datasets: `ray.data.Dataset` by name.
        storage: "object_store", "stream", or "auto": what fits into the object store is kept there; or one of these by
            name of the dataset.
        scaling_config: the run's; reading must go on beside its workers.

    Raises:
        ConfigError: a dataset that has to be streamed cannot be, see `pieces.cut`.
    """
    workers = scaling_config.num_workers
    workers = workers if isinstance(workers, int) else workers[1]
    taken = workers * scaling_config._resources_per_worker_not_none.get("CPU", 0)
    free = ray.cluster_resources().get("CPU", 0) - taken
    with blocks_module.quiet(), ThreadPoolExecutor(max(1, len(datasets))) as pool:
        ways = [of(storage, name) for name in datasets]
        found = pool.map(lambda dataset, way: _read(dataset, way, workers, free), datasets.values(), ways)
        return dict(zip(datasets, found, strict=True))


def of(storage: str | Mapping[str, str], name: str) -> str:
    """How one dataset is to be kept."""
    return storage if isinstance(storage, str) else storage.get(name, "auto")


def _read(dataset, storage: str, workers: int, free_cpus: float) -> Blocks | streams.Stream:
    blocks_module.limit_footer_readers(dataset)
    pieces = _to_stream(dataset, storage)
    if pieces is None:
        return blocks_module.read(dataset)
    first = pieces.dataset(range(min(1, len(pieces.parts)))) if pieces.parts else dataset.limit(0)
    sample = next(
        (as_table(ray.get(b.ref)) for bundle in first.iter_internal_ref_bundles() for b in bundle.blocks), None
    )
    if sample is None:
        return Blocks([], [], list(dataset.schema().names))
    # Workers that hold every CPU would wait for ever for rows that no CPU is left to read.
    num_cpus = None if free_cpus >= 1 else 0
    return streams.open_stream(pieces, sample.column_names, sample.slice(0, _SAMPLE_ROWS), workers, num_cpus)


def _to_stream(dataset, storage: str) -> Pieces | None:
    """The pieces of a dataset that is to be streamed."""
    fits = _SHARE * min(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    if storage == "object_store" or (storage == "auto" and _PACKED * _packed_bytes(dataset) <= fits):
        return None
    try:
        pieces = pieces_module.cut(dataset)
    except ConfigError:
        if storage == "stream":
            raise
        return None  # Ray puts on disk what the store cannot hold
    return pieces if storage == "stream" or pieces.bytes > fits else None


def _packed_bytes(dataset) -> int:
    """Size of the files of a dataset; 0 where there are none, as its rows are in the object store then."""
    sources = [op for op in dataset._logical_plan.dag.post_order_iter() if isinstance(op, ListFiles)]
    total = 0
    for source in sources:
        filesystem = source.filesystem or pyarrow.fs.LocalFileSystem()
        for found in filesystem.get_file_info(source.paths):
            if found.type == pyarrow.fs.FileType.Directory:
                inside = filesystem.get_file_info(pyarrow.fs.FileSelector(found.path, recursive=True))
                total += sum(info.size or 0 for info in inside)
            else:
                total += found.size or 0
    return total


def describe(name: str, found: Blocks | streams.Stream, shuffle: str) -> str:
    """A line that says where a dataset is kept, and how it is shuffled."""
    where = "streamed in every epoch" if isinstance(found, streams.Stream) else "kept in the object store"
    shuffled = {"full": "shuffled", "window": "shuffled by windows", "none": "in its own order"}[shuffle]
    return f"{name}: {sum(found.rows):,} rows, {where}, {shuffled}"
