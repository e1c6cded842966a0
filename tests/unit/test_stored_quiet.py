"""Sentences of Ray Data that are untrue, or no news, of what raytf reads."""

import logging
import threading
import warnings

from ray.util.debug import log_once, reset_log_once

from raytf.data import stored

WARNING = "Warning: The Ray cluster currently does not have any available CPUs. The Dataset job will hang"


def test_request_for_no_cpu_is_not_reported_as_a_hang(caplog):
    logger = logging.getLogger("ray.data.dataset")
    reset_log_once("cpu_warning")  # another test's dataset may have been warned of
    with caplog.at_level(logging.WARNING, logger="ray.data.dataset"):
        with stored.quiet():
            assert log_once("cpu_warning")
            logger.warning(WARNING)
            logger.warning("something else")
        assert caplog.messages == ["something else"]
        assert log_once("cpu_warning"), "the user's own dataset is warned of"
        logger.warning(WARNING)
    assert caplog.messages == ["something else", WARNING]
    reset_log_once("cpu_warning")


def test_advice_about_the_number_of_tasks_is_left_out_in_all_threads_at_once():
    """Ray gives it in a thread of its own, and two datasets are read at the same time."""

    def advise():
        warnings.warn("The maximum number of concurrent tasks for 'Read' is set to 4, but", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        first, second = stored.quiet(), stored.quiet()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        thread = threading.Thread(target=advise)
        thread.start()
        thread.join()
        assert not caught
        second.__exit__(None, None, None)
        assert warnings.filters == before
        advise()
    assert len(caught) == 1, "the user's own dataset is advised"
