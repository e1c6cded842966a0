from raytf.resources import fits


def test_workers_are_counted_by_node():
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert fits(nodes, {"CPU": 1}) == 4
    assert fits(nodes, {"CPU": 2}) == 1
    assert fits(nodes, {"CPU": 1, "GPU": 1}) == 1
    assert fits(nodes, {"TPU": 4}) == 0
