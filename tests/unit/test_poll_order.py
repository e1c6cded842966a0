"""Of many workers a part is asked at a look, so that a look at a thousand takes as long as one at some dozens."""

from hypothesis import given
from hypothesis import strategies as st

from raytf.runtime.hangs import PollOrder


@given(workers=st.integers(1, 200), most=st.integers(1, 70), looks=st.integers(1, 40))
def test_each_is_asked_in_turn(workers, most, looks):
    turns, asked = PollOrder(most), []
    for _ in range(looks):
        chosen = turns.next_ranks(range(workers))
        assert len(chosen) == min(workers, most)
        asked.append(chosen)
    rounds = -(-workers // most)
    for begin in range(looks - rounds + 1):
        assert set().union(*asked[begin : begin + rounds]) == set(range(workers))


@given(st.sets(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_all_are_asked_where_one_may_hang(ranks, most):
    turns = PollOrder(most)
    turns.next_ranks(range(101))
    assert turns.next_ranks(ranks, everybody=True) == ranks
    assert len(turns.next_ranks(ranks)) == min(most, len(ranks))


def test_those_that_have_not_answered_are_not_asked_again():
    turns = PollOrder(2)
    assert turns.next_ranks({0, 1, 2, 3}) == {0, 1}
    assert turns.next_ranks({0, 2, 3}) == {2, 3}  # 1 is to answer yet
    assert turns.next_ranks({0, 1, 3}) == {0, 1}
