"""The blocks of the datasets of a run: read once, kept in Ray's object store, handed to every worker.

Driver side: nothing here imports TensorFlow.
"""

from __future__ import annotations

import ray
import ray.data

from raytf.errors import ConfigError


class Blocks:
    """Where the rows of a dataset lie.

    Args:
        refs: references to Arrow tables in the object store.
        rows: number of rows of each block.
        columns: names of the columns.
    """

    def __init__(self, refs: list, rows: list[int], columns: list[str]):
        self.refs, self.rows, self.columns = refs, rows, columns


@ray.remote(num_cpus=0)
class BlockServer:
    """Reads each dataset of a run at the first request, in a fixed order of rows, and remembers where it lies."""

    def __init__(self, datasets: dict):
        self._datasets = datasets
        self._blocks: dict[str, Blocks] = {}

    def blocks(self, name: str) -> Blocks:
        if name not in self._datasets:
            known = ", ".join(map(repr, self._datasets)) or "none"
            raise ConfigError(f"A dataset must be one that the trainer was given ({known})", repr(name), "Pass it")
        if name not in self._blocks:
            dataset = self._datasets[name]
            dataset = dataset() if callable(dataset) else dataset
            self._blocks[name] = read(dataset)
        return self._blocks[name]


def read(dataset) -> Blocks:
    """Executes a dataset into the object store; the order of its rows is the same in every execution."""
    dataset.context.execution_options.preserve_order = True
    materialized = dataset.materialize()
    refs, rows = [], []
    for bundle in materialized.iter_internal_ref_bundles():
        for block in bundle.blocks:
            if block.metadata.num_rows:
                refs.append(block.ref)
                rows.append(block.metadata.num_rows)
    schema = materialized.schema()
    return Blocks(refs, rows, list(schema.names) if schema is not None else [])
