"""Ray Data's sentence that a dataset will hang, which is untrue of what raytf reads."""

import logging

from ray.util.debug import log_once, reset_log_once

from raytf.data import stored

SAID = "Warning: The Ray cluster currently does not have any available CPUs. The Dataset job will hang"


def test_what_asks_for_no_cpu_is_not_said_to_hang(caplog):
    logger = logging.getLogger("ray.data.dataset")
    reset_log_once("cpu_warning")  # another test's dataset may have been warned of
    with caplog.at_level(logging.WARNING, logger="ray.data.dataset"):
        with stored.quiet():
            assert log_once("cpu_warning")
            logger.warning(SAID)
            logger.warning("something else")
        assert caplog.messages == ["something else"]
        assert log_once("cpu_warning"), "the user's own dataset is warned of"
        logger.warning(SAID)
    assert caplog.messages == ["something else", SAID]
    reset_log_once("cpu_warning")
