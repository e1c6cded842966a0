"""Divides a Ray Dataset into pieces that are executed independently and in any order.

Pieces are blocks, row groups of Parquet files, or read tasks of any other source. Ray Data has no such view. This
module works on its logical plans, and replaces the source by a part of it. No task waits for a free CPU. Workers,
servers, trials and other drivers may hold all CPUs during the reading.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import DataContext, Dataset
from ray.data.block import BlockAccessor, BlockMetadataWithSchema

from raytf.compat import ray_data
from raytf.compat.ray_data import (
    AbstractFrom,
    AbstractMap,
    BlockEntry,
    BlockSlice,
    DatasetStats,
    FileManifest,
    InputData,
    ListFiles,
    LogicalOptimizer,
    LogicalPlan,
    MapBatches,
    MapOperator,
    Read,
    ReadFiles,
    RefBundle,
    Scanner,
    SourceOperator,
    TaskPoolStrategy,
    get_execution_plan,
    last_operator,
)
from raytf.errors import ConfigError

# Upper bound of a piece's uncompressed bytes, which one task reads.
_PIECE_BYTES = 16 << 20
# Pieces of one execution: Ray Data first inspects all inputs, in 0.2 s for these and in 10 s for 65,536.
AT_ONCE = 1024
_FOOTERS_AT_ONCE = 16
_COUNTED_AT_ONCE = 4
# Read tasks of one object: an object for each would take 1 ms, and each task would load a single object for all.
_TASKS_AT_ONCE = 64
# Number of read tasks for a source of unknown size.
_UNKNOWN_TASKS = 200


@dataclasses.dataclass(frozen=True)
class Table:
    """Parts that are rows of one table in the object store, which lists the data to read for each piece.

    Args:
        entry: The table.
        schema: Schema of the table.
        edges: Edges of the parts; part i is rows edges[i] to edges[i + 1].
    """

    entry: BlockEntry
    schema: pa.Schema
    edges: Sequence[int]

    @staticmethod
    def from_arrow(table: pa.Table, edges: Sequence[int] | None = None) -> Table:
        """Puts a table into the object store, with each row as a part unless `edges` are given.

        `ray.data.from_arrow` would request a CPU to inspect it.
        """
        metadata = BlockAccessor.for_block(table).get_metadata()
        described = BlockMetadataWithSchema.from_metadata(metadata, schema=table.schema)
        edges = range(table.num_rows + 1) if edges is None else edges
        return Table(BlockEntry(ray.put(table), described), table.schema, edges)

    def bundle(self, first: int, stop: int) -> RefBundle:
        """Returns the neighbouring parts that one task reads."""
        rows = BlockSlice(self.edges[first], self.edges[stop])
        return RefBundle((self.entry,), self.schema, owns_blocks=False, slices=(rows,))


@dataclasses.dataclass(frozen=True)
class Bundles:
    """Parts that are blocks in the object store."""

    bundles: list[RefBundle]

    def bundle(self, first: int, stop: int) -> RefBundle:
        return self.bundles[first]


@dataclasses.dataclass(frozen=True)
class Partitions:
    """Parts of a dataset.

    Args:
        rows: Number of rows of each piece; None before they are counted.
        bytes: Bytes of all rows as reported by the source; decoded rows may be larger.
        numbers: Index of each piece among the source's parts.
        parts: Parts of the source.
        dag: The dataset's last operator, whose source is replaced by parts.
        context: Options of the dataset.
    """

    rows: tuple[int | None, ...]
    bytes: int
    numbers: np.ndarray = dataclasses.field(repr=False)
    parts: Table | Bundles = dataclasses.field(repr=False)
    dag: object = dataclasses.field(repr=False)
    context: DataContext = dataclasses.field(repr=False)

    def dataset(self, indices: Sequence[int]) -> Dataset:
        """Returns the dataset of some pieces, in this order. Each is read and mapped independently of the others.

        Tasks request no CPU. At most as many run at once as the cluster has CPUs, free or not.
        """
        return _dataset(_exchanged(self.dag, InputData(self._bundles(indices)), _tasks(len(indices))), self.context)

    def _bundles(self, indices: Sequence[int]) -> list[RefBundle]:
        numbers = self.numbers[np.asarray(indices, np.int64)].tolist()
        return [self.parts.bundle(number, number + 1) for number in numbers]


def cut(dataset: Dataset) -> Partitions:
    """Returns the pieces of a dataset with their numbers of rows, see `divide` and `counted`."""
    return counted(divide(dataset))


def divide(dataset: Dataset) -> Partitions:
    """Returns the pieces of a dataset.

    Their numbers of rows are unknown if the source does not report them (CSV, JSON, text, ...). They are also unknown
    if an operator may change them (filter, flat_map, and map_batches unless `udf_modifying_row_count=False`).

    Args:
        dataset: A `ray.data.Dataset` whose operators process rows or batches, from any source that Ray Data reads. Only
            Parquet files are split.

    Raises:
        ConfigError: An operator needs all rows at once (sort, shuffle, join, limit, ...).
    """
    dag, context = last_operator(dataset), dataset.context
    if isinstance(_chain(dag)[-1], Read):  # pushes supported filters and projections down into the source
        dag = LogicalOptimizer().optimize(LogicalPlan(dag, context)).dag
    operators = _chain(dag)
    for operator in operators[:-1]:
        if not isinstance(operator, AbstractMap):
            raise _not_cut(f"the operator {operator.name}")
    source = operators[-1]
    if isinstance(source, ListFiles):
        parts, rows, size = _row_groups(source)
        if not all(ray_data.rows_are_exact(op.scanner) for op in operators if isinstance(op, ReadFiles)):
            rows = [None] * len(rows)
    elif isinstance(source, InputData | AbstractFrom):
        parts = Bundles([single for bundle in source.output_data() for single in _single(bundle)])
        rows = [bundle.num_rows() for bundle in parts.bundles]
        size = sum(bundle.size_bytes() for bundle in parts.bundles)
    elif isinstance(source, Read):
        parts, rows, size, read = _read_tasks(source, context)
        dag = _exchanged(dag, read)
    else:
        raise _not_cut(f"the source {source.name}")
    if any(op.can_modify_num_rows for op in operators[:-1] if not isinstance(op, ReadFiles)):
        rows = [None] * len(rows)
    return Partitions(tuple(rows), size, np.arange(len(rows)), parts, dag, context)


def counted(pieces: Partitions, say: Callable[[str], None] = lambda text: None) -> Partitions:
    """Returns the pieces without empty ones. If rows are unknown, it executes the dataset once to count them.

    Args:
        pieces: Pieces of a dataset.
        say: Function that receives a clause about the count.
    """
    rows = pieces.rows
    if None in rows:
        say(f"are counted once, as {_uncounted(_chain(pieces.dag))} does not report how many there are")
        rows = _counted(pieces)
    filled = np.flatnonzero(rows)
    return dataclasses.replace(pieces, rows=tuple(rows[i] for i in filled), numbers=pieces.numbers[filled])


def unbound(dataset: Dataset) -> Dataset:
    """Returns the dataset with read and map tasks that request no CPU, so they do not wait for one.

    Operators that need all rows at once (sort, join, ...) request CPUs as before.
    """
    tasks = _tasks()

    def changed(operator):
        if isinstance(operator, ListFiles):  # Ray's own listing takes CPUs
            parts, rows, _ = _row_groups(operator)
            edges = _edges(len(rows))
            return InputData([parts.bundle(a, b) for a, b in zip(edges, edges[1:], strict=False)])
        return _without_cpus(operator, tasks) if isinstance(operator, AbstractMap) else operator

    return _dataset(ray_data.transformed(last_operator(dataset), changed), dataset.context)


def source_bytes(dataset: Dataset) -> int | None:
    """Returns the approximate bytes of a dataset's sources, of files as stored; None if one is unknown."""
    operators = last_operator(dataset).post_order_iter()
    sizes = [_source_bytes(operator) for operator in operators if isinstance(operator, SourceOperator)]
    return None if None in sizes else sum(sizes)


def _source_bytes(source) -> int | None:
    if isinstance(source, ListFiles):
        return sum(size for _, size in ray_data.files_of(source))
    if isinstance(source, Read):
        return _estimate(source)
    known = source.infer_metadata().size_bytes
    return None if known is None else int(known)


def _estimate(source: Read) -> int | None:
    """Returns the datasource's own estimate of its bytes in memory, or None."""
    size = source.datasource_or_legacy_reader.estimate_inmemory_data_size()
    if size is None and not source.datasource.should_create_reader:
        size = source.infer_metadata().size_bytes
    return None if size is None else int(size)


def _not_cut(received: str) -> ConfigError:
    return ConfigError(
        "A streamed dataset must be a source that Ray Data reads, followed by operators that take rows or batches",
        received,
        "Write the result to Parquet once and read that, or use materialize=True if it fits",
    )


def _tasks(parts: float = math.inf) -> float:
    """Returns how many tasks may read `parts` parts at once: at most the cluster's CPUs, free or not."""
    return min(ray.cluster_resources().get("CPU", 1), parts)


def _edges(count: int) -> list[int]:
    """Returns the edges of up to `AT_ONCE` parts of about equal size."""
    parts = min(count, AT_ONCE)
    return [count * i // parts for i in range(parts + 1)] if count else []


def _chain(operator) -> list:
    """Returns the operators from the last one to the source."""
    operators = [operator]
    while not isinstance(operators[-1], SourceOperator):
        inputs = operators[-1].input_dependencies
        if len(inputs) != 1:
            raise _not_cut(f"the operator {operators[-1].name}")
        operators.append(inputs[0])
    return operators


def _exchanged(operator, source, tasks: float | None = None):
    """Returns the operators with another source; if `tasks` is given, they request no CPUs."""
    if isinstance(operator, SourceOperator):
        return source
    upstream = _exchanged(operator.input_dependencies[0], source, tasks)
    changed = dataclasses.replace(operator, input_dependencies=[upstream])
    return changed if tasks is None else _without_cpus(_without_bundling(changed), tasks)


def _without_cpus(operator, tasks: float):
    """Returns the operator with tasks that request no CPU; `tasks` run at once, or fewer if each used several CPUs."""
    cpus = operator.ray_remote_args.get("num_cpus") or 1
    changes: dict[str, Any] = {"ray_remote_args": {**operator.ray_remote_args, "num_cpus": 0}}
    if isinstance(operator.compute, TaskPoolStrategy) and operator.compute.size is None:
        changes["compute"] = TaskPoolStrategy(max(1, int(tasks // cpus)))
    return dataclasses.replace(operator, **changes)


def _without_bundling(operator):
    """Returns the operator with batches that end with each block, so that the order of pieces changes no row."""
    settable = {field.name for field in dataclasses.fields(operator) if field.init}
    if "min_rows_per_bundled_input" not in settable:
        return operator
    return dataclasses.replace(operator, min_rows_per_bundled_input=None)


def _dataset(dag, context: DataContext) -> Dataset:
    context = context.copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    return Dataset(LogicalPlan(dag, context), context, DatasetStats(metadata={}, parent=None))


def _single(bundle) -> list:
    """Returns a bundle for each block."""
    return [type(bundle)([block], owns_blocks=False, schema=bundle.schema) for block in bundle.blocks]


def _row_groups(source: ListFiles) -> tuple[Table, list[int], int]:
    """Returns (parts of neighbouring row groups, the rows of each, the bytes of all)."""
    files = ray_data.files_of(source)
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        footers = list(pool.map(lambda file: pq.read_metadata(file[0], filesystem=source.filesystem), files))
    runs = []
    for (path, size), footer in zip(files, footers, strict=True):
        groups = [(i, g.num_rows, g.total_byte_size) for i, g in _groups(footer)]
        runs += [ray_data.RowGroups(path, size, run, len(groups)) for run in _runs(groups)]
    rows = [sum(count for _, count, _ in run.groups) for run in runs]
    total = sum(length for run in runs for _, _, length in run.groups)
    return Table.from_arrow(*ray_data.manifest_of(runs)), rows, int(total)


def _groups(footer) -> Iterator[tuple[int, Any]]:
    return ((i, footer.row_group(i)) for i in range(footer.num_row_groups))


def _runs(units: list) -> list[list]:
    """Groups neighbouring units up to `_PIECE_BYTES`, with at least one in each group."""
    runs, size = [], 0
    for unit in units:
        if not runs or size + unit[2] > _PIECE_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(unit)
        size += unit[2]
    return runs


def _read_tasks(source: Read, context: DataContext):
    """Returns a datasource's (parts, rows of each or None, bytes of all, the operator that reads them)."""
    size = _estimate(source)
    wanted = _UNKNOWN_TASKS if size is None else math.ceil(size / _PIECE_BYTES)
    tasks = source.datasource_or_legacy_reader.get_read_tasks(
        max(1, wanted, source.parallelism), per_task_row_limit=source.per_block_limit, data_context=context
    )
    starts = range(0, len(tasks), _TASKS_AT_ONCE)
    scanner = _Tasks([ray.put(tasks[i : i + _TASKS_AT_ONCE]) for i in starts], source.infer_schema())
    read = ReadFiles(
        datasource_name=source.datasource.get_name(),
        scanner=scanner,
        schema=scanner.read_schema(),
        parallelism=-1,
        ray_remote_args=source.ray_remote_args,
        compute=source.compute,
        input_dependencies=[InputData([])],
    )
    return (
        Table.from_arrow(ray_data.numbered_manifest(len(tasks))),
        [task.metadata.num_rows for task in tasks],
        size or 0,
        read,
    )


class _Tasks(Scanner):
    """Adapter of a `Read` source's tasks to Ray Data's `ReadFiles`; a file's "size" is the index of a task.

    Args:
        tasks: Lists of `_TASKS_AT_ONCE` tasks, in the object store.
        schema: Schema of the rows, if it is known.
    """

    def __init__(self, tasks: list, schema):
        self._tasks = tasks
        self._schema = schema if isinstance(schema, pa.Schema) else pa.schema([])

    def read_schema(self):
        return self._schema

    def create_reader(self):
        return self

    def read(self, manifest: FileManifest) -> Iterator:
        for number in map(int, manifest.file_sizes):
            yield from ray.get(self._tasks[number // _TASKS_AT_ONCE])[number % _TASKS_AT_ONCE]()


def _uncounted(operators: list) -> str:
    """Returns the name of the operator that hides the number of rows: one that may change it, or the reader."""
    changing = [op for op in operators[:-1] if op.can_modify_num_rows]
    return changing[-2 if len(changing) > 1 and isinstance(changing[-1], ReadFiles) else -1].name


def _counted(pieces: Partitions) -> list[int]:
    """Counts the rows of each piece, with one execution for many pieces and one task for each piece."""
    dag = _countable(pieces.dag)
    rows = [0] * len(pieces.rows)
    for first in range(0, len(rows), AT_ONCE):
        indices = range(first, min(len(rows), first + AT_ONCE))
        source = InputData(pieces._bundles(indices))
        dataset = _dataset(_exchanged(dag, source, _tasks(len(indices))), pieces.context)
        if _map_operators(dataset) != 1:  # several tasks for each piece
            with ThreadPoolExecutor(_COUNTED_AT_ONCE) as pool:
                rows[first : indices.stop] = pool.map(lambda i: _count(pieces.dataset([i])), indices)
            continue
        blocks = [block for bundle in dataset.iter_internal_ref_bundles() for block in bundle.blocks]
        tables = ray.get([block.ref for block in blocks])
        for block, table in zip(blocks, tables, strict=True):
            if table.num_rows:
                rows[first + block.metadata.exec_stats.task_idx] += sum(table["rows"].to_pylist())
    return rows


def _count(dataset: Dataset) -> int:
    return sum(bundle.num_rows() for bundle in dataset.iter_internal_ref_bundles())


def _map_operators(dataset: Dataset) -> int:
    plan, _ = get_execution_plan(ray_data.plan_of(dataset))
    return sum(isinstance(operator, MapOperator) for operator in plan.dag.post_order_iter())


def _countable(operator):
    """Returns the operators up to the last that may change the number of rows, and a count, in one task."""
    while operator.input_dependencies and not operator.can_modify_num_rows:
        operator = operator.input_dependencies[0]
    gpus = max((op.ray_remote_args.get("num_gpus") or 0 for op in _chain(operator)[:-1]), default=0)
    args = {"num_gpus": gpus} if gpus else {}

    def alike(op):
        if not op.input_dependencies:
            return op
        changes = {"ray_remote_args": args, "compute": TaskPoolStrategy()}
        settable = {field.name for field in dataclasses.fields(op) if field.init}
        if isinstance(getattr(op, "fn", None), type):
            made = _LazyCallable(op.fn, op.fn_constructor_args, op.fn_constructor_kwargs)
            changes |= {"fn": made, "fn_constructor_args": None, "fn_constructor_kwargs": None}
        if "ray_remote_args_fn" in settable:
            changes["ray_remote_args_fn"] = None
        return dataclasses.replace(op, **changes)

    return MapBatches(
        _rows_of,
        input_dependencies=[ray_data.transformed(operator, alike)],
        can_modify_num_rows=True,
        batch_format="pyarrow",
        compute=TaskPoolStrategy(),
        ray_remote_args=args,
    )


def _rows_of(batch: pa.Table) -> pa.Table:
    return pa.table({"rows": [batch.num_rows]})


class _LazyCallable:
    """Callable class as a function, whose object is made at the first call in a process."""

    def __init__(self, kind: type, args, kwargs):
        self._kind, self._args, self._kwargs = kind, args or (), kwargs or {}
        self._instance = None

    def __call__(self, *args, **kwargs):
        if self._instance is None:
            self._instance = self._kind(*self._args, **self._kwargs)
        return self._instance(*args, **kwargs)

    def __getstate__(self):
        return {**self.__dict__, "_instance": None}
