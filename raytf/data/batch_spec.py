"""Contents of a batch: columns by role, and the user's function of a batch. Needs no TensorFlow."""

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
    """Contents of a batch.

    Args:
        features: Parsed columns (`columns.parse`).
        labels: Parsed columns, or None.
        sample_weights: Parsed columns, or None.
        map: map(features, labels, weights, seeds) -> the same without seeds; parts that are None are omitted. It uses
            TensorFlow operations on a batch. Seeds are int32, (rows, 2), a function of seed, epoch and row.

    Raises:
        ConfigError: Several columns have `bucket`.
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
                "Set bucket=True for one column",
            )

    @classmethod
    def parsed(cls, features, labels=None, sample_weights=None, map: Callable | None = None) -> BatchSpec:
        """Returns the spec from columns as users write them: names, `raytf.Column`s, lists and dicts of these."""
        given = {"features": features, "labels": labels, "sample_weights": sample_weights}
        return cls(**{role: columns.parse(spec, role) for role, spec in given.items()}, map=map)

    @property
    def roles(self) -> dict[str, Any]:
        """Returns the parsed columns by role, None for missing ones."""
        return {"features": self.features, "labels": self.labels, "sample_weights": self.sample_weights}

    @property
    def structure(self) -> tuple:
        """Returns (features, labels, weights) without missing ones; each is `Columns`, or a dict of them."""
        return tuple(spec for spec in self.roles.values() if spec is not None)

    @functools.cached_property
    def columns(self) -> list[Columns]:
        """Returns the columns to read, in the order of the structure."""
        return [c for spec in self.structure for c in columns.flat(spec)]

    @functools.cached_property
    def _buckets(self) -> list[int]:
        return [i for i, c in enumerate(self.columns) if not c.stacked and c.parts[0].bucket]

    @property
    def bucket(self) -> int | None:
        """Returns the index of the column whose lengths decide which rows share a batch, or None."""
        return next(iter(self._buckets), None)

    @functools.cached_property
    def padded(self) -> list[int]:
        """Returns the indices of the columns that are padded to the longest list of a global batch."""
        return [i for i, c in enumerate(self.columns) if not c.stacked and c.parts[0].pads_batch]

    def order(self, sampler: Sampler) -> dict[str, int | str | bool]:
        """Returns the settings that decide which rows a step has, as JSON. Equal settings mean equal rows.

        Args:
            sampler: The order of the dataset's rows.
        """
        bucket = self.bucket is not None
        settings = {
            "rows": sampler.total,
            "batch_size": sampler.global_batch,
            "shuffle": sampler.shuffle,
            "bucket": bucket,
        }
        if sampler.shuffle != "none" or bucket or self.map:
            settings["seed"] = sampler.seed
        if sampler.shuffle == "window" or bucket:
            settings["window"] = sampler.chunk_steps
        if sampler.shuffle == "window":
            settings["pieces"] = zlib.crc32(np.asarray(sampler.rows, np.int64).tobytes())
        return settings

    def check(self, names: Collection[str]) -> None:
        """Raises ConfigError for a column that is not in `names`, the columns of a dataset."""
        for role, spec in self.roles.items():
            columns.check_names(spec, names, role)
