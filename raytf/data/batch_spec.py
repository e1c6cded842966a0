"""What a batch consists of: columns by role, and the user's function of a batch. Needs no TensorFlow."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.data import columns
from raytf.data.columns import Columns
from raytf.data.sampling import Sampler
from raytf.errors import ConfigError


@dataclass(frozen=True)
class BatchSpec:
    """What a batch consists of.

    Args:
        features, labels, sample_weights: parsed columns (`columns.parse`); labels and weights may be None.
        map: map(features, labels, weights, seeds) -> the same without seeds; parts that are None are left out. In
            TensorFlow operations on a batch; seeds are int32, (rows, 2), a function of seed, epoch and row.

    Raises:
        ConfigError: several columns say which rows share a batch.
    """

    features: Any
    labels: Any = None
    sample_weights: Any = None
    map: Callable | None = None

    def __post_init__(self):
        if len(self._buckets) > 1:
            raise ConfigError(
                "One column at most can say which rows share a batch",
                f"bucket=True for {', '.join(self.columns[i].names[0] for i in self._buckets)}",
                "Leave it for one",
            )

    @classmethod
    def parsed(cls, features, labels=None, sample_weights=None, map: Callable | None = None) -> BatchSpec:
        """Of columns as users name them: names, `raytf.Column`s, lists and dicts of these."""
        given = {"features": features, "labels": labels, "sample_weights": sample_weights}
        return cls(**{role: columns.parse(spec, role) for role, spec in given.items()}, map=map)

    @property
    def roles(self) -> dict[str, Any]:
        """The parsed columns by role, None for those that there are not."""
        return {"features": self.features, "labels": self.labels, "sample_weights": self.sample_weights}

    @property
    def structure(self) -> tuple:
        """(features, labels, weights) as far as there are any; each `Columns`, or a dict of them."""
        return tuple(spec for spec in self.roles.values() if spec is not None)

    @functools.cached_property
    def columns(self) -> list[Columns]:
        """What is read, in the order of the structure."""
        return [c for spec in self.structure for c in columns.flat(spec)]

    @functools.cached_property
    def _buckets(self) -> list[int]:
        return [i for i, c in enumerate(self.columns) if not c.stacked and c.parts[0].bucket]

    @property
    def bucket(self) -> int | None:
        """The index of the column whose lengths say which rows share a batch, or None."""
        return next(iter(self._buckets), None)

    @functools.cached_property
    def padded(self) -> list[int]:
        """The indices of the columns that are filled up to the longest list of a global batch."""
        return [i for i, c in enumerate(self.columns) if not c.stacked and c.parts[0].pads_batch]

    def order(self, sampler: Sampler) -> dict[str, int | str | bool]:
        """What says which rows a step of an epoch has; where it is the same, it is the same rows. JSON.

        Args:
            sampler: the order of the dataset's rows.
        """
        bucket = self.bucket is not None
        told = {"rows": sampler.total, "batch_size": sampler.global_batch, "shuffle": sampler.shuffle, "bucket": bucket}
        if sampler.shuffle != "none" or bucket or self.map:
            told["seed"] = sampler.seed
        if sampler.shuffle == "window" or bucket:
            told["window"] = sampler.chunk_steps
        if sampler.shuffle == "window":
            told["pieces"] = zlib.crc32(np.asarray(sampler.rows, np.int64).tobytes())
        return told

    def check(self, names: Collection[str]) -> None:
        """Raises ConfigError for a column that is not among the names of a dataset's."""
        for role, spec in self.roles.items():
            columns.check_names(spec, names, role)
