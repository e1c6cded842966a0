"""What the core tests share; nothing else runs on the machine meanwhile."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def undisturbed(ray_cluster, tmp_path_factory):
    """The result of two workers to which nothing happens; rows of a table."""
    from tests.cluster.test_trainer import trainer

    return trainer(tmp_path_factory.mktemp("undisturbed"), shuffle="window").fit()
