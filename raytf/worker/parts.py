"""The table of a training's parts, in the order in which Keras calls them, with the reason. Runs on a worker."""

from __future__ import annotations

from raytf.worker.callbacks import (
    EpochReports,
    FeedCallback,
    ProgressCallback,
    RestoreCallback,
    StepReportCallback,
    UsersCallbacks,
    WarmupCallback,
)
from raytf.worker.epoch_checks import EpochChecks
from raytf.worker.figures import FiguresCallback
from raytf.worker.part import TrainingPart
from raytf.worker.replacement import CallbackPhases, RecoveryCallback
from raytf.worker.step_checkpoints import MidEpochResume, PrepareMidEpochResume, StepCheckpointCallback
from raytf.worker.steps_per_execution import ExecutionCallback

PARTS: tuple[type[TrainingPart], ...] = (
    CallbackPhases,  # before all, as it marks when callbacks begin
    PrepareMidEpochResume,  # before all that may change a value at the begin of a training or an epoch
    ExecutionCallback,  # measures the time between executions, which includes all other callbacks
    FeedCallback,  # sets epoch and step that all others read
    UsersCallbacks,
    EpochChecks,  # after users' callbacks, which may end the training for a loss that is NaN
    WarmupCallback,  # after users' callbacks that set the rate; built before a checkpoint's rate is restored
    RestoreCallback,  # after users' callbacks, whose on_train_begin resets them
    ProgressCallback,  # before reports, which may wait
    FiguresCallback,  # before reports, whose time is of the next epoch
    StepReportCallback,
    MidEpochResume,  # after all that reset values at the begin of an epoch
    EpochReports,  # a checkpoint has the state of all before it
    StepCheckpointCallback,  # after the epoch's own checkpoint; ends the training on request, so nothing follows
    RecoveryCallback,  # after all, as it marks when callbacks end
)
