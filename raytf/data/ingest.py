"""Where the rows of a run's datasets are kept: in the object store, or read anew in every epoch. Driver side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import ray

from raytf import logs
from raytf.compat import ray_data
from raytf.data import columns, stored, streamed
from raytf.data import partitions as partitions_module
from raytf.data.partitions import Partitions
from raytf.data.stored import StoredDataset, as_table
from raytf.data.tf_data import TFData
from raytf.errors import ConfigError

logger = logs.get_logger(__name__)

# Of the smallest node's object store: every node may come to hold every block, beside what Ray keeps there.
_STORE_FRACTION = 0.3
# What sources hold is about so much larger once it is decoded; only says which datasets are looked at more closely.
_PARQUET_EXPANSION = 8
# Bytes of the first piece that are looked at, at most.
_MEASURED_BYTES = 256 << 20
_SAMPLE_ROWS = 1000


def read_all(
    datasets: Mapping, materialize: bool | str | Mapping, scaling_config, specs: Mapping | None = None
) -> dict[str, StoredDataset | streamed.StreamedDataset | TFData]:
    """Each of a run's datasets, at the same time: most of a small one's time is Ray's start-up.

    Args:
        datasets: `ray.data.Dataset` by name, or `TFData`, which the workers read.
        materialize: see `check`.
        scaling_config: the run's; reading must go on beside its workers.
        specs: parsed columns by role: no others are read; None reads all.

    Raises:
        ConfigError: a dataset that has to be streamed cannot be, see `partitions.divide`, or a column is not there.
    """
    workers = scaling_config.num_workers
    workers = max(1, workers) if isinstance(workers, int) else workers[1]
    here = {name: dataset for name, dataset in datasets.items() if not isinstance(dataset, TFData)}
    with stored.quiet(), ThreadPoolExecutor(max(1, len(datasets))) as pool:
        calls = [
            pool.submit(
                columns.of_dataset(name)(_read), name, dataset, materialized(materialize, name), workers, specs or {}
            )
            for name, dataset in here.items()
        ]
        return {**datasets, **{name: call.result() for name, call in zip(here, calls, strict=True)}}


def check(materialize: Any, names: Collection[str]) -> None:
    """Raises ConfigError for what `materialize` cannot be.

    Args:
        materialize: True keeps rows in the object store, False streams them, and "auto" streams what does not fit
            there; or a mapping from names of datasets to these.
        names: of the run's datasets.
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
    """Whether one dataset is to be kept in the object store: True, False or "auto"."""
    return materialize.get(name, "auto") if isinstance(materialize, Mapping) else materialize


def _read(
    name: str, dataset, materialize: bool | str, workers: int, specs: Mapping
) -> StoredDataset | streamed.StreamedDataset:
    with columns.of_dataset(name):
        return _read_named(name, stored.projected(dataset, specs), materialize, workers, specs)


def _read_named(
    name: str, dataset, materialize: bool | str, workers: int, specs: Mapping
) -> StoredDataset | streamed.StreamedDataset:
    with streamed.watched(name):
        found = _to_stream(name, dataset, materialize)
    if found is None:
        return streamed.materialized(name, dataset, specs)
    pieces, sample = found
    if sample is None:
        return StoredDataset([], [], list(dataset.schema().names))
    return streamed.open_stream(pieces, sample.column_names, sample.slice(0, _SAMPLE_ROWS), workers, name)


def _to_stream(name: str, dataset, materialize: bool | str) -> tuple[Partitions, pa.Table | None] | None:
    """The pieces of a dataset that is to be streamed, and rows of it if there are any."""
    dag = ray_data.last_operator(dataset)
    # what lies in the object store is read from there anyhow
    if materialize is True or (materialize == "auto" and isinstance(dag, ray_data.InputData | ray_data.AbstractFrom)):
        return None
    room = min(node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"])
    fits = _STORE_FRACTION * room
    size = partitions_module.source_bytes(dataset)
    if materialize == "auto" and size is not None and _PARQUET_EXPANSION * size <= fits:
        return None
    try:
        pieces = partitions_module.divide(dataset)
    except ConfigError as error:
        if materialize is False:
            raise
        if size is None or _PARQUET_EXPANSION * size > fits:
            about = "of unknown size" if size is None else f"of {_gib(size)} or more"
            logger.info(
                f"{name!r}, {about}, is kept in the object store of {_gib(room)} a node, which goes to disk when it is "
                f"full, as {error.received} cannot be streamed"
            )
        return None
    blocks = _first(pieces)
    if materialize == "auto" and max(pieces.bytes, sum(b.nbytes for b in blocks) * len(pieces.rows)) <= fits:
        return None
    pieces = partitions_module.counted(pieces, lambda why: logger.info(f"the rows of {name!r} {why}"))
    sample = next((b for b in blocks if b.num_rows), None)
    if sample is None and pieces.rows:
        sample = next(b for b in _first(pieces) if b.num_rows)
    return pieces, sample


def _first(pieces: Partitions) -> list[pa.Table]:
    """Blocks of the first piece: all, or as many as are needed to guess; a large file may be one piece."""
    found: list[pa.Table] = []
    if not pieces.rows:
        return found
    with ray_data.executed(pieces.dataset([0])) as bundles:
        for bundle in bundles:
            found += [as_table(block) for block in ray.get(bundle.block_refs)]
            if sum(block.nbytes for block in found) > _MEASURED_BYTES and any(block.num_rows for block in found):
                break
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def describe(name: str, found: StoredDataset | streamed.StreamedDataset | TFData, shuffle: str) -> str:
    """A line that says where a dataset is kept, and how it is shuffled; of a pipeline, how its batches are shared."""
    if isinstance(found, TFData):
        return f"{name}: {found.looked.text}"
    where = "streamed in every epoch" if isinstance(found, streamed.StreamedDataset) else "kept in the object store"
    shuffled = {"full": "shuffled", "window": "shuffled by windows", "none": "in its own order"}[shuffle]
    return f"{name}: {sum(found.rows):,} rows, {where}, {shuffled}"
