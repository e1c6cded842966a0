"""Loggers and modules of Ray by name, whose messages raytf replaces or hides. Imports nothing."""

# Logs the start of Ray, or the connection to it.
RAY_STARTS = "ray._private.worker"
# Logs a warning about whether a cluster requires a token.
RAY_TOKEN = "ray._private.authentication.authentication_token_setup"
# Logs the progress of an execution in detail.
DATA_PROGRESS = "ray.data._internal.progress"
# Logs the error of a task with its traceback.
DATA_TASKS = "ray.data._internal.execution.streaming_executor_state"
# Logs the error of an execution, with a traceback and a request to report it.
DATA_ERRORS = "ray.data.exceptions"
# Logs how to start a new run if a run's folder exists.
TRAIN_CHECKPOINTS = "ray.train.v2._internal.execution.checkpoint.checkpoint_manager"
# Logs the errors of a training, even if the run continues.
TRAIN_ERRORS = "ray.train.v2._internal.util"
# Logs each checkpoint.
TUNE_STORAGE = "ray.train._internal.storage"
# Logs the traceback of each failed trial.
TUNE_CONTROLLER = "ray.tune.execution.tune_controller"
# Logs operations of Tune that take more than 0.5 s, as on a busy host.
TUNE_OPERATIONS = "ray.tune.utils.util"
