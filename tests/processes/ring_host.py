"""One process of a ring over several hosts: `ring_host ADDRESS RANK HOST_GONE`, then follows the lines of its input."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from raytf.collectives.ring import TOKEN_BYTES, Listener
from raytf.errors import PeerLostError


def main(host: str, rank: str, host_gone: str) -> None:
    listener = Listener(host)
    print(listener.port, flush=True)
    ring = listener.join(int(rank), json.loads(input()), bytes(TOKEN_BYTES), 20.0, None, int(host_gone))
    print("joined", flush=True)
    while True:  # each line: so many float32 to sum
        array = np.ones(ring.padded(int(input())), np.float32)
        began = time.monotonic()
        try:
            ring.add(array)
        except PeerLostError as error:
            print(f"{time.monotonic() - began:.1f} {error}", flush=True)
            return
        print(array.max(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
