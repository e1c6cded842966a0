"""TPUs, as far as the calls into TensorFlow's TPU functions: no TPU is here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import answers

CONFIGS = {
    "fine": {},
    "uneven": {"batch_size": 15},
    "small": {"rows": 9},
    "ragged": {"padded": False},
}


@pytest.fixture(scope="module")
def found():
    """What a process did with each of `CONFIGS`."""
    configs = [{"rows": 100, "batch_size": 16, "padded": True} | config for config in CONFIGS.values()]
    command = [sys.executable, "-m", "tests.processes.tpu_worker", json.dumps(configs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return dict(zip(CONFIGS, answers.of(done.stdout, done.stderr), strict=True))


def test_a_host_with_chips(found):
    """Connection and initialization come first and in order; batches have one shape, the rest is left out."""
    fine = found["fine"]
    assert fine["calls"] == [["connect", {}], ["initialize", ""], ["strategy", ""]]
    assert fine["steps"] == 6 and fine["execution"] == 6 and fine["reports"] == 2 and "error" not in fine


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("uneven", "batch_size must be a multiple of them; received: batch_size=15 for 2 replicas. Use 14 or 16"),
        ("small", "an epoch needs a whole one; received: 9 rows for batch_size=16"),
        ("ragged", "On TPUs every batch has the same shape"),
    ],
)
def test_what_cannot_be_compiled_is_refused(found, config, message):
    assert message in found[config]["error"]
