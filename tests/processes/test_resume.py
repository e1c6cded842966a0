"""A training stopped within an epoch and resumed is the one that was not, on one, two and three processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes.resume_groups import ALIKE, PLACES, folder_of
from tests.processes.resume_scenarios import CHAIN, STOPPED


@pytest.fixture
def outcome(behind):
    """outcome(stage, place, case): what each rank returned."""
    folder = behind.of("processes/test_resume.py")

    def found(stage, place, case):
        ranks = behind.results(folder_of(folder, stage, place), f"{case}:{stage}")
        for result in ranks:
            assert not isinstance(result, str), result
        return ranks

    return found


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(("place", "case"), [(place, case) for place, cases in PLACES.items() for case in cases])
def test_as_many_workers_resume_to_the_bit(outcome, place, case):
    """Weights and optimizers, to the bit; the numbers of metrics, of which the chief has the sums, to rounding."""
    if case in STOPPED:
        outcome("stopped", place, case)
    quiet, resumed = outcome("quiet", place, case), outcome("resumed", place, case)
    for rank, (left, right) in enumerate(zip(resumed, quiet, strict=True)):
        assert left.keys() == right.keys() and any(key.startswith("h:") for key in right)
        for key, value in right.items():
            tolerance = 1e-6 if key.startswith(("h:", "r:")) and place != "1" else 0
            np.testing.assert_allclose(left[key], value, rtol=0, atol=tolerance, err_msg=f"{key} of rank {rank}")
    for result in resumed[1:]:
        for key, value in resumed[0].items():
            if key.startswith(("w", "optimizer")):
                np.testing.assert_array_equal(result[key], value, err_msg=f"{key}: a worker differs")


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", ALIKE)
def test_other_numbers_of_workers_resume_alike(outcome, case):
    """Two workers are stopped, one resumes and is stopped, then three, and then two again to the end."""
    for link in range(1, len(CHAIN) - 1):
        outcome(f"chain{link}", CHAIN[link][0], case)
    (one,), two = outcome("quiet", "1", case), outcome("quiet", "2", case)
    last = outcome(f"chain{len(CHAIN) - 1}", "2", case)
    for result in last:
        for key, value in one.items():
            if not key.startswith("n:"):
                np.testing.assert_allclose(
                    result[key], value, rtol=0, atol=1e-6 if key[1] == ":" else 1e-9, err_msg=key
                )
        np.testing.assert_array_equal(result["n:last"], two[0]["n:last"])


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_batch_normalization_over_a_workers_own_rows_is_the_exception(outcome):
    """Another number of workers is another training with it, whether it resumes or not; as many resume to the bit, as
    "own rows" in the test above."""
    for case, alike in (("own rows", False), ("synchronized", True)):
        (one,), (two, _) = outcome("quiet", "1", case), outcome("quiet", "2", case)
        far = max(np.abs(one[key] - two[key]).max() for key in one if key.startswith("w"))
        assert (far <= 1e-9) == alike, f"{case}: {far}"


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_batch_and_a_rate_that_follow_the_workers(outcome):
    """elastic_batch="scale": as one process that takes the same rows, with the rate of their number."""
    for result in outcome("scaled", "2", "plain"):
        for key, far in result.items():
            np.testing.assert_allclose(far, 0, rtol=0, atol=1e-9, err_msg=key)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_state_that_no_longer_fits_is_reset_with_a_warning(outcome):
    """Four of 11 steps of the second epoch were made; with batches of 25 it has nine, and all of them are made.

    The History knows the first epoch, and the second when the third ends.
    """
    for result in outcome("reordered", "2", "plain"):
        assert result["epochs"].tolist() == [0, 1] and result["seen"] == 9 and result["steps"] == 11 + 4 + 2 * 9
    for left, right in zip(outcome("remeasured", "2", "plain"), outcome("quiet", "2", "plain"), strict=True):
        for key, value in left.items():
            np.testing.assert_array_equal(value, right[key], err_msg="what is measured changes no weight")
