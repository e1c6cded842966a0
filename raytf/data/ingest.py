"""Reads a run's datasets: keeps them in the object store, or streams them in each epoch. Driver side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import ray

from raytf import logs
from raytf.compat import ray_data
from raytf.data import columns, record_files, stored, streamed
from raytf.data import partitions as partitions_module
from raytf.data.partitions import Partitions
from raytf.data.record_files import RecordBlocks
from raytf.data.stored import StoredDataset, as_table
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError

logger = logs.get_logger(__name__)

# Share of the smallest node's object store: a node may hold all blocks, in addition to Ray's own objects.
_STORE_FRACTION = 0.3
# Factor by which decoded data exceeds its files, about. Only decides whether to measure a dataset.
_PARQUET_EXPANSION = 8
# Largest number of bytes of the first piece that are read for the measurement.
_MEASURED_BYTES = 256 << 20
_SAMPLE_ROWS = 1000


def read_all(
    datasets: Mapping, materialize: bool | str | Mapping, scaling_config, specs: Mapping | None = None
) -> dict[str, StoredDataset | streamed.StreamedDataset | TFData]:
    """Reads a run's datasets in parallel, as Ray's start-up dominates the time of small ones.

    Args:
        datasets: `ray.data.Dataset` by name, or `TFData`, which the workers read.
        materialize: Argument of `check`.
        scaling_config: The run's config, as the workers also need resources while a stream is read.
        specs: Parsed columns to read, by role; None reads all columns.

    Returns:
        The datasets by name; a `TFData` is unchanged.

    Raises:
        ConfigError: A dataset that must be streamed cannot be, see `partitions.divide`, or a column does not exist.
    """
    workers = scaling_config.num_workers
    workers = max(1, workers) if isinstance(workers, int) else workers[1]
    to_read = {name: dataset for name, dataset in datasets.items() if not isinstance(dataset, TFData)}
    with stored.quiet(), ThreadPoolExecutor(max(1, len(datasets))) as pool:
        calls = {
            name: pool.submit(_read, name, dataset, materialized(materialize, name), workers, specs or {})
            for name, dataset in to_read.items()
        }
        try:
            return {**datasets, **{name: call.result() for name, call in calls.items()}}
        except BaseException:
            streamed.close({name: call.result() for name, call in calls.items() if not call.exception()})
            raise


def check(materialize: Any, names: Collection[str]) -> None:
    """Raises ConfigError for an invalid `materialize`.

    Args:
        materialize: True keeps rows in the object store, and False streams them. "auto" streams datasets that do not
            fit there. Or a mapping of these by name of the dataset.
        names: Names of the run's datasets.
    """
    if isinstance(materialize, Mapping) and set(materialize) - set(names):
        raise ConfigError(
            f"materialize must name the run's datasets ({', '.join(sorted(names))})",
            repr(dict(materialize)),
            "Correct the name",
        )
    for value in materialize.values() if isinstance(materialize, Mapping) else [materialize]:
        if not isinstance(value, bool) and value != "auto":
            raise ConfigError('materialize must be True, False or "auto"', repr(value), "Choose one of these")


def materialized(materialize: bool | str | Mapping, name: str) -> bool | str:
    """Returns whether to keep one dataset in the object store: True, False or "auto"."""
    return materialize.get(name, "auto") if isinstance(materialize, Mapping) else materialize


def _read(
    name: str, dataset, materialize: bool | str, workers: int, specs: Mapping
) -> StoredDataset | streamed.StreamedDataset:
    with columns.of_dataset(name):
        needed = stored.projected(dataset, specs)
        records = None if materialize is True else record_files.opened(dataset, specs, materialize == "auto")
        return records or _read_named(name, needed, materialize, workers, specs)


def _read_named(
    name: str, dataset, materialize: bool | str, workers: int, specs: Mapping
) -> StoredDataset | streamed.StreamedDataset:
    with streamed.log_slow_reads(name):
        stream = _to_stream(name, dataset, materialize)
    if stream is None:
        return streamed.materialized(name, dataset, specs)
    pieces, sample = stream
    if sample is None:
        return StoredDataset([], [], list(dataset.schema().names))
    return streamed.open_stream(pieces, sample.column_names, sample.slice(0, _SAMPLE_ROWS), workers, name)


def _to_stream(name: str, dataset, materialize: bool | str) -> tuple[Partitions, pa.Table | None] | None:
    """Returns (pieces, first rows or None) of a dataset to stream; None for one to keep in the object store."""
    dag = ray_data.last_operator(dataset)
    # data in the object store is read from there in any case
    if materialize is True or (materialize == "auto" and isinstance(dag, ray_data.InputData | ray_data.AbstractFrom)):
        return None
    room = min(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    limit = _STORE_FRACTION * room
    size = partitions_module.source_bytes(dataset)
    if materialize == "auto" and size is not None and _PARQUET_EXPANSION * size <= limit:
        return None
    try:
        pieces = partitions_module.divide(dataset)
    except ConfigError as error:
        if materialize is False:
            raise
        if size is None or _PARQUET_EXPANSION * size > limit:
            total = "of unknown size" if size is None else f"of {_gib(size)} or more"
            logger.info(
                f"{name!r}, {total}, is kept in the object store of {_gib(room)} a node, as {error.received} cannot be "
                "streamed. Ray spills it to disk when the store is full. Write it as Parquet, and read that, to stream "
                "it"
            )
        return None
    blocks = _first(pieces)
    if materialize == "auto" and max(pieces.bytes, sum(b.nbytes for b in blocks) * len(pieces.rows)) <= limit:
        return None
    pieces = partitions_module.counted(pieces, lambda why: logger.info(f"the rows of {name!r} {why}"))
    sample = next((b for b in blocks if b.num_rows), None)
    if sample is None and pieces.rows:
        sample = next(b for b in _first(pieces) if b.num_rows)
    return pieces, sample


def _first(pieces: Partitions) -> list[pa.Table]:
    """Returns blocks of the first piece: all, or enough for an estimate, as a large file may be one piece."""
    tables: list[pa.Table] = []
    if not pieces.rows:
        return tables
    with ray_data.executed(pieces.dataset([0])) as bundles:
        for bundle in bundles:
            tables += [as_table(block) for block in ray.get(bundle.block_refs)]
            if sum(block.nbytes for block in tables) > _MEASURED_BYTES and any(block.num_rows for block in tables):
                break
    return tables


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def describe(name: str, dataset: StoredDataset | streamed.StreamedDataset | TFData, shuffle: str) -> str:
    """Returns a line on a dataset's storage and shuffle; for a pipeline, on the shards of its batches."""
    if isinstance(dataset, TFData):
        return f"{name}: {dataset.facts.text}"
    storage = "streamed in every epoch" if isinstance(dataset, streamed.StreamedDataset) else "kept in the object store"
    if isinstance(dataset, RecordBlocks):
        storage = "kept by each worker"
    shuffled = {"full": "shuffled", "window": "shuffled by windows", "none": "in its own order"}[shuffle]
    return f"{name}: {sum(dataset.rows):,} rows, {storage}, {shuffled}"
