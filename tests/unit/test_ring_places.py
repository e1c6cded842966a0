"""Sums of equal sizes from different places of a step do not belong together."""

import numpy as np

from raytf.errors import PeerLostError, RaytfError
from tests.unit.test_ring import ring_of, together  # noqa: F401


def test_worker_in_another_branch_raises(ring_of):  # noqa: F811
    errors = together(lambda ring: ring.all_reduce(np.zeros(2), sum_number=1 + ring.rank), ring_of(2))
    assert all(isinstance(error, (RaytfError, PeerLostError)) for error in errors)
    messages = [str(error) for error in errors if not isinstance(error, PeerLostError)]
    assert messages and "base it on what all workers know alike" in messages[0]
