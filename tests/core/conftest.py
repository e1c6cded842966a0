"""The Ray of the core tests: one, started as users start it; nothing else runs on the machine meanwhile."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    import ray

    from tests.conftest import _processes, _wait_gone

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves workers a hundredth of a machine that others use
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield ray
    processes = _processes()
    ray.shutdown()
    _wait_gone(processes, timeout=120)
