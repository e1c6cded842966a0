"""Sums of equal sizes from different places of a step do not belong together."""

import numpy as np

from raytf.errors import PeerLostError, RaytfError
from tests.unit.test_ring import ring_of, together  # noqa: F401


def test_worker_in_another_branch_raises(ring_of):  # noqa: F811
    told = together(lambda ring: ring.add(np.zeros(2), place=1 + ring.rank), ring_of(2))
    assert all(isinstance(error, (RaytfError, PeerLostError)) for error in told)
    said = [str(error) for error in told if not isinstance(error, PeerLostError)]
    assert said and "base it on what all workers know alike" in said[0]
