"""A probe of `raytf doctor` without Ray: `doctor_host`, then a line of its input for each call, in JSON."""

from __future__ import annotations

import json
import sys

from raytf.doctor.probe import Probe


def main() -> None:
    probe = Probe(b"t" * 32, (20000, 31999), 3.0, 9.0, 5.0)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(probe, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
