"""Tries `verify` on the models of parity scenarios, which are known to be equal: prints what it finds of each.

python -m tests.processes.verified FILE NAME ...
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

ROWS = 12


class _Recorded(Exception):
    """Of a scenario: what builds its model, and its arrays."""

    def __init__(self, build, arrays):
        super().__init__()
        self.build, self.arrays = build, arrays


class _Recorder:
    """A stub of `scenarios.Place`, up to the first `fit`."""

    strategy, rank, world, folder = None, 0, 2, ""

    def data(self, *args, **kwargs):
        return None

    def fit(self, build, arrays, **kwargs):
        raise _Recorded(build, arrays)


def trial_of(name: str, validates: bool = True):
    """The trial of a scenario that trains by `Place.fit`."""
    import tensorflow as tf

    from raytf.worker.verification import VerificationTask
    from tests.processes import optimizer_scenarios, scenarios

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ArraysTrial(VerificationTask):
        arrays: Any

        def dataset(self, shard, validation=False):
            if validation and not validates:
                return None
            few = tf.nest.map_structure(lambda array: array[:ROWS], self.arrays)
            return scenarios.Place(None, shard.index, shard.count, "").data(few, self.global_batch)

    try:
        optimizer_scenarios.SCENARIOS[name](_Recorder())
    except _Recorded as found:
        return ArraysTrial(
            build=found.build, batch=None, rows=None, validation=None, global_batch=7, arrays=found.arrays
        )
    raise AssertionError(f"{name} does not train by Place.fit")


def main(path: str, names: list[str]) -> None:
    from raytf.train import entry, verify

    entry.import_raytf()
    from tests.processes import optimizer_scenarios  # noqa: F401 - all that a fork is to have

    found = {}
    for name in names:
        validates = not name.startswith(("gan_", "actor_", "two_scaled"))  # these have a train_step alone
        proof = verify.outcome(verify.start_comparison(lambda name=name, v=validates: trial_of(name, v)), 250)
        found[name] = dataclasses.asdict(proof)
    pathlib.Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
