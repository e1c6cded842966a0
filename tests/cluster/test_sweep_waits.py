"""A sweep of which no trial runs logs what it waits for, and ends where the cluster can hold none any more."""

from types import SimpleNamespace

import pytest
from ray import tune

from raytf.errors import ResourceError
from raytf.tune import table as table_module

pytestmark = pytest.mark.usefixtures("ray_cluster")


def waiting(cpus):
    return SimpleNamespace(status="PENDING", placement_group_factory=tune.PlacementGroupFactory([{}, {"CPU": cpus}]))


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(table_module, "_PATIENCE_INTERVAL", 0.0)
    return table_module.SweepTable("loss", "min", 2, show=False)


def test_wait_is_logged_once_and_again_later(table, capsys):
    for _ in range(3):
        table.on_step_end(0, [waiting(2)])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("raytf: 1 trial(s) wait to start; one needs 2 CPU, and ")
    for _ in range(3):
        table.on_step_end(0, [waiting(2), SimpleNamespace(status="RUNNING")])
    assert not capsys.readouterr().err and table.fatal is None


def test_what_never_fits_ends_the_sweep(table):
    for _ in range(2):
        table.on_step_end(0, [waiting(400)])
    assert isinstance(table.fatal, ResourceError) and "400 CPU" in str(table.fatal)
