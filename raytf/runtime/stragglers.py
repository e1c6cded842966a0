"""Which worker holds the others up, step after step: judged from what all tell of themselves (`activity.told`). Pure.

Of the time of its steps each worker knows how much it has waited for others; what is left is its own: computing, its
input, its callbacks. A worker whose own time is more than a fifth above the others' in ten periods in a row, of at
least three steps and 0.4 s each, is slow. A step that takes long now and then, or the checkpoint that the chief alone
writes, counts as one and a half usual ones at most. Only raytf's ring tells how long a worker waits: where TensorFlow's
own collectives sum gradients nobody is named.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from raytf import activity

SLOWER = 1.2
# Of a whole step: what does not hold it up is nobody's matter.
_OF_A_STEP = 0.1
_PERIODS, _STEPS, _LEAST_INTERVAL = 10, 3, 0.4
_PARTS = {"compute": "computing", "input": "its input", "callbacks": "its callbacks"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """A worker that is slower than the others.

    Args:
        rank: of it.
        own, others: seconds of a step in which it, and the median of the others, do not wait for anybody.
        part: "compute", "input" or "callbacks": what takes it longer than them.
        longer: (seconds of that part, of the others).
        step: from which on it was.
    """

    rank: int
    own: float
    others: float
    part: str
    longer: tuple[float, float]
    step: int

    def __str__(self) -> str:
        milliseconds = lambda seconds: f"{seconds * 1e3:.3g} ms"
        more = 100 * (self.own / max(self.others, 1e-9) - 1)
        mine, theirs = map(milliseconds, self.longer)
        return (
            f"slower than the others by {more:.0f} % since step {self.step + 1}: {_PARTS[self.part]} takes {mine} a "
            f"step, and theirs {theirs}"
        )


class Stragglers:
    """Follows workers; `look` is called with all answers as they come."""

    def __init__(self) -> None:
        self._begin: Mapping[int, Mapping[str, Any]] = {}
        self._found: list[Straggler | None] = []
        self._named: set[int] = set()

    def look(self, told: Mapping[int, Mapping[str, Any]]) -> Straggler | None:
        """A worker that was found to be slow just now, each once."""
        began = self._begin
        if began.keys() != told.keys() or any(told[r]["step"] < began[r]["step"] for r in told):
            self._begin, self._found = dict(told), []
            return None
        if any(told[r]["step"] - began[r]["step"] < _STEPS for r in told) or any(
            told[r]["clock"] - began[r]["clock"] < _LEAST_INTERVAL for r in told
        ):
            return None
        self._begin = dict(told)
        self._found = [*self._found, slowest(began, told)][-_PERIODS:]
        ranks = {each.rank if each else None for each in self._found}
        first = self._found[0]
        if len(self._found) < _PERIODS or len(ranks) > 1 or first is None or first.rank in self._named:
            return None
        self._named.add(first.rank)
        last = self._found[-1]
        return None if last is None else dataclasses.replace(last, step=first.step)


def slowest(began: Mapping[int, Mapping[str, Any]], ended: Mapping[int, Mapping[str, Any]]) -> Straggler | None:
    """The worker that was slower than the others between two moments, or None."""
    if len(ended) < 2 or any(ended[r]["spent"]["sum"] <= began[r]["spent"]["sum"] for r in ended):
        return None
    parts = {r: _parts(began[r], ended[r]) for r in ended}
    steps = min(ended[r]["step"] - began[r]["step"] for r in ended)
    own = {r: (ended[r]["spent"][activity.OWN] - began[r]["spent"][activity.OWN]) / steps for r in ended}
    rank = max(own, key=lambda r: own[r])
    rest = [r for r in own if r != rank]
    others = statistics.median(own[r] for r in rest)
    whole = (ended[rank]["clock"] - began[rank]["clock"]) / steps
    if own[rank] <= SLOWER * others or own[rank] - others <= _OF_A_STEP * whole:
        return None
    theirs = {part: statistics.median(parts[r][part] for r in rest) for part in _PARTS}
    part = max(_PARTS, key=lambda name: parts[rank][name] - theirs[name])
    longer = parts[rank][part], theirs[part]
    return Straggler(rank=rank, own=own[rank], others=others, part=part, longer=longer, step=began[rank]["step"])


def _parts(began: Mapping[str, Any], ended: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by part."""
    steps = ended["step"] - began["step"]
    spent = {name: (ended["spent"][name] - before) / steps for name, before in began["spent"].items()}
    compute = spent[activity.STEP] - spent[activity.SUM] - spent[activity.INPUT]
    callbacks = spent[activity.CALLBACKS] - spent[activity.COLLECTIVE]
    return {"compute": max(0.0, compute), "input": spent[activity.INPUT], "callbacks": max(0.0, callbacks)}
