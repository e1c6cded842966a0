"""Private parts of Ray Data: its plans, in which raytf replaces the source by a part of it.

Ray Data has no view of a dataset as parts that can be executed alone. Parquet files are split by their row groups.
Versions of Ray describe a part of a file differently, which is handled here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from ray.data._internal.compute import TaskPoolStrategy  # number of an operator's concurrent tasks, by its plan

# Blocks, and rows of them, as in plans: the input of one task.
from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry, BlockSlice, RefBundle
from ray.data._internal.execution.operators.map_operator import MapOperator  # a plan's executable operators: counted
from ray.data._internal.logical.interfaces import LogicalPlan, SourceOperator  # the plan of a Dataset
from ray.data._internal.logical.operators import (  # operators, distinguished and rebuilt on another source
    AbstractFrom,
    AbstractMap,
    InputData,
    ListFiles,
    MapBatches,
    Read,
    ReadFiles,
)

# moves filters into their source
from ray.data._internal.logical.optimizers import LogicalOptimizer, get_execution_plan
from ray.data._internal.pandas_block import PandasBlockSchema  # distinguishes blocks of pandas from those of Arrow
from ray.data._internal.stats import DatasetStats  # an argument of a Dataset's constructor

from raytf.compat.versions import at_least, uses_private

if at_least("ray", 2, 60):
    from ray.data._internal.datasource_v2.common.listing_utils import _build_pruners  # which files a source omits
    from ray.data._internal.datasource_v2.formats.parquet.parquet_footer_types import (
        ParquetRowGroupChunkMetadata,  # which row groups of a file a task reads
    )
    from ray.data._internal.datasource_v2.interfaces.file_manifest import FileManifest  # the input of tasks
    from ray.data._internal.datasource_v2.interfaces.scanner import Scanner  # reads the files of a manifest
else:
    from ray.data._internal.datasource_v2.chunkers.file_chunker import (
        ParquetFileChunkMetadata,  # which share of a file's row groups a task reads
    )
    from ray.data._internal.datasource_v2.listing.file_manifest import FileManifest  # the input of tasks
    from ray.data._internal.datasource_v2.listing.listing_utils import _build_pruners  # which files a source omits
    from ray.data._internal.datasource_v2.scanners.scanner import Scanner  # reads the files of a manifest

__all__ = [
    "AbstractFrom",
    "AbstractMap",
    "BlockEntry",
    "BlockSlice",
    "DatasetStats",
    "FileManifest",
    "InputData",
    "ListFiles",
    "LogicalOptimizer",
    "LogicalPlan",
    "MapBatches",
    "MapOperator",
    "PandasBlockSchema",
    "Read",
    "ReadFiles",
    "RefBundle",
    "Scanner",
    "SourceOperator",
    "TaskPoolStrategy",
    "get_execution_plan",
]


# ------------------------------------------------------------------------------------------ plans


@uses_private("ray.data.dataset:Dataset._logical_plan")
def plan_of(dataset) -> LogicalPlan:
    """Returns the plan of a Dataset; no public API."""
    return dataset._logical_plan


def last_operator(dataset):
    """Returns the last operator of a Dataset; earlier ones are its `input_dependencies`."""
    return plan_of(dataset).dag


@uses_private("ray.data._internal.logical.interfaces.logical_operator:LogicalOperator._apply_transform")
def transformed(operator, change: Callable):
    """Returns the operators up to this one with `change(operator)` applied to each, from the source on."""
    return operator._apply_transform(change)


@contextlib.contextmanager
@uses_private("ray.data.dataset:Dataset._execute_to_iterator")
def executed(dataset) -> Iterator[Iterator[RefBundle]]:
    """Yields the blocks of a Dataset as they arrive; stops reading at the end of the context.

    `iter_internal_ref_bundles` continues in the background after its last use.
    """
    bundles, _, executor = dataset._execute_to_iterator(capture_executor=False)
    try:
        yield bundles
    finally:
        if executor is not None:
            with contextlib.suppress(Exception):  # it may have ended by itself
                executor.shutdown(force=True)


# ------------------------------------------------------------------------------------------ files and their row groups


def files_of(source: ListFiles) -> list[tuple[str, int]]:
    """Returns (path, bytes) of a source's files in order: Ray's own listing requires CPUs, and has any order."""
    more = {"partition_pruner": source.partition_pruner} if at_least("ray", 2, 60) else {}
    pruners = _build_pruners(source.file_extensions, source.partition_filter, **more)
    paths = pa.array(source.paths, pa.string())
    how = {"filesystem": source.filesystem, "pruners": pruners, "preserve_order": True}
    if at_least("ray", 2, 58):
        files = [(str(info.path), int(info.size)) for info in source.file_indexer.list_file_infos(paths, **how)]
    else:  # lists parts of large files
        sizes: dict[str, int] = {}
        for manifest in source.file_indexer.list_files(paths, **how):
            for path, size in zip(manifest.paths, manifest.file_sizes, strict=True):
                sizes[str(path)] = sizes.get(str(path), 0) + int(size)
        files = list(sizes.items())
    in_given_order = [path for path, _ in files] == list(source.paths)
    return files if in_given_order else sorted(files)


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Consecutive row groups of a Parquet file, which one task reads.

    Args:
        path, size: Path and size of the file, in bytes.
        groups: (index, rows, bytes) of each row group.
        group_count: Number of row groups of the file.
    """

    path: str
    size: int
    groups: Sequence[tuple[int, int, int]]
    group_count: int


def manifest_of(runs: Sequence[RowGroups]) -> tuple[pa.Table, list[int]]:
    """Returns (table, edges): rows edges[i] to edges[i + 1] of the table describe run i."""
    rows = [_rows_of(run) for run in runs]
    flat = [(run, row) for run, rows_of_run in zip(runs, rows, strict=True) for row in rows_of_run]
    manifest = FileManifest.construct_manifest(
        paths=[run.path for run, _ in flat],
        sizes=[run.size for run, _ in flat],
        chunk_metadatas=[row for _, row in flat],
    )
    edges = [0]
    for rows_of_run in rows:
        edges.append(edges[-1] + len(rows_of_run))
    return manifest.as_block(), edges


if at_least("ray", 2, 60):

    def _rows_of(run: RowGroups) -> list:
        ids, rows, sizes = (tuple(column) for column in zip(*run.groups, strict=True))
        whole = {"num_rows": sum(rows), "uncompressed_size": sum(sizes), "fully_matched": True}
        return [ParquetRowGroupChunkMetadata(row_group_ids=ids, rg_rows=rows, rg_sizes=sizes, **whole)]

else:

    def _rows_of(run: RowGroups) -> list:
        # in these versions a share has equal numbers of row groups: with as many shares as groups, each is one
        return [ParquetFileChunkMetadata(chunk_idx=i, total_num_chunks=run.group_count) for i, _, _ in run.groups]


def numbered_manifest(count: int) -> pa.Table:
    """Returns a table whose row i contains i as the size of a file."""
    manifest = FileManifest.construct_manifest(
        paths=["piece"] * count, sizes=list(range(count)), chunk_metadatas=[None] * count
    )
    return manifest.as_block()


def rows_are_exact(scanner: Scanner) -> bool:
    """Returns whether a source yields as many rows as its files contain: it includes no filter or limit."""
    if at_least("ray", 2, 60):
        return scanner.metadata_row_count_is_exact()
    return all(getattr(scanner, name, None) is None for name in ("predicate", "partition_predicate", "limit"))


@uses_private(
    "ray.data._internal.datasource_v2.formats.parquet.footer_file_indexer:FooterFileIndexer._num_actors",
    added_in=("ray", 2, 60),
)
def limit_footer_readers(source, most: int) -> None:
    """Limits the actors that list files to `most`; Ray 2.60 starts 32 unless an environment variable sets fewer."""
    indexer = getattr(source, "file_indexer", None)
    if hasattr(indexer, "_num_actors"):
        indexer._num_actors = min(indexer._num_actors, most)


@uses_private(
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._paths",
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._file_sizes",
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._filesystem",
)
def listed_files(datasource) -> tuple[list[str], list[int], Any] | None:
    """Returns (names, bytes of each, file system) of a file-based datasource of Ray's first kind; None for others."""
    if not (hasattr(datasource, "_paths") and hasattr(datasource, "_file_sizes")):
        return None
    return list(datasource._paths()), [int(size or 0) for size in datasource._file_sizes()], datasource._filesystem
