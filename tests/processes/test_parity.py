"""Two and three real TensorFlow processes against one: weights, logs, predictions and decisions are the same."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.processes.launch import run_group
from tests.processes.scenarios import SCENARIOS

FLOAT64 = list(SCENARIOS)
# In float32 rounding differs with the order of summation, and training amplifies it.
FLOAT32 = ["cnn_sgd", "mlp_adam", "lstm_adamw", "embedding_sgd", "last_batch_smaller"]
THREE = [
    "mlp_sgd",
    "embedding_adam",
    "last_batch_of_one_row",
    "odd_global_batch",
    "predict_all_rows_in_order",
    "metrics_that_are_no_averages",
    "batch_normalization_synchronized",
    "masked_tokens",
    "gradient_accumulation",
    "loss_root_mean",
    "mixed_float16",
    "stop_between_batches",
]
# In the order in which the groups start, two at a time: the long ones first.
WANTED = {
    ("float64", 2): FLOAT64,
    ("float64", 1): FLOAT64,
    ("float64", 3): THREE,
    ("float32", 2): FLOAT32,
    ("float32", 1): FLOAT32,
}
CASES = [(dtype, world, name) for (dtype, world), names in WANTED.items() if world > 1 for name in names]
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """(dtype, world, name) -> what each rank returned; a group of processes runs all its scenarios once."""
    folders = {key: str(tmp_path_factory.mktemp(f"{key[0]}_{key[1]}")) for key in WANTED}

    def run(key):
        dtype, world = key
        names = ["--dtype", dtype, "--only", *WANTED[key]]
        run_group(world, ["-m", "tests.processes.worker", "--folder", folders[key], *names], folders[key])

    with ThreadPoolExecutor(2) as pool:
        running = {key: pool.submit(run, key) for key in WANTED}

        def load(dtype, world, name):
            running[dtype, world].result()
            paths = [os.path.join(folders[dtype, world], f"{name}.{dtype}.{world}.{rank}.pkl") for rank in range(world)]
            return [pickle.load(open(path, "rb")) for path in paths]

        yield load


@pytest.mark.slow
@pytest.mark.timeout(650)
@pytest.mark.parametrize(("dtype", "world", "name"), CASES, ids=[f"{n}-{w}-{d}" for d, w, n in CASES])
def test_equals_one_process(results, dtype, world, name):
    """`bits:` results must be equal between workers alone, `chief:` ones are the chief's, others equal everywhere."""
    (one,), many = results(dtype, 1, name), results(dtype, world, name)
    for outcome in (one, *many):
        assert not isinstance(outcome, str), outcome
    for rank, other in enumerate(many[1:], 1):
        for key, value in other.items():
            np.testing.assert_array_equal(value, many[0][key], err_msg=f"{key}: worker {rank} differs from worker 0")
    for key, value in one.items():
        if not key.startswith(("bits:", "chief:")):
            np.testing.assert_allclose(many[0][key], value, rtol=0, atol=TOLERANCE[dtype], err_msg=key)
