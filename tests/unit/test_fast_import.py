"""What comes after Keras is imported finds the collector at work, and less often."""

import subprocess
import sys

import pytest

AFTER = """
import gc
from raytf.compat.fast_import import import_keras, quick

import_keras()
assert gc.isenabled() and gc.get_freeze_count() > 100_000 and gc.get_threshold()[0] == 50_000
gc.set_threshold(700)
import_keras()
assert gc.get_threshold()[0] == 700, "it is imported already"
gc.disable()
with quick():
    with quick():
        pass
assert not gc.isenabled(), "as it was"
"""


@pytest.mark.slow
def test_the_collector_after_the_import():
    subprocess.run([sys.executable, "-c", AFTER], check=True, timeout=120)
