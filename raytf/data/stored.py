"""The blocks of a dataset: read once, kept in Ray's object store, shared by every worker of the cluster.

Driver side: nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import ray
from ray.util.debug import reset_log_once

from raytf.compat import loggers, ray_data
from raytf.compat.ray_data import AbstractFrom, InputData, PandasBlockSchema, last_operator
from raytf.console.quiet import at_levels
from raytf.data import columns as columns_module
from raytf.data import gather
from raytf.errors import ConfigError

_FIRST_ROWS = 1000


@dataclass(frozen=True)
class StoredDataset:
    """Where the rows of a dataset lie.

    Args:
        refs: references to blocks in the object store, or blocks themselves.
        rows: number of rows of each block, each at least 1.
        columns: names of the columns.
    """

    refs: list = field(repr=False)
    rows: list[int]
    columns: list[str]

    def get(self) -> list:
        """The blocks, without a copy where they lie in this node's store."""
        return [ray.get(ref) if isinstance(ref, ray.ObjectRef) else ref for ref in self.refs]

    def first(self) -> StoredDataset:
        """The first block alone."""
        return StoredDataset(self.refs[:1], self.rows[:1], self.columns)

    def here(self) -> StoredDataset:
        """The same with the blocks themselves."""
        return StoredDataset(self.get(), self.rows, self.columns)


def as_table(block) -> pa.Table:
    """A block as an Arrow table."""
    return block if isinstance(block, pa.Table) else pa.Table.from_pandas(block, preserve_index=False)


def read(dataset, specs: Mapping | None = None, prepare: Callable | None = None) -> StoredDataset:
    """Executes a `ray.data.Dataset` into the object store.

    The order of its rows is the same in every execution, as the order of training is counted in rows.

    Args:
        dataset: of the columns that are needed, see `projected`.
        specs: parsed columns by role. What becomes one vector is stored as such, once for all workers; None leaves all
            columns as they are.
        prepare: prepare(dataset) -> the one that is executed in its place, such as `partitions.unbound`.

    Raises:
        ConfigError: columns that cannot be stacked, see `gather.stack`.
    """
    with quiet():
        known = dataset.columns(fetch_if_missing=False)
        dataset = _stacked(dataset, specs or {})
        dataset = dataset if prepare is None else prepare(dataset)
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        limit_footer_readers(dataset)
        with _refused_here(dataset.context):
            materialized = dataset.materialize()
        found = [block for bundle in materialized.iter_internal_ref_bundles() for block in bundle.blocks]
        found = [block for block in found if block.metadata.num_rows]
        schema = materialized.schema()
        columns = known or _names(specs or {}) or ([] if schema is None else list(schema.names))
        return StoredDataset(
            [block.ref for block in found], [block.metadata.num_rows for block in found], list(columns)
        )


def first(dataset, specs: Mapping, prepare: Callable | None = None) -> StoredDataset:
    """The first rows of a dataset, for shapes and dtypes; of files no more is read than holds these.

    Args:
        dataset: a `ray.data.Dataset`.
        specs: parsed columns by role.
        prepare: see `read`.

    Raises:
        ConfigError: see `projected`.
    """
    with quiet():
        limit_footer_readers(dataset)
        needed = projected(dataset, specs)
        return read(needed if _in_memory(needed) else needed.limit(_FIRST_ROWS), prepare=prepare).first()


def projected(dataset, specs: Mapping):
    """The dataset with the columns that tensors are made of alone: of Parquet files no others are read.

    What lies in memory is left as it is: it would take up more, not less.

    Args:
        dataset: a `ray.data.Dataset`.
        specs: parsed columns (`columns.parse`) by role; none leaves all.

    Raises:
        ConfigError: a column that the dataset does not have; where only its execution shows what it has, then.
    """
    if not specs:
        return dataset
    known = dataset.columns(fetch_if_missing=False)
    if known is None:
        return _mapped(dataset, functools.partial(_kept, specs))
    for role, spec in specs.items():
        columns_module.check_names(spec, known, role)
    names = _names(specs)
    return dataset if _in_memory(dataset) or set(names) == set(known) else dataset.select_columns(names)


def _names(specs: Mapping) -> list[str]:
    return list(
        dict.fromkeys(name for spec in specs.values() for part in columns_module.flat(spec) for name in part.names)
    )


def _in_memory(dataset) -> bool:
    return isinstance(last_operator(dataset), InputData | AbstractFrom)


def _stacked(dataset, specs: Mapping):
    """With a column of vectors for those that are stacked, and each block's columns in one piece.

    Small data in memory stays as it is: workers then have their own copy, and no task has to start.
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


def _kept(specs: Mapping, table: pa.Table) -> pa.Table:
    if not table.num_rows:  # may have no columns either
        return table
    for role, spec in specs.items():
        columns_module.check_names(spec, table.column_names, role)
    return table.select(_names(specs))


def _prepared(specs: Mapping, table: pa.Table) -> pa.Table:
    if not table.num_rows:
        return table
    parts = [part for spec in specs.values() for part in columns_module.flat(spec)]
    single: dict[str, set] = {}
    for part in parts:
        if not part.stacked:
            single.setdefault(part.names[0], set()).add(part.parts[0])
    # nulls are refused, or filled, here, where no worker has started; unless a column is used in two ways
    found = {
        name: gather.filled(table, *ways) if len(ways) == 1 else table.column(name) for name, ways in single.items()
    }
    made = pa.table(found).combine_chunks() if found else table.select([])
    for part in dict.fromkeys(part for part in parts if part.stacked):
        made = made.append_column(part.stored, gather.stack(table, part))
    return made


@contextlib.contextmanager
def _refused_here(context):
    """A ConfigError of a task as such."""
    before, context.raise_original_map_exception = context.raise_original_map_exception, True
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise
    finally:
        context.raise_original_map_exception = before


@contextlib.contextmanager
def quiet():
    """Ray Data tells of its plan and progress at length; the trainer has a line of its own."""
    filtered = _NeedsNoCpu()
    logger = logging.getLogger("ray.data.dataset")
    logger.addFilter(filtered)
    try:
        with _unwarned, at_levels({"ray.data": logging.WARNING, loggers.DATA_PROGRESS: logging.ERROR}):
            yield
    finally:
        logger.removeFilter(filtered)
        if filtered.dropped:  # for the next dataset, which may be the user's
            reset_log_once("cpu_warning")


class _Unwarned:
    """Ray's advice about the number of tasks is left out: raytf says how many run at once, not the user.

    It is for all threads at once, as Ray gives it in one of its own; `warnings.catch_warnings` of two that overlap
    would leave the filter there.
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


_unwarned = _Unwarned()


class _NeedsNoCpu(logging.Filter):
    """Drops Ray Data's "will hang" without a free CPU: raytf's reads ask for none, and `streamed.watched` says if they
    wait. Ray counts the CPUs of a group that has just ended for a while."""

    def __init__(self):
        super().__init__()
        self.dropped = False
        self._thread = threading.get_ident()

    def filter(self, record) -> bool:
        drop = threading.get_ident() == self._thread and "does not have any available CPUs" in str(record.msg)
        self.dropped |= drop
        return not drop


def limit_footer_readers(dataset) -> None:
    """Lists Parquet files with no more actors than an eighth of the cluster's CPUs.

    Ray starts 32 for each listing since 2.60, unless an environment variable of its own says otherwise, and takes the
    number when `read_parquet` is called. On two cores their processes alone took 6 to 70 s for one small file.
    """
    most = max(1, int(ray.cluster_resources().get("CPU", 1)) // 8)
    for operator in last_operator(dataset).post_order_iter():
        ray_data.limit_footer_readers(operator, most)
