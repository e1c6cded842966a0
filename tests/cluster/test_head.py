"""The cluster's head does not answer while a run cleans up: a run that was ended must not wait for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import dataclasses, psutil, ray
from raytf import timeouts
from raytf.console.progress import Entries

ray.init("local", num_cpus=1, include_dashboard=False)
entries = Entries("test")
entries.put("a", 1)
(head,) = [p for p in psutil.Process().children(recursive=True) if "gcs_server" in p.name()]
head.suspend()
with_limit = dataclasses.replace(timeouts.get(), idle_answer=0.5)
timeouts.set_current(with_limit)
entries.clear()
print("the head is not waited for", flush=True)
head.resume()
timeouts.set_current(dataclasses.replace(with_limit, idle_answer=60.0))
entries.clear()
assert entries.names() == []
ray.shutdown()
"""


def test_entries_are_cleared_without_a_head_that_does_not_answer():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "the head is not waited for" in done.stdout, done.stderr[-2000:]
