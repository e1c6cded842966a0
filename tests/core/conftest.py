"""The Ray of the core tests: one, started as users start it; nothing else runs on the machine meanwhile."""

from __future__ import annotations

import logging

import pytest

# Ray gives a node 30 s to start, which a busy machine may not do at once.
_STARTS = 4


@pytest.fixture(scope="session")
def ray_cluster():
    import ray

    from tests.conftest import _processes, _wait_gone

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # four idle processes for each driver
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves workers a hundredth of a machine that others use
        _start(ray)
        yield ray
    processes = _processes()
    ray.shutdown()
    _wait_gone(processes, timeout=120)


@pytest.fixture(scope="session")
def undisturbed(ray_cluster, tmp_path_factory):
    """The result of two workers to which nothing happens; rows of a table."""
    from tests.cluster.test_trainer import trainer

    return trainer(tmp_path_factory.mktemp("undisturbed"), shuffle="window").fit()


def _start(ray) -> None:
    for left in reversed(range(_STARTS)):
        try:
            ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            return
        except Exception as error:
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
