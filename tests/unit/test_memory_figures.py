"""What the memory soak calculates from its looks at processes."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "jobs" / "benchmarks"


@pytest.fixture(scope="module")
def memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        spec = importlib.util.spec_from_file_location("memory_soak", BENCHMARKS / "memory.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    sys.modules.pop("common", None)


def test_growth_counts_what_lives_long_after_it_has_settled(memory):
    """One grows by half a MB and a file an iteration, one jumps once, one comes late, one fell while it settled."""
    samples = []
    for i in range(40):
        found = {"1": ["grows", 5e5 * i, 10 + i, 4], "2": ["jumps", 1e6 * (i > 36), 10, 4]}
        found["3"] = ["falls", 1e9 - 1e7 * min(i, 20), 10, 4]
        found |= {"4": ["late", 1e9 * i, 10, 4]} if i > 35 else {}
        samples.append((i, found))
    grows, *others = memory.growth(samples, settled=20)
    assert (grows["kind"], grows["pid"]) == ("grows", 1)
    assert grows["memory"] == pytest.approx(0.5) and grows["files"] == pytest.approx(1) and grows["threads"] == 0
    assert {one["kind"]: one["memory"] for one in others} == {"jumps": 0, "falls": 0}
