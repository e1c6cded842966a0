"""A Ray Dataset cut into pieces that can be executed alone and in any order: blocks, or row groups of Parquet files.

Ray Data has no such view; this works on its logical plans, whose source is exchanged for a part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import DataContext, Dataset
from ray.data._internal.datasource_v2.formats.parquet.parquet_footer_types import ParquetRowGroupChunkMetadata
from ray.data._internal.datasource_v2.interfaces.file_manifest import FileManifest
from ray.data._internal.execution.interfaces.ref_bundle import BlockEntry, RefBundle
from ray.data._internal.logical.interfaces import LogicalPlan, SourceOperator
from ray.data._internal.logical.operators import AbstractFrom, AbstractMap, InputData, ListFiles, ReadFiles
from ray.data._internal.stats import DatasetStats
from ray.data.block import BlockAccessor, BlockMetadataWithSchema

from raytf.errors import ConfigError

# Row groups of a file are read together up to this size, uncompressed: a task each.
_PIECE_BYTES = 16 << 20
_COUNTED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of a dataset.

    Args:
        rows: rows of each piece.
        bytes: of all rows as far as the source tells: decoded they may be more.
        parts: what each piece is made from: a manifest of row groups (an Arrow table), or a bundle of blocks.
        dag: the dataset's last operator.
        context: its options.
    """

    rows: tuple[int, ...]
    bytes: int
    parts: list = dataclasses.field(repr=False)
    dag: object = dataclasses.field(repr=False)
    context: DataContext = dataclasses.field(repr=False)

    def dataset(self, indices: Sequence[int], num_cpus: float | None = None) -> Dataset:
        """The dataset of some pieces, in this order.

        Args:
            indices: of the pieces.
            num_cpus: CPUs of each task; None leaves them as they are.
        """
        chosen = [self.parts[i] for i in indices]
        first = InputData([_bundle(part) if isinstance(part, pa.Table) else part for part in chosen])
        return _dataset(_exchanged(self.dag, first, num_cpus), self.context)


def cut(dataset: Dataset) -> Pieces:
    """The pieces of a dataset.

    Where an operator may change the number of rows (filter, flat_map, and map_batches unless it is told
    `udf_modifying_row_count=False`), all pieces are executed once, to count.

    Raises:
        ConfigError: an operator that needs all rows at once (sort, shuffle, join, limit, ...), or a source that cannot
            be read in parts.
    """
    dag, context = dataset._logical_plan.dag, dataset.context
    operators = _chain(dag)
    for operator in operators[:-1]:
        if isinstance(operator, ReadFiles):
            continue
        if not isinstance(operator, AbstractMap):
            raise _not_cut(f"the operator {operator.name}")
    source = operators[-1]
    if isinstance(source, ListFiles):
        parts, rows, size = _row_groups(source, context)
    elif isinstance(source, InputData | AbstractFrom):
        bundles = [one for bundle in source.output_data() for one in _single(bundle)]
        parts, rows = bundles, [bundle.num_rows() for bundle in bundles]
        size = sum(bundle.size_bytes() for bundle in bundles)
    else:
        raise _not_cut(f"the source {source.name}")
    found = Pieces(tuple(rows), size, parts, dag, context)
    if any(op.can_modify_num_rows for op in operators[:-1] if not isinstance(op, ReadFiles)):
        with ThreadPoolExecutor(_COUNTED_AT_ONCE) as pool:
            rows = list(pool.map(lambda i: _count(found.dataset([i])), range(len(parts))))
    kept = [i for i, n in enumerate(rows) if n]
    return dataclasses.replace(found, rows=tuple(rows[i] for i in kept), parts=[parts[i] for i in kept])


def with_cpus(dataset: Dataset, num_cpus: float) -> Dataset:
    """The same dataset, whose tasks that follow one another without a shuffle take `num_cpus` CPUs each."""

    def changed(operator):
        inputs = operator.input_dependencies
        if not isinstance(operator, AbstractMap) or len(inputs) != 1:
            return operator
        return _changed(operator, changed(inputs[0]), num_cpus)

    return _dataset(changed(dataset._logical_plan.dag), dataset.context)


def _not_cut(received: str) -> ConfigError:
    return ConfigError(
        "A streamed dataset must be Parquet files or blocks, followed by operators that take rows or batches",
        received,
        "Write the result to Parquet once and read that, or use storage='object_store' if it fits",
    )


def _count(dataset: Dataset) -> int:
    return sum(bundle.num_rows() for bundle in dataset.iter_internal_ref_bundles())


def _chain(operator) -> list:
    """The operators from the last to the source."""
    found = [operator]
    while not isinstance(found[-1], SourceOperator):
        inputs = found[-1].input_dependencies
        if len(inputs) != 1:
            raise _not_cut(f"the operator {found[-1].name}")
        found.append(inputs[0])
    return found


def _exchanged(operator, source, num_cpus: float | None):
    """The same operators on another source."""
    if isinstance(operator, SourceOperator):
        return source
    return _changed(operator, _exchanged(operator.input_dependencies[0], source, num_cpus), num_cpus)


def _changed(operator, before, num_cpus: float | None):
    changes = {"input_dependencies": [before]}
    if num_cpus is not None and not operator.ray_remote_args.get("num_gpus"):
        changes["ray_remote_args"] = {**operator.ray_remote_args, "num_cpus": num_cpus}
    return dataclasses.replace(operator, **changes)


def _dataset(dag, context: DataContext) -> Dataset:
    context = context.copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    return Dataset(LogicalPlan(dag, context), context, DatasetStats(metadata={}, parent=None))


def _bundle(table: pa.Table) -> RefBundle:
    """A table in the object store; `ray.data.from_arrow` would ask for a CPU to look at it."""
    metadata = BlockAccessor.for_block(table).get_metadata()
    described = BlockMetadataWithSchema.from_metadata(metadata, schema=table.schema)
    return RefBundle([BlockEntry(ray.put(table), described)], owns_blocks=False, schema=table.schema)


def _single(bundle) -> list:
    """A bundle of each block."""
    return [type(bundle)([block], owns_blocks=False, schema=bundle.schema) for block in bundle.blocks]


def _row_groups(source: ListFiles, context: DataContext):
    """Manifests of neighbouring row groups, their rows, and the bytes of all."""
    parts, rows, total = [], [], 0
    found = []
    for bundle in _dataset(source, context).iter_internal_ref_bundles():
        for ref in bundle.block_refs:
            manifest = FileManifest(ray.get(ref))
            found += zip(manifest.paths, manifest.file_sizes, manifest.file_chunk_metadatas, strict=True)
    if any(chunk is None or chunk.get("row_group_ids") is None for _, _, chunk in found):
        raise _not_cut("files without row groups")
    # the order of listing is that of threads
    found.sort(key=lambda entry: (entry[0], tuple(entry[2]["row_group_ids"])))
    with ThreadPoolExecutor(_COUNTED_AT_ONCE) as pool:
        footers = pool.map(lambda entry: _footer(source, entry[0]), found)
    for (path, file_size, chunk), footer in zip(found, footers, strict=True):
        for run in _runs(_units(chunk, footer)):
            ids, counts, sizes = (tuple(column) for column in zip(*run, strict=True))
            total += sum(sizes)
            metadata = ParquetRowGroupChunkMetadata(
                row_group_ids=ids,
                num_rows=sum(counts),
                uncompressed_size=sum(sizes),
                fully_matched=bool(chunk["fully_matched"]),
                rg_sizes=sizes,
                rg_rows=counts,
            )
            manifest = FileManifest.construct_manifest(
                paths=[str(path)], sizes=[int(file_size)], chunk_metadatas=[metadata]
            )
            parts.append(manifest.as_block())
            rows.append(sum(counts))
    return parts, rows, int(total)


def _footer(source: ListFiles, path: str):
    return pq.read_metadata(path, filesystem=source.filesystem)


def _units(chunk, footer) -> list[tuple[int, int, int]]:
    """(row group, rows, bytes) of each row group of a chunk, which the listing may have put together."""
    groups = [footer.row_group(int(i)) for i in chunk["row_group_ids"]]
    each = zip(chunk["row_group_ids"], groups, strict=True)
    return [(int(i), group.num_rows, group.total_byte_size) for i, group in each]


def _runs(units: list) -> list[list]:
    """Neighbouring units put together up to `_PIECE_BYTES`, at least one each."""
    runs, size = [], 0
    for unit in units:
        if not runs or size + unit[2] > _PIECE_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(unit)
        size += unit[2]
    return runs
