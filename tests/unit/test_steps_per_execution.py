"""How many steps an execution has: pure choice from measured times."""

from hypothesis import given
from hypothesis import strategies as st

from raytf.worker.steps_per_execution import choose_steps

seconds = st.floats(1e-6, 10)


@given(seconds, seconds, seconds, st.integers(0, 10**9))
def test_a_power_of_two_that_pays(between, within, first, left):
    number = choose_steps(between, within, first, left)
    assert number in (1, 2, 4, 8, 16, 32, 64)
    if number > 1:
        assert number * within <= 1
        assert left * between * (1 - 1 / number) > 2 * first


def test_examples():
    many = 10**6
    assert choose_steps(seconds_between=0.001, seconds_within=0.099, first=2, steps_left=many) == 1  # Python takes 1 %
    assert choose_steps(seconds_between=0.004, seconds_within=0.030, first=2, steps_left=many) == 8
    assert choose_steps(seconds_between=0.001, seconds_within=0.001, first=2, steps_left=many) == 32
    assert (
        choose_steps(seconds_between=0.001, seconds_within=0.001, first=2, steps_left=1000) == 1
    )  # over before it has paid
    assert (
        choose_steps(seconds_between=0.5, seconds_within=0.4, first=2, steps_left=many) == 2
    )  # executions stay below a second
