from hypothesis import given
from hypothesis import strategies as st

from raytf.runtime import reservation, resources
from raytf.runtime.reservation import bundle_layout

EVALUATOR = {"evaluator 0": {"CPU": 1.0, "GPU": 1.0}}


def test_workers_come_first_and_each_other_task_has_a_bundle():
    bundles, places = bundle_layout(2, {"CPU": 2.0}, {"worker 0": {"CPU": 2.0}, "ps 0": {"CPU": 1.0}}, "PACK", 1)
    assert bundles == [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
    assert places == {"worker 0": 2, "ps 0": 3}


def test_evaluator_shares_a_workers_node_where_each_bundle_needs_its_own():
    assert bundle_layout(2, {"CPU": 1.0}, EVALUATOR, "STRICT_SPREAD", 3)[1] == {"evaluator 0": 2}
    bundles, places = bundle_layout(2, {"CPU": 1.0}, EVALUATOR, "STRICT_SPREAD", 2)
    assert bundles == [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}] and places == {"evaluator 0": 0}


@given(st.lists(st.integers(0, 8), max_size=4), st.lists(st.integers(1, 4), max_size=6))
def test_what_bundles_leave_of_nodes(nodes, bundles):
    left = resources.free_without([{"CPU": n} for n in nodes], [{"CPU": n} for n in bundles])
    if left is None:
        assert sum(nodes) < sum(bundles) + 3 * len(nodes) or max(bundles) > max(nodes, default=0)
    else:
        assert (
            sum(n["CPU"] for n in left) == sum(nodes) - sum(bundles) and min((n["CPU"] for n in left), default=0) >= 0
        )


def test_workers_are_kept_from_nodes_that_do_not_answer():
    rule = {"ray.io/node-id": "!in(a,b)"}
    assert reservation.avoid_nodes(None, 2, set()) is None
    assert reservation.avoid_nodes(None, 2, {"b", "a"}) == [rule, rule]
    assert reservation.avoid_nodes([{"zone": "x"}, {"ray.io/node-id": "c"}], 2, {"a", "b"}) == [
        {"zone": "x"} | rule,
        {"ray.io/node-id": "c"},
    ]
