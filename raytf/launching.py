"""How a trainer's run is handed to Ray Train. Driver side."""

from __future__ import annotations

import contextlib
import os

from ray.train.v2._internal.constants import HEALTH_CHECK_INTERVAL_S_ENV_VAR
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

# Ray Train's controller takes reports, and sees ends and failures, only when it polls: every 2 s unless told otherwise,
# which is longer than an epoch of a small model.
_POLL_SECONDS = "0.2"


class PromptTrainer(DataParallelTrainer):
    """A DataParallelTrainer whose controller polls often, unless the user set Ray's variable for that."""

    def fit(self):
        with _variable(HEALTH_CHECK_INTERVAL_S_ENV_VAR, _POLL_SECONDS):
            return super().fit()

    def _create_default_callbacks(self):
        callbacks = super()._create_default_callbacks()
        if os.environ.get(HEALTH_CHECK_INTERVAL_S_ENV_VAR) == _POLL_SECONDS:
            callbacks.append(_KeepFromWorkers())
        return callbacks


class _KeepFromWorkers(ControllerCallback):
    """The controller would hand the variable on to the workers; with an environment of their own, they could not use
    the idle processes that Ray keeps ready."""

    def after_controller_start(self, train_run_context):
        os.environ.pop(HEALTH_CHECK_INTERVAL_S_ENV_VAR, None)


@contextlib.contextmanager
def _variable(name: str, value: str):
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
