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

from tests.processes.groups import ROOT, processes
from tests.processes.resume_scenarios import CASES, CHAIN

ALONE = ["quiet", "stopped", "resumed"]
ALIKE = [name for name, case in CASES.items() if case.alike]
# Which cases go on where they were stopped. Three workers take their time on two cores.
PLACES = {
    "1": [name for name in CASES if name != "local steps"],
    "2": [name for name in CASES if name != "local steps"],
    "3": ["plain", "accumulation", "gan"],
    "mirrored": ["dropout", "last step", "by time"],
    "local": ["local steps"],
}
# With raytf's ring unless it says "ring", which is TensorFlow's.
OPTIONS = {"3": {"communication": "ring"}, "local": {"place": "2", "world": 2, "config": {"sync_every": 4}}}
OTHERS = ["plain:reordered", "plain:remeasured"]


def stages(folder):
    """What runs at once: all alone, and then each link of the chain behind the one before."""

    def group(place, stage, scenarios):
        path = folder / f"{stage}_{place}"
        path.mkdir()
        told = {"folder": str(path), "dtype": "float64", "place": place, "world": processes(place)}
        told |= {"communication": "auto", "module": "tests.processes.resume_scenarios", "scenarios": scenarios}
        return told | OPTIONS.get(place, {})

    alone = {place: [f"{name}:{stage}" for name in names for stage in ALONE] for place, names in PLACES.items()}
    alone["2"] += OTHERS
    links = [(CHAIN[i][0], f"chain{i}") for i in range(1, len(CHAIN))]
    return [
        [group(place, "alone", scenarios) for place, scenarios in alone.items()],
        *([group(place, stage, [f"{name}:{stage}" for name in ALIKE])] for place, stage in links),
    ]


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
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = "\n".join((path.read_text()[-3000:]) for path in sorted(folder.glob("*/log.*")))
    assert code == 0, (folder / "log").read_text()[-3000:]

    def found(stage, place, case):
        group = folder / f"{stage if stage.startswith('chain') else 'alone'}_{place}"
        codes = json.loads((group / "codes.json").read_text())
        assert not any(codes.values()), f"{codes}\n{logs}"
        ranks = [pickle.loads((group / f"{case}:{stage}.{rank}.pkl").read_bytes()) for rank in range(len(codes))]
        for told in ranks:
            assert not isinstance(told, str), told
        return ranks

    return found


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("place", "case"), [(place, case) for place, cases in PLACES.items() for case in cases])
def test_as_many_go_on_to_the_bit(outcome, place, case):
    """Weights and optimizers, to the bit; the numbers of metrics, of which the chief has the sums, to rounding."""
    outcome("stopped", place, case)
    quiet, resumed = outcome("quiet", place, case), outcome("resumed", place, case)
    for rank, (mine, its) in enumerate(zip(resumed, quiet, strict=True)):
        assert mine.keys() == its.keys() and any(key.startswith("h:") for key in its)
        for key, value in its.items():
            tolerance = 1e-6 if key.startswith(("h:", "r:")) and place != "1" else 0
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


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_what_no_longer_fits_begins_anew_and_is_said(outcome):
    """Four of 11 steps of the second epoch were made; with batches of 25 it has nine, and all of them are made.

    The History knows the first epoch, and the second when the third ends.
    """
    for told in outcome("reordered", "2", "plain"):
        assert told["epochs"].tolist() == [0, 1] and told["seen"] == 9 and told["steps"] == 11 + 4 + 2 * 9
    for mine, its in zip(outcome("remeasured", "2", "plain"), outcome("quiet", "2", "plain"), strict=True):
        for key, value in mine.items():
            np.testing.assert_array_equal(value, its[key], err_msg="what is measured changes no weight")
