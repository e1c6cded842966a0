"""A training that is stopped within an epoch and goes on is the one that was not, on one, two and three processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.processes.groups import ROOT
from tests.processes.resume_scenarios import CASES, CHAIN

# Three take their time on two cores.
THREE = ["plain", "accumulation", "gan"]
ALONE = ["quiet", "stopped", "resumed"]
ALIKE = [name for name, case in CASES.items() if case.alike]


def stages(folder):
    """What runs at once: all alone, and then each link of the chain behind the one before."""

    def group(place, stage, names):
        path = folder / f"{stage}_{place}"
        path.mkdir()
        scenarios = [f"{name}:{one}" for name in names for one in (ALONE if stage == "alone" else [stage])]
        told = {"folder": str(path), "dtype": "float64", "place": place, "world": int(place), "scenarios": scenarios}
        # raytf's ring, and TensorFlow's collectives
        return told | {
            "communication": "ring" if place == "3" else "auto",
            "module": "tests.processes.resume_scenarios",
        }

    alone = {"1": list(CASES), "2": list(CASES), "3": THREE}
    links = [[group(CHAIN[i][0], f"chain{i}", ALIKE)] for i in range(1, len(CHAIN))]
    return [[group(place, "alone", names) for place, names in alone.items()], *links]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """outcome(stage, place, case): what each rank returned."""
    folder = tmp_path_factory.mktemp("resume")
    given = stages(folder)
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = [sys.executable, "-m", "tests.processes.worker", *map(json.dumps, given)]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        try:
            code = process.wait(1500)
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            process.wait()
    logs = "\n".join((path.read_text()[-3000:]) for path in sorted(folder.glob("*/log.*")))
    assert code == 0, (folder / "log").read_text()[-3000:]

    def found(stage, place, case):
        group = folder / f"{'alone' if stage in ALONE else stage}_{place}"
        codes = json.loads((group / "codes.json").read_text())
        assert not any(codes.values()), f"{codes}\n{logs}"
        ranks = [pickle.loads((group / f"{case}:{stage}.{rank}.pkl").read_bytes()) for rank in range(int(place))]
        for told in ranks:
            assert not isinstance(told, str), told
        return ranks

    return found


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("case", "place"), [*((name, place) for name in CASES for place in ("1", "2")), *((name, "3") for name in THREE)]
)
def test_as_many_go_on_to_the_bit(outcome, case, place):
    """Weights and optimizers, to the bit; the numbers of metrics, of which the chief has the sums, to rounding."""
    outcome("stopped", place, case)
    quiet, resumed = outcome("quiet", place, case), outcome("resumed", place, case)
    for rank, (mine, its) in enumerate(zip(resumed, quiet, strict=True)):
        assert (mine.keys() == its.keys() and "h:loss" in its) or case in ("bare", "last step", "gan")
        for key, value in its.items():
            exact = place == "1" or not key.startswith(("h:", "r:"))
            exact = exact and not (case == "by time" and key.startswith("h:"))
            tolerance = 0 if exact else 1e-6
            np.testing.assert_allclose(mine[key], value, rtol=0, atol=tolerance, err_msg=f"{key} of rank {rank}")
    for mine in resumed[1:]:
        for key, value in resumed[0].items():
            if key.startswith(("w", "optimizer")):
                np.testing.assert_array_equal(mine[key], value, err_msg=f"{key}: a worker differs")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", ALIKE)
def test_others_go_on_alike(outcome, case):
    """Two workers are stopped, one goes on and is stopped, then three, and then two again to the end."""
    for link in range(1, len(CHAIN) - 1):
        outcome(f"chain{link}", CHAIN[link][0], case)
    (one,), two = outcome("quiet", "1", case), outcome("quiet", "2", case)
    last = outcome(f"chain{len(CHAIN) - 1}", "2", case)
    for mine in last:
        for key, value in one.items():
            if not key.startswith("n:"):
                np.testing.assert_allclose(mine[key], value, rtol=0, atol=1e-6 if key[1] == ":" else 1e-9, err_msg=key)
        np.testing.assert_array_equal(mine["n:last"], two[0]["n:last"])
