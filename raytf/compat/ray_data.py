"""Modules, classes and attributes of Ray Data that are not public: its plans, whose source raytf exchanges for a part.

Ray Data has no view of a dataset as parts that can be executed alone. Parquet files are cut by their row groups; how a
part of a file is said differs between versions of Ray, and is told apart here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from ray.data._internal.compute import TaskPoolStrategy  # how many tasks of an operator run at once, by its plan

# Blocks, and rows of them, as plans have them: what is to be read by one task.
from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry, BlockSlice, RefBundle
from ray.data._internal.execution.operators.map_operator import MapOperator  # what a plan becomes: counted
from ray.data._internal.logical.interfaces import LogicalPlan, SourceOperator  # what a Dataset is made of
from ray.data._internal.logical.operators import (  # operators, told apart and made anew on another source
    AbstractFrom,
    AbstractMap,
    InputData,
    ListFiles,
    MapBatches,
    Read,
    ReadFiles,
)
from ray.data._internal.logical.optimizers import LogicalOptimizer, get_execution_plan  # filters go into their source
from ray.data._internal.pandas_block import PandasBlockSchema  # tells blocks of pandas from those of Arrow
from ray.data._internal.stats import DatasetStats  # a Dataset is made with one

from raytf.compat.versions import at_least, uses

if at_least("ray", 2, 60):
    from ray.data._internal.datasource_v2.common.listing_utils import _build_pruners  # which files a source leaves out
    from ray.data._internal.datasource_v2.formats.parquet.parquet_footer_types import (
        ParquetRowGroupChunkMetadata,  # which row groups of a file a task reads
    )
    from ray.data._internal.datasource_v2.interfaces.file_manifest import FileManifest  # what tasks are told to read
    from ray.data._internal.datasource_v2.interfaces.scanner import Scanner  # reads what a manifest says
else:
    from ray.data._internal.datasource_v2.chunkers.file_chunker import (
        ParquetFileChunkMetadata,  # which share of a file's row groups a task reads
    )
    from ray.data._internal.datasource_v2.listing.file_manifest import FileManifest  # what tasks are told to read
    from ray.data._internal.datasource_v2.listing.listing_utils import _build_pruners  # which files a source leaves out
    from ray.data._internal.datasource_v2.scanners.scanner import Scanner  # reads what a manifest says

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


@uses("ray.data.dataset:Dataset._logical_plan")
def plan_of(dataset) -> LogicalPlan:
    """The plan of a Dataset; nothing public has it."""
    return dataset._logical_plan


def last_operator(dataset):
    """The last operator of a Dataset; those before it are its `input_dependencies`."""
    return plan_of(dataset).dag


@uses("ray.data._internal.logical.interfaces.logical_operator:LogicalOperator._apply_transform")
def transformed(operator, change: Callable):
    """The operators up to this one, each as `change(operator)` gives it, from the source on."""
    return operator._apply_transform(change)


@contextlib.contextmanager
@uses("ray.data.dataset:Dataset._execute_to_iterator")
def executed(dataset) -> Iterator[Iterator[RefBundle]]:
    """The blocks of a Dataset as they come; what is still to be read is not when the context ends.

    `iter_internal_ref_bundles` goes on in the background when nobody asks any more.
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
    """(path, bytes) of the files of a source, in order: Ray's own listing asks for CPUs, and comes in any order."""
    more = {"partition_pruner": source.partition_pruner} if at_least("ray", 2, 60) else {}
    pruners = _build_pruners(source.file_extensions, source.partition_filter, **more)
    paths = pa.array(source.paths, pa.string())
    how = {"filesystem": source.filesystem, "pruners": pruners, "preserve_order": True}
    if at_least("ray", 2, 58):
        found = [(str(info.path), int(info.size)) for info in source.file_indexer.list_file_infos(paths, **how)]
    else:  # it lists parts of large files
        sizes: dict[str, int] = {}
        for manifest in source.file_indexer.list_files(paths, **how):
            for path, size in zip(manifest.paths, manifest.file_sizes, strict=True):
                sizes[str(path)] = sizes.get(str(path), 0) + int(size)
        found = list(sizes.items())
    given = [path for path, _ in found] == list(source.paths)
    return found if given else sorted(found)


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Neighbouring row groups of a Parquet file, which one task reads.

    Args:
        path, size: of the file, in bytes.
        groups: (index, rows, bytes) of each row group.
        of: how many row groups the file has.
    """

    path: str
    size: int
    groups: Sequence[tuple[int, int, int]]
    of: int


def manifest_of(runs: Sequence[RowGroups]) -> tuple[pa.Table, list[int]]:
    """(table, edges): rows edges[i] to edges[i + 1] of the table say what run i is."""
    rows = [_rows_of(run) for run in runs]
    flat = [(run, row) for run, its in zip(runs, rows, strict=True) for row in its]
    manifest = FileManifest.construct_manifest(
        paths=[run.path for run, _ in flat],
        sizes=[run.size for run, _ in flat],
        chunk_metadatas=[row for _, row in flat],
    )
    edges = [0]
    for its in rows:
        edges.append(edges[-1] + len(its))
    return manifest.as_block(), edges


if at_least("ray", 2, 60):

    def _rows_of(run: RowGroups) -> list:
        ids, rows, sizes = (tuple(column) for column in zip(*run.groups, strict=True))
        whole = {"num_rows": sum(rows), "uncompressed_size": sum(sizes), "fully_matched": True}
        return [ParquetRowGroupChunkMetadata(row_group_ids=ids, rg_rows=rows, rg_sizes=sizes, **whole)]

else:

    def _rows_of(run: RowGroups) -> list:
        # a share of a file there is one of equal numbers of row groups: of as many shares as groups, each is one
        return [ParquetFileChunkMetadata(chunk_idx=i, total_num_chunks=run.of) for i, _, _ in run.groups]


def numbered_manifest(count: int) -> pa.Table:
    """A table whose row i says "i", in the place of a file's size."""
    manifest = FileManifest.construct_manifest(
        paths=["piece"] * count, sizes=list(range(count)), chunk_metadatas=[None] * count
    )
    return manifest.as_block()


def rows_are_exact(scanner: Scanner) -> bool:
    """Whether a source gives as many rows as its files say: no filter or limit has become part of it."""
    if at_least("ray", 2, 60):
        return scanner.metadata_row_count_is_exact()
    return all(getattr(scanner, name, None) is None for name in ("predicate", "partition_predicate", "limit"))


@uses(
    "ray.data._internal.datasource_v2.formats.parquet.footer_file_indexer:FooterFileIndexer._num_actors",
    since=("ray", 2, 60),
)
def limit_footer_readers(source, most: int) -> None:
    """Has files listed with no more actors than `most`; Ray 2.60 starts 32 unless an environment variable says less."""
    indexer = getattr(source, "file_indexer", None)
    if hasattr(indexer, "_num_actors"):
        indexer._num_actors = min(indexer._num_actors, most)


@uses(
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._paths",
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._file_sizes",
    "ray.data.datasource.file_based_datasource:FileBasedDatasource._filesystem",
)
def listed_files(datasource) -> tuple[list[str], list[int], Any] | None:
    """(names, bytes of each, file system) of a datasource of files of Ray's first kind; None of others."""
    if not (hasattr(datasource, "_paths") and hasattr(datasource, "_file_sizes")):
        return None
    return list(datasource._paths()), [int(size or 0) for size in datasource._file_sizes()], datasource._filesystem
