"""Slow workers are named once, with what takes them longer; jitter, a single long step and checkpoints name nobody."""

from __future__ import annotations

import random

import pytest

from raytf import activity
from raytf.runtime.stragglers import StragglerDetector

USUAL = {"compute": 0.08, "input": 0.01, "callbacks": 0.01}


class Run:
    """Workers that sum gradients in each step; `own(rank, step)` gives the seconds of each part."""

    def __init__(self, own, workers=3):
        self._own, self._workers, self._step = own, workers, 0
        names = ("step", "callbacks", "sum", "collective", "input", "own")
        self._usual = dict.fromkeys(range(workers), 0.0)
        self.told = {
            rank: {"step": 0, "clock": 100.0 * rank, "spent": dict.fromkeys(names, 0.0)} for rank in range(workers)
        }

    def make(self, steps):
        """Makes steps; returns each report with its step."""
        found, detector = [], StragglerDetector()
        for _ in range(steps):
            parts = {rank: self._own(rank, self._step) for rank in range(self._workers)}
            longest = max(sum(its.values()) for its in parts.values()) + 0.01  # that the sum itself takes
            self._step += 1
            for rank, its in parts.items():
                status = self.told[rank]
                waited = longest - sum(its.values())
                spent = dict(status["spent"])
                spent["step"] += its["compute"] + its["input"] + waited
                spent["sum"] += waited
                spent["input"] += its["input"]
                spent["callbacks"] += its["callbacks"]
                own, self._usual[rank] = activity.clipped(sum(its.values()), self._usual[rank])
                spent["own"] += own
                self.told[rank] = {"step": self._step, "clock": status["clock"] + longest, "spent": spent}
            if (slow := detector.detect(dict(self.told))) is not None:
                found.append((self._step, slow))
        return found


@pytest.mark.parametrize(
    ("part", "words"), [("compute", "computing takes"), ("input", "its input takes"), ("callbacks", "its callbacks")]
)
def test_a_slow_one_is_named_once_with_what_takes_longer(part, words):
    def own(rank, step):
        return USUAL | ({part: USUAL[part] + 0.03} if rank == 1 and step >= 100 else {})

    ((step, slow),) = Run(own).make(1000)
    assert slow.rank == 1 and slow.part == part and words in str(slow) and "by 30 %" in str(slow)
    assert 130 <= step <= 160 and 90 <= slow.step <= 111


@pytest.mark.parametrize(("seed", "often"), [(1, 0.01), (2, 0.05), (3, 0.3)])
def test_nobody_is_named_for_jitter_or_for_long_steps_now_and_then(seed, often):
    source = random.Random(seed)

    def own(rank, step):
        long = 20 if source.random() < often else 1
        return {part: seconds * source.uniform(0.7, 1.3) * long for part, seconds in USUAL.items()}

    assert Run(own).make(8_000) == []


def test_one_that_is_less_than_a_fifth_slower_is_not_named():
    assert Run(lambda rank, step: USUAL | ({"compute": 0.095} if rank else {})).make(1000) == []


def test_where_gradients_are_summed_elsewhere_nobody_is_named():
    run = Run(lambda rank, step: USUAL | ({"compute": 0.2} if rank else {}))
    run.make(1)
    for status in run.told.values():
        status["spent"]["sum"] = 0.0
    detector = StragglerDetector()
    for step in range(1, 500):
        status = {r: its | {"step": step, "clock": its["clock"] + 0.2 * step} for r, its in run.told.items()}
        assert detector.detect(status) is None
