from raytf.runtime.resources import count_fitting, has_room_on


def test_workers_are_counted_by_node():
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert count_fitting(nodes, {"CPU": 1}) == 4
    assert count_fitting(nodes, {"CPU": 2}) == 1
    assert count_fitting(nodes, {"CPU": 1, "GPU": 1}) == 1
    assert count_fitting(nodes, {"TPU": 4}) == 0


def test_workers_are_expected_where_ray_packs_or_spreads_them():
    nodes = {"a": {"CPU": 2.0}, "b": {"CPU": 4.0, "GPU": 1.0}, "c": {}}
    assert has_room_on(nodes, {"CPU": 1.0}, 5, spread=False) == ["b", "b", "b", "b", "a"]
    assert has_room_on(nodes, {"CPU": 1.0}, 3, spread=True) == ["b", "a", "b"]
    assert has_room_on(nodes, {"CPU": 2.0}, 9, spread=False) == ["b", "b", "a"], "no more than there is room for"
    assert has_room_on({}, {"CPU": 1.0}, 2, spread=True) == []
