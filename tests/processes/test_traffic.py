"""Two hosts whose network is slow: what 16-bit gradients and local steps bring, in steps and in bytes."""

from __future__ import annotations

import pathlib
import sys

import pytest

from cluster import namespaces

BENCHMARKS = pathlib.Path(__file__).parents[2] / "jobs" / "benchmarks"
WHY_NOT = namespaces.available()


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_less_traffic_is_faster_where_the_link_is_the_limit(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import traffic

    with namespaces.hosts(2, "40mbit") as hosts:
        found = {way: traffic.measure(hosts, way, 8) for way in traffic.WAYS if way.startswith("raytf")}
    plain, rounded, local = found["raytf"], found["raytf bfloat16"], found["raytf sync_every 8"]
    assert rounded["sent"] == pytest.approx(plain["sent"] / 2, rel=0.01)
    assert local["sent"] == pytest.approx(plain["sent"] / 8, rel=0.01)
    assert rounded["rate"] > 1.4 * plain["rate"] and local["rate"] > 1.4 * plain["rate"]
    # what it costs: rounding nearly nothing, local steps something
    assert rounded["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert local["loss"] == pytest.approx(plain["loss"], rel=0.2)
    assert sys.modules.pop("traffic") and sys.modules.pop("common")
