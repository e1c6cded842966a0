"""`shard_optimizer=True` on two and three processes: bits, bytes and checkpoints are those of a training without it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tests.processes.sharded_scenarios import KINDS, REFUSED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

OTHERS = ["deep", "table", "executions", "eager", "compiled"]
# What runs where, with shares and without.
ALIKE = {
    ("float32", 2): [*KINDS, *OTHERS],
    ("float64", 2): ["adam", "in_parts"],
    ("float32", 3): ["adam", "deep", "nesterov"],
    ("float64", 3): ["adam", "in_parts"],
}
# Which run resumes from which checkpoint: (shares, workers) from that of (shares, workers).
RESUMED = [((True, 2), "sharded2"), ((False, 2), "sharded2"), ((True, 2), "whole2"), ((True, 3), "sharded2")]
RESUMED += [((False, 1), "sharded2")]


def _run(folder, groups):
    """Runs (name, dtype, world, shares, scenarios), a few at a time; gives the name of the group by what it was."""
    made = []
    for name, dtype, world, shares, scenarios in groups:
        (folder / name).mkdir()
        settings = {"folder": str(folder / name), "dtype": dtype, "place": str(world), "world": world}
        settings |= {"communication": "auto", "module": "tests.processes.sharded_scenarios", "scenarios": scenarios}
        made.append(settings | {"config": {"shard_optimizer": shares, "bytes_per_pack": 40_000}})
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    subprocess.run(
        [sys.executable, "-m", "tests.processes.worker", json.dumps(made)], env=environment, check=True, timeout=1500
    )


def _found(folder, name, world, scenario):
    ranks = []
    for rank in range(world):
        path = folder / name / f"{scenario}.{rank}.pkl"
        assert path.exists(), (folder / name / f"log.{rank}").read_text()[-3000:]
        ranks.append(pickle.loads(path.read_bytes()))
        assert not isinstance(ranks[-1], str), ranks[-1]
    return ranks


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    groups = []
    for (dtype, world), scenarios in ALIKE.items():
        for shares in (True, False):
            more = [f"refused_{name}" for name in REFUSED] if shares and (dtype, world) == ("float64", 2) else []
            groups.append((f"{dtype}_{world}_{shares}", dtype, world, shares, [*scenarios, *more]))
    _run(folder, groups)
    return folder


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    first = {True: ["stopped_sharded2", "quiet"], False: ["stopped_whole2"]}
    _run(folder, [(f"first_{shares}", "float64", 2, shares, names) for shares, names in first.items()])
    groups = {}
    for group, begins in RESUMED:
        groups.setdefault(group, []).append(f"resumed_{begins}")
    _run(folder, [(f"then_{s}_{world}", "float64", world, s, names) for (s, world), names in groups.items()])
    return folder


@pytest.mark.parametrize(("dtype", "world", "name"), [(*key, name) for key, names in ALIKE.items() for name in names])
def test_shares_give_the_same_bits(alike, dtype, world, name):
    """Weights, history and what a checkpoint has of the optimizer; a worker has its part of that, and sends as much."""
    with_shares = _found(alike, f"{dtype}_{world}_True", world, name)
    without = _found(alike, f"{dtype}_{world}_False", world, name)
    for left, right in zip(with_shares, without, strict=True):
        assert left.keys() == right.keys()
        assert left.get("parts", world + 1) == world + 1  # a range of each worker, and the end of the file
        for key in right.keys() - {"bytes", "sent", "parts"}:
            assert left[key].shape == right[key].shape and left[key].dtype == right[key].dtype
            tolerance = 1e-5 if name == "schedule" else 0  # XLA rounds differently with a schedule's rate
            np.testing.assert_allclose(left[key], right[key], rtol=0, atol=tolerance, err_msg=key)
    if name == "adam":  # the chief also sends variables to the others as `fit` begins, of which it has fewer
        for left, right in zip(with_shares, without, strict=True):
            assert left["bytes"] == pytest.approx(right["bytes"] / world, rel=0.02)
        assert with_shares[-1]["sent"] == pytest.approx(without[-1]["sent"], rel=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(alike, name):
    for result in _found(alike, "float64_2_True", 2, f"refused_{name}"):
        texts = {"own": "Mine", "accumulation": "gradient_accumulation_steps", "loss_scale": "LossScaleOptimizer"}
        assert "shard_optimizer is for" in result["refused"]
        received = result["refused"].partition("received: ")[2].lower()
        assert texts.get(name, name).lower() in received


@pytest.mark.parametrize(("group", "begins"), RESUMED)
def test_checkpoints_are_for_any_number_of_workers(resumed, group, begins):
    """Sharded or not, to the bit where as many resume; plain Keras has read each of them as well."""
    (shares, world), quiet = group, _found(resumed, "first_True", 2, "quiet")[0]
    _found(resumed, f"first_{begins == 'sharded2'}", 2, f"stopped_{begins}")
    for result in _found(resumed, f"then_{shares}_{world}", world, f"resumed_{begins}"):
        assert [key for key in result if key.startswith("w")]
        for key, value in result.items():
            tolerance = 0 if world == 2 and key.startswith("w") else 1e-6 if key.startswith("h") else 1e-9
            np.testing.assert_allclose(value, quiet[key], rtol=0, atol=tolerance, err_msg=key)
