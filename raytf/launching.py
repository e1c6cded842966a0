"""How a run is handed to Ray Train, without waiting for one thing after another. Driver side.

Ray Train starts its controller, then helpers, then the workers, which then import TensorFlow. Here all these processes
start, and import what they need, as soon as `fit` is called: while the driver reads the data and tries the model. They
hold no resources of the cluster, and none of them is a worker of the run before that has ended well: Ray Train then
reserves the resources, and the processes that are on the right hosts become its workers.
"""

from __future__ import annotations

import copy
import os
import threading
import time

import ray
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
    get_or_create_autoscaling_coordinator,
)
from ray.exceptions import RayActorError
from ray.train import RunConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import RayTrainWorker, Worker, WorkerGroup
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import placement_group_table

from raytf import resources
from raytf.processes import Processes, worker_environment

# Ray Train's controller takes reports, and sees ends and failures, only when it polls: every 2 s unless told otherwise,
# which is longer than an epoch of a small model.
_POLL_SECONDS = "0.2"
# Ray Train's guards against rare events; each is a process that imports Ray Train, when every core imports TensorFlow.
_GUARDS_START_AFTER_SECONDS = 20.0


class Launch(Processes):
    """The processes of a run that is about to start, by Ray Train's own class of workers.

    Args:
        scaling_config, run_config: the run's.

    Attributes:
        controller: the actor that becomes Ray Train's controller.
    """

    def __init__(self, scaling_config, run_config):
        here = ray.get_runtime_context().get_node_id()
        self.controller = (
            ray.remote(_Controller).options(num_cpus=0, label_selector={ray._raylet.RAY_NODE_ID_KEY: here}).remote()
        )
        super().__init__(RayTrainWorker, scaling_config, run_config, resources.fewest_workers(scaling_config))

    def cancel(self) -> None:
        ray.kill(self.controller)
        super().cancel()


class PromptTrainer(DataParallelTrainer):
    """A DataParallelTrainer on a `Launch`, its own unless it is given one."""

    def __init__(self, *args, run_config=None, launch: Launch | None = None, **kwargs):
        self._launch = launch
        run_config = copy.copy(run_config) if run_config else RunConfig()
        run_config.worker_runtime_env = worker_environment(run_config, kwargs.get("scaling_config"))
        super().__init__(*args, run_config=run_config, **kwargs)

    def fit(self):
        given = self._launch
        self._launch = given or Launch(self.scaling_config, self.run_config)
        try:
            return super().fit()
        finally:
            if given is None:
                self._launch.cancel()
            self._launch = given

    def _create_default_callbacks(self):
        callbacks = []
        for callback in super()._create_default_callbacks():
            if isinstance(callback, PlacementGroupCleanerCallback):
                callback = _LateCleaner()
            if isinstance(callback, DatasetsCallback) and not self.datasets:
                callback = _NoDatasets()
            callbacks.append(callback)
        if ENABLE_PREEMPTION_WATCHER_ENV_VAR not in os.environ:
            callbacks.append(_LatePreemption())
        return callbacks

    def _initialize_and_run_controller(self, **arguments):
        controller = self._launch.controller
        ray.get(controller.begin.remote(get_env_vars_to_propagate(), arguments, self._launch.there))
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


class _Controller(TrainController):
    """Ray Train's controller, in a process that starts before the run is known."""

    def __init__(self):
        get_or_create_autoscaling_coordinator()  # a process that the first run of a cluster waits for

    def begin(self, environment: dict[str, str], arguments: dict, processes: list) -> None:
        self.worker_group_cls = type("_Group", (_WorkerGroup,), {"processes": processes})
        # Ray Train reads these when it starts; what stays would change the environment of the workers.
        ours = {HEALTH_CHECK_INTERVAL_S_ENV_VAR: _POLL_SECONDS, ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0"}
        ours = {name: value for name, value in ours.items() if name not in environment}
        os.environ.update({RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: "0"} | environment | ours)
        super().__init__(**arguments)
        for name in ours:
            del os.environ[name]


class _WorkerGroup(WorkerGroup):
    """A worker group whose workers are, the first time, processes that are there already."""

    processes: list

    def _create_workers(
        self,
        num_workers,
        placement_group,
        resources_per_worker,
        placement_group_bundle_indices=None,
        starting_world_rank=0,
        world_size=None,
        replica_group_size=None,
    ):
        indices = placement_group_bundle_indices or list(range(num_workers))
        nodes = placement_group_table(placement_group)["bundles_to_node_id"]
        there = {}
        for node, actor in self.processes:
            place = next((i for i in indices if nodes[i] == node and i not in there), None)
            if place is None:
                ray.kill(actor)
            else:
                there[place] = actor
        self.processes.clear()
        try:
            metadata = ray.get([actor.get_metadata.remote() for actor in there.values()])
        except RayActorError as error:
            for actor in there.values():
                ray.kill(actor)
            raise WorkerGroupStartupFailedError("A process that was to become a worker has died") from error
        workers = [
            Worker(actor, its, resources_per_worker, placement_group_bundle_index=i)
            for (i, actor), its in zip(there.items(), metadata, strict=True)
        ]
        missing = [i for i in indices if i not in there]
        if missing:
            workers += super()._create_workers(len(missing), placement_group, resources_per_worker, missing)
        return self._assign_worker_ranks(workers, starting_world_rank, world_size, replica_group_size)


class _NoDatasets(WorkerGroupCallback):
    """Stands for Ray Train's manager of datasets, a process of its own, where there are none."""

    def before_init_train_context(self, workers):
        return {"dataset_shard_provider": [self] * len(workers)}

    def get_dataset_shard(self, dataset_info):
        raise KeyError(f"The trainer was given no dataset {dataset_info.dataset_name!r}. Pass it in datasets={{...}}")


class _Late:
    """Starts a guard of a worker group when the group has run for a while."""

    _due: float | None = None
    _group = None

    def after_worker_group_start(self, worker_group):
        self._group, self._due = worker_group, time.monotonic() + _GUARDS_START_AFTER_SECONDS

    def after_worker_group_poll_status(self, worker_group_status):
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            self._start_guard(self._group)

    def before_worker_group_shutdown(self, worker_group):
        self._due = None
        super().before_worker_group_shutdown(worker_group)

    def after_worker_group_abort(self, worker_group_context):
        self._due = None
        super().after_worker_group_abort(worker_group_context)


class _LateCleaner(_Late, PlacementGroupCleanerCallback):
    def after_controller_start(self, train_run_context):
        self._run = train_run_context

    def _start_guard(self, group):
        if self._cleaner is None:
            PlacementGroupCleanerCallback.after_controller_start(self, self._run)
        PlacementGroupCleanerCallback.after_worker_group_start(self, group)


class _LatePreemption(_Late, PreemptionCallback):
    def _start_guard(self, group):
        PreemptionCallback.after_worker_group_start(self, group)
