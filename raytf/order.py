"""Which rows make up step s of epoch e: a pure function of (seed, epoch, global batch).

The number of workers does not occur: a run with 1, 2 or 3 workers trains on the same sequence of global
batches, and a run that is resumed at any (epoch, step) goes on with the very rows that were due.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raytf.topology import share

SHUFFLES = ("full", "none")


def permutation(rows: int, seed: int, epoch: int, shuffle: str = "full") -> np.ndarray:
    """The order of an epoch.

    Args:
        rows: number of rows of the dataset, at least 0.
        seed: the run's seed, 0 to 2**63 - 1.
        epoch: the epoch, from 0.
        shuffle: "full", a uniformly random order that differs by epoch, or "none".

    Returns:
        int64 array of shape (rows,) that holds each of 0 ... rows - 1 exactly once.

    The generator is NumPy's Philox keyed with (seed, epoch): counter-based (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011), so that near keys give independent orders and none depends on another.
    """
    if shuffle == "none":
        return np.arange(rows, dtype=np.int64)
    generator = np.random.Generator(np.random.Philox(key=[np.uint64(seed), np.uint64(epoch)]))
    return generator.permutation(rows).astype(np.int64, copy=False)


def steps_per_epoch(rows: int, global_batch: int, drop_remainder: bool = False) -> int:
    """Number of steps of an epoch; the last batch is smaller where `global_batch` does not divide `rows`."""
    return rows // global_batch if drop_remainder else -(-rows // global_batch)


def step_rows(order: np.ndarray, step: int, global_batch: int) -> np.ndarray:
    """The rows of global batch `step` of an epoch with the given order, in order: int64, (<= global_batch,)."""
    return order[step * global_batch : (step + 1) * global_batch]


def worker_rows(order: np.ndarray, step: int, global_batch: int, worker: int, workers: int) -> np.ndarray:
    """The contiguous part of a global batch that one worker trains on; may be empty in the last step."""
    rows = step_rows(order, step, global_batch)
    start, stop = share(len(rows), workers, worker)
    return rows[start:stop]


def epoch_parts(
    rows: int,
    seed: int,
    epoch: int,
    global_batch: int,
    worker: int,
    workers: int,
    shuffle: str = "full",
    first_step: int = 0,
    drop_remainder: bool = False,
) -> Iterator[np.ndarray]:
    """One worker's rows for each step of an epoch from `first_step` on."""
    order = permutation(rows, seed, epoch, shuffle)
    for step in range(first_step, steps_per_epoch(rows, global_batch, drop_remainder)):
        yield worker_rows(order, step, global_batch, worker, workers)
