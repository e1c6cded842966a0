"""One process of a ring over several hosts: `ring_host ADDRESS RANK HOST_GONE`, then follows the lines of its input.

"fork" leaves a forked process, whose number it prints, "fork and exit" waits for the end of one, and a number is
that of float32 to sum.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np

from raytf.collectives.ring_listener import Listener
from raytf.collectives.ring_token import TOKEN_BYTES
from raytf.errors import PeerLostError


def main(host: str, rank: str, host_gone: str) -> None:
    listener = Listener(host)
    print(listener.port, flush=True)
    ring = listener.join(int(rank), json.loads(input()), bytes(TOKEN_BYTES), 20.0, None, int(host_gone))
    print("joined", flush=True)
    while True:
        line = input()
        if line.startswith("fork"):
            _fork(ends=line == "fork and exit")
            continue
        array = np.ones(ring.padded(int(line)), np.float32)
        began = time.monotonic()
        try:
            ring.all_reduce(array)
        except PeerLostError as error:
            print(f"{time.monotonic() - began:.1f} {error}", flush=True)
            return
        print(array.max(), flush=True)


def _fork(ends: bool) -> None:
    child = os.fork()
    if not child:
        if not ends:
            signal.pause()
        sys.exit()  # as a script ends, with all that Python does then
    if ends:
        os.waitpid(child, 0)
    print(child, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
