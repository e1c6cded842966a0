"""Blocks of a dataset: read once, kept in Ray's object store, and shared by all workers of the cluster.

Driver side: imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import ray
from ray.util.debug import reset_log_once

from raytf.compat import loggers, ray_data
from raytf.compat.ray_data import AbstractFrom, InputData, PandasBlockSchema, last_operator
from raytf.console.quiet import log_levels
from raytf.data import columns as columns_module
from raytf.data import gather
from raytf.data.file_source import refused_in_task
from raytf.errors import RaytfError

FIRST_ROWS = 1000
# Rows, and so blocks at most, that are tried before a training.
_TRIED_ROWS = 128


@dataclass(frozen=True)
class StoredDataset:
    """Dataset in the object store.

    Args:
        refs: References to blocks in the object store, or the blocks.
        rows: Number of rows of each block, at least 1.
        columns: Names of the columns.
    """

    refs: list = field(repr=False)
    rows: list[int]
    columns: list[str]

    def get(self) -> list:
        """Returns the blocks, without a copy if they are in this node's object store."""
        return [ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref for ref in self.refs]

    def first(self) -> StoredDataset:
        """Returns the dataset of the first block, and of more if these have few rows, as after `from_items`."""
        count = 1
        while count < len(self.rows) and sum(self.rows[:count]) < _TRIED_ROWS:
            count += 1
        return StoredDataset(self.refs[:count], self.rows[:count], self.columns)

    def with_blocks(self) -> StoredDataset:
        """Returns the dataset with blocks instead of references."""
        return StoredDataset(self.get(), self.rows, self.columns)


def as_table(block) -> pa.Table:
    """Returns a block as an Arrow table."""
    return block if isinstance(block, pa.Table) else pa.Table.from_pandas(block, preserve_index=False)


def read(dataset, specs: Mapping | None = None, prepare: Callable | None = None) -> StoredDataset:
    """Executes a `ray.data.Dataset` into the object store.

    The order of rows is the same in each execution, as the order of training refers to row numbers.

    Args:
        dataset: Dataset with the needed columns, see `projected`.
        specs: Parsed columns by role. Columns of one vector are stored as vectors, once for all workers. None leaves
            all columns unchanged.
        prepare: prepare(dataset) -> the dataset to execute instead, such as `partitions.unbound`.

    Raises:
        ConfigError: Columns cannot be stacked, see `gather.stack`.
    """
    with quiet():
        known = dataset.columns(fetch_if_missing=False)
        dataset = _stacked(dataset, specs or {})
        dataset = dataset if prepare is None else prepare(dataset)
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        limit_footer_readers(dataset)
        with unwrapped(dataset.context):
            materialized = dataset.materialize()
        blocks = [block for bundle in materialized.iter_internal_ref_bundles() for block in bundle.blocks]
        blocks = [block for block in blocks if block.metadata.num_rows]
        schema = materialized.schema()
        columns = known or names_of(specs or {}) or ([] if schema is None else list(schema.names))
        return StoredDataset(
            [block.ref for block in blocks], [block.metadata.num_rows for block in blocks], list(columns)
        )


def first(dataset, specs: Mapping, prepare: Callable | None = None) -> StoredDataset:
    """Returns the first rows of a dataset, for shapes and dtypes; it reads no more of files than needed.

    Args:
        dataset: A `ray.data.Dataset`.
        specs: Parsed columns by role.
        prepare: See `read`.

    Raises:
        ConfigError: See `projected`.
    """
    with quiet():
        limit_footer_readers(dataset)
        needed = projected(dataset, specs)
        return read(needed if _in_memory(needed) else needed.limit(FIRST_ROWS), prepare=prepare).first()


def projected(dataset, specs: Mapping):
    """Returns the dataset with only the columns of tensors, so that no others of Parquet files are read.

    Data in memory stays unchanged, as a projection would need more memory.

    Args:
        dataset: A `ray.data.Dataset`.
        specs: Parsed columns (`columns.parse`) by role; an empty mapping keeps all columns.

    Raises:
        ConfigError: A column is missing in the dataset. The execution raises it if the columns are not known before.
    """
    if not specs:
        return dataset
    known = dataset.columns(fetch_if_missing=False)
    if known is None:
        return _mapped(dataset, functools.partial(_selected, specs))
    for role, spec in specs.items():
        columns_module.check_names(spec, known, role)
    names = names_of(specs)
    return dataset if _in_memory(dataset) or set(names) == set(known) else dataset.select_columns(names)


def names_of(specs: Mapping) -> list[str]:
    return list(
        dict.fromkeys(name for spec in specs.values() for part in columns_module.flat(spec) for name in part.names)
    )


def _in_memory(dataset) -> bool:
    return isinstance(last_operator(dataset), InputData | AbstractFrom)


def _stacked(dataset, specs: Mapping):
    """Returns the dataset with a column of vectors for stacked columns, and with contiguous columns in each block.

    Small data in memory stays unchanged: workers have their own copy then, and no task needs to start.
    """
    if not specs:
        return dataset
    if _in_memory(dataset):
        bundles = last_operator(dataset).output_data()
        stacked = any(part.stacked for spec in specs.values() for part in columns_module.flat(spec))
        pandas = any(isinstance(bundle.schema, PandasBlockSchema) for bundle in bundles)
        large = sum(bundle.size_bytes() for bundle in bundles) > gather.COPIED_BYTES
        if not large or not (stacked or pandas):
            return dataset
    return _mapped(dataset, functools.partial(_prepared, specs))


def _mapped(dataset, function):
    return dataset.map_batches(
        function, batch_format="pyarrow", batch_size=None, zero_copy_batch=True, udf_modifying_row_count=False
    )


def _selected(specs: Mapping, table: pa.Table) -> pa.Table:
    if not table.num_rows:  # may have no columns either
        return table
    for role, spec in specs.items():
        columns_module.check_names(spec, table.column_names, role)
    return table.select(names_of(specs))


def _prepared(specs: Mapping, table: pa.Table) -> pa.Table:
    if not table.num_rows:
        return table
    parts = [part for spec in specs.values() for part in columns_module.flat(spec)]
    single: dict[str, set] = {}
    for part in parts:
        if not part.stacked:
            single.setdefault(part.names[0], set()).add(part.parts[0])
    # refuses or fills nulls before any worker starts, unless a column is used in two ways
    single_columns = {
        name: gather.filled(table, *ways) if len(ways) == 1 else table.column(name) for name, ways in single.items()
    }
    prepared = pa.table(single_columns).combine_chunks() if single_columns else table.select([])
    for part in dict.fromkeys(part for part in parts if part.stacked):
        prepared = prepared.append_column(part.stored, gather.stack(table, part))
    return prepared


@contextlib.contextmanager
def unwrapped(context):
    """Raises a task's ConfigError unwrapped."""
    previous, context.raise_original_map_exception = context.raise_original_map_exception, True
    try:
        with refused_in_task():
            yield
    finally:
        context.raise_original_map_exception = previous


@contextlib.contextmanager
def quiet():
    """Hides Ray Data's messages on its plan and progress until the context ends; the trainer logs its own line.

    An error of raytf in a task is hidden too: it is raised.
    """
    filtered, own_errors = _NoCpuWarningFilter(), _OwnErrorFilter()
    logger = logging.getLogger("ray.data.dataset")
    error_loggers = [logging.getLogger(name) for name in (loggers.DATA_TASKS, loggers.DATA_ERRORS)]
    logger.addFilter(filtered)
    for error_logger in error_loggers:
        error_logger.addFilter(own_errors)
    try:
        with _task_warning_filter, log_levels({"ray.data": logging.WARNING, loggers.DATA_PROGRESS: logging.ERROR}):
            yield
    finally:
        logger.removeFilter(filtered)
        for error_logger in error_loggers:
            error_logger.removeFilter(own_errors)
        if filtered.dropped:  # for the next dataset, which may be the user's
            reset_log_once("cpu_warning")


class _OwnErrorFilter(logging.Filter):
    """Drops what is logged of an error of raytf, with the error or while it is handled."""

    def filter(self, record) -> bool:
        error = record.exc_info[1] if record.exc_info else sys.exc_info()[1]
        return not isinstance(error, RaytfError)


class _TaskWarningFilter:
    """Context that hides Ray's advice about the number of tasks, which raytf sets and not the user.

    It applies to all threads, as Ray warns in a thread of its own. Two overlapping `warnings.catch_warnings` would
    leave the filter installed.
    """

    def __init__(self):
        self._lock, self._inside = threading.Lock(), 0
        self._filter: tuple | None = None

    def __enter__(self):
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks")
                self._filter = warnings.filters[0]

    def __exit__(self, *exc):
        with self._lock:
            self._inside -= 1
            if not self._inside and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)


_task_warning_filter = _TaskWarningFilter()


class _NoCpuWarningFilter(logging.Filter):
    """Drops Ray Data's warning "will hang" without a free CPU.

    Reads of raytf request no CPU, and `streamed.log_slow_reads` logs it if they wait. Ray also still counts the CPUs of
    a placement group that has just ended.
    """

    def __init__(self):
        super().__init__()
        self.dropped = False
        self._thread = threading.get_ident()

    def filter(self, record) -> bool:
        drop = threading.get_ident() == self._thread and "does not have any available CPUs" in str(record.msg)
        self.dropped |= drop
        return not drop


def limit_footer_readers(dataset) -> None:
    """Limits the actors that list Parquet files to an eighth of the cluster's CPUs.

    Ray starts 32 for each listing since 2.60, unless its environment variable sets another number. It reads the number
    in `read_parquet`. On two cores their processes alone took 6 to 70 s for one small file.
    """
    most = max(1, int(ray.cluster_resources().get("CPU", 1)) // 8)
    for operator in last_operator(dataset).post_order_iter():
        ray_data.limit_footer_readers(operator, most)
