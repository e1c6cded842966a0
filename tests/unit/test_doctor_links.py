"""Which links the doctor measures: all of few nodes, and of many a number that grows with that of the nodes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from raytf.doctor.examination import choose_links


@given(st.integers(0, 300))
def test_links(count):
    names = [f"n{i}" for i in range(count)]
    links = choose_links(names)
    assert len(set(links)) == len(links)
    assert all(one != other for one, other in links)
    if count <= 16:
        assert len(links) == count * (count - 1)
        return
    assert len(links) <= 8 * count
    for ends in (Counter(one for one, _ in links), Counter(other for _, other in links)):
        assert set(ends) == set(names) and len(set(ends.values())) == 1
    assert set(zip(names, [*names[1:], names[0]], strict=True)) <= set(links), "those of a training's ring"
