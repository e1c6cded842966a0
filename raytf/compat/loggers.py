"""Loggers and modules of Ray by name: what they say is shown in other words, or not at all. Imports nothing."""

# Tells that Ray starts, or is connected to.
RAY_STARTS = "ray._private.worker"
# Tells, as a warning, whether a cluster wants a token.
RAY_TOKEN = "ray._private.authentication.authentication_token_setup"
# Tells of an execution's progress at length.
DATA_PROGRESS = "ray.data._internal.progress"
# Tells whoever reads a run's folder how a new run is started.
TRAIN_CHECKPOINTS = "ray.train.v2._internal.execution.checkpoint.checkpoint_manager"
# Tells of what a training has raised, also where the run goes on.
TRAIN_ERRORS = "ray.train.v2._internal.util"
# Tells of each checkpoint.
TUNE_STORAGE = "ray.train._internal.storage"
# Tells, with a stack, that an autoscaler could not be asked in time for what a run takes; the controller asks again.
AUTOSCALER_ASKED = "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client"
# Shows the traceback of each trial that fails.
TUNE_CONTROLLER = "ray.tune.execution.tune_controller"
