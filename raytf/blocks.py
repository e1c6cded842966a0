"""The blocks of a dataset: read once, kept in Ray's object store, shared by every worker of the cluster.

Driver side: nothing here imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

import pyarrow as pa
import ray


@dataclass(frozen=True)
class Blocks:
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

    def first(self) -> Blocks:
        """The first block alone."""
        return Blocks(self.refs[:1], self.rows[:1], self.columns)

    def here(self) -> Blocks:
        """The same with the blocks themselves."""
        return Blocks(self.get(), self.rows, self.columns)


def as_table(block) -> pa.Table:
    """A block as an Arrow table."""
    return block if isinstance(block, pa.Table) else pa.Table.from_pandas(block, preserve_index=False)


def read(dataset) -> Blocks:
    """Executes a `ray.data.Dataset` into the object store.

    The order of its rows is the same in every execution, as the order of training is counted in rows.
    """
    with quiet():
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        limit_footer_readers(dataset)
        materialized = dataset.materialize()
        found = [block for bundle in materialized.iter_internal_ref_bundles() for block in bundle.blocks]
        found = [block for block in found if block.metadata.num_rows]
        schema = materialized.schema()
        columns = [] if schema is None else list(schema.names)
        return Blocks([block.ref for block in found], [block.metadata.num_rows for block in found], columns)


@contextlib.contextmanager
def quiet():
    """Ray Data tells of its plan and progress at length; the trainer has a line of its own."""
    levels = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def limit_footer_readers(dataset) -> None:
    """Lists Parquet files with no more actors than an eighth of the cluster's CPUs.

    Ray 2.60 starts 32 for each listing unless an environment variable of its own says otherwise, and takes the number
    when `read_parquet` is called. On two cores their processes alone took 6 to 70 s for one small file.
    """
    most = max(1, int(ray.cluster_resources().get("CPU", 1)) // 8)
    for operator in dataset._logical_plan.dag.post_order_iter():
        indexer = getattr(operator, "file_indexer", None)
        if hasattr(indexer, "_num_actors"):
            indexer._num_actors = min(indexer._num_actors, most)
