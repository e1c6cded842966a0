"""How a trainer's run is handed to Ray Train. Driver side."""

from __future__ import annotations

import contextlib
import os

from ray.train.v2._internal.constants import HEALTH_CHECK_INTERVAL_S_ENV_VAR

# Ray Train's controller takes reports, and sees ends and failures, only when it polls: every 2 s unless told otherwise,
# which is longer than an epoch of a small model.
_POLL_SECONDS = "0.2"


@contextlib.contextmanager
def prompt_controller():
    """Has the controller that is started in the block poll often, unless the user set Ray's variable."""
    if HEALTH_CHECK_INTERVAL_S_ENV_VAR in os.environ:
        yield
        return
    os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR] = _POLL_SECONDS
    try:
        yield
    finally:
        del os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR]
