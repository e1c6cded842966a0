"""Straggler detection: finds a worker that delays the others, from snapshots of all workers. Pure.

A worker's own time is the time of its steps without its waits for others: computation, input, callbacks. A worker is a
straggler if its own time exceeds the others' by over a fifth in ten consecutive periods. A period has at least three
steps and 0.4 s. A single long step, or a checkpoint of the chief alone, counts as at most 1.5 usual steps. Only raytf's
ring measures waits: no worker is named when TensorFlow's own collectives sum gradients.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from raytf import activity

SLOWER = 1.2
# Share of a whole step: a smaller delay does not matter.
_OF_A_STEP = 0.1
_PERIODS, _STEPS, _LEAST_INTERVAL = 10, 3, 0.4
_PARTS = {"compute": "computing", "input": "its input", "callbacks": "its callbacks"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """A worker that is slower than the others.

    Args:
        rank: Rank of the worker.
        seconds, others: Seconds per step without waits, of the worker, and as median of the others.
        part: "compute", "input" or "callbacks": the part that takes it longer than the others.
        longer: (its seconds of that part, the others' seconds).
        step: Step since which it is slower.
    """

    rank: int
    seconds: float
    others: float
    part: str
    longer: tuple[float, float]
    step: int

    def __str__(self) -> str:
        milliseconds = lambda seconds: f"{seconds * 1e3:.3g} ms"
        more = 100 * (self.seconds / max(self.others, 1e-9) - 1)
        slow, median = map(milliseconds, self.longer)
        return (
            f"slower than the others by {more:.0f} % since step {self.step + 1}: {_PARTS[self.part]} takes {slow} a "
            f"step, and theirs {median}"
        )


class StragglerDetector:
    """Compares the workers; `detect` is called with all snapshots as they arrive."""

    def __init__(self) -> None:
        self._begin: Mapping[int, Mapping[str, Any]] = {}
        self._reports: list[Straggler | None] = []
        self._straggler: set[int] = set()

    def detect(self, snapshots: Mapping[int, Mapping[str, Any]]) -> Straggler | None:
        """Returns a worker that has just become a straggler, each once."""
        began = self._begin
        if began.keys() != snapshots.keys() or any(snapshots[r]["step"] < began[r]["step"] for r in snapshots):
            self._begin, self._reports = dict(snapshots), []
            return None
        if any(snapshots[r]["step"] - began[r]["step"] < _STEPS for r in snapshots) or any(
            snapshots[r]["clock"] - began[r]["clock"] < _LEAST_INTERVAL for r in snapshots
        ):
            return None
        self._begin = dict(snapshots)
        self._reports = [*self._reports, slowest(began, snapshots)][-_PERIODS:]
        ranks = {straggler.rank if straggler else None for straggler in self._reports}
        first = self._reports[0]
        if len(self._reports) < _PERIODS or len(ranks) > 1 or first is None or first.rank in self._straggler:
            return None
        self._straggler.add(first.rank)
        last = self._reports[-1]
        return None if last is None else dataclasses.replace(last, step=first.step)


def slowest(began: Mapping[int, Mapping[str, Any]], ended: Mapping[int, Mapping[str, Any]]) -> Straggler | None:
    """Returns the worker that was slower than the others between two snapshots, or None."""
    if len(ended) < 2 or any(ended[r]["spent"]["sum"] <= began[r]["spent"]["sum"] for r in ended):
        return None
    parts = {r: _parts(began[r], ended[r]) for r in ended}
    steps = min(ended[r]["step"] - began[r]["step"] for r in ended)
    seconds = {r: (ended[r]["spent"][activity.OWN_TIME] - began[r]["spent"][activity.OWN_TIME]) / steps for r in ended}
    rank = max(seconds, key=lambda r: seconds[r])
    other_ranks = [r for r in seconds if r != rank]
    others_median = statistics.median(seconds[r] for r in other_ranks)
    whole = (ended[rank]["clock"] - began[rank]["clock"]) / steps
    if seconds[rank] <= SLOWER * others_median or seconds[rank] - others_median <= _OF_A_STEP * whole:
        return None
    median_of = {part: statistics.median(parts[r][part] for r in other_ranks) for part in _PARTS}
    part = max(_PARTS, key=lambda name: parts[rank][name] - median_of[name])
    longer = parts[rank][part], median_of[part]
    return Straggler(
        rank=rank, seconds=seconds[rank], others=others_median, part=part, longer=longer, step=began[rank]["step"]
    )


def _parts(began: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds per step by part."""
    steps = ended["step"] - began["step"]
    spent = {name: (ended["spent"][name] - earlier) / steps for name, earlier in began["spent"].items()}
    compute = spent[activity.STEP] - spent[activity.SUM] - spent[activity.INPUT]
    callbacks = spent[activity.CALLBACKS] - spent[activity.COLLECTIVE]
    return {"compute": max(0.0, compute), "input": spent[activity.INPUT], "callbacks": max(0.0, callbacks)}
