"""A trainer of Ray Train whose `fit` runs on raytf's own engine, or in this process. Driver side."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

from ray.train import LoggingConfig, RunConfig

from raytf.compat import ray_configs
from raytf.compat.ray_train import DataParallelTrainer, construct_train_func
from raytf.console import quiet
from raytf.runtime import reservation
from raytf.runtime.processes import worker_environment
from raytf.runtime.reservation import Reservation
from raytf.train import backend, graceful_stop, local
from raytf.train.engine import Engine, Startup, is_slice


class EngineTrainer(DataParallelTrainer):
    """A DataParallelTrainer with the processes of a `Startup`, by default its own.

    With num_workers=0 there is no other process, and `launch` is a `local.LocalStartup`.

    Args:
        launch: The processes that it uses, or None to start them.
        sidecar: A process in addition to the workers: an `evaluator.EvaluatorSidecar`, or None.
        shown: (names of datasets, config) for Ray's dashboard, of a train loop with its own datasets; or None.
        recovers: Whether a lost worker is replaced in place if possible.
        warm_up_job: `job.TrainJob` for the warm-up step of standby workers, or None.
    """

    _cancelled = False
    _ending: graceful_stop.GracefulStop | None = None

    def __init__(
        self,
        *args,
        run_config=None,
        launch: Startup | None = None,
        sidecar=None,
        shown=None,
        recovers=False,
        warm_up_job=None,
        **kwargs,
    ):
        self._launch, self.sidecar, self.shown, self.recovers = launch, sidecar, shown, recovers
        self.warm_up_job = warm_up_job
        run_config = copy.copy(run_config) if run_config else RunConfig()
        run_config.worker_runtime_env = worker_environment(run_config, kwargs.get("scaling_config"))
        if run_config.logging_config == LoggingConfig():  # Ray Train would print each report of each worker
            run_config.logging_config = LoggingConfig(log_level="WARNING")
        super().__init__(*args, run_config=run_config, **kwargs)
        if shown is not None:
            self.train_run_context = dataclasses.replace(self.train_run_context, train_loop_config=shown[1])

    def fit(self):
        if self.running_in_local_mode:
            return self._fit_in_driver()
        given = self._launch
        self._launch = given or Startup(self.scaling_config, self.run_config)
        self._launch.ending = self._launch.ending or self._ending
        group_reservation = Reservation(
            self.sidecar_resources(), reservation.wait_limit(self.run_config.failure_config), cleaned=True
        )
        try:
            return self._run(group_reservation)
        finally:
            if given is None:
                self._launch.cancel()
            self._launch = given
            group_reservation.release()
            group_reservation.end_cleaner()

    def _run(self, group_reservation: Reservation):
        level = self.run_config.logging_config.log_level
        setup = dataclasses.replace(self.backend_config, warned=self._launch.warned, log_level=level)
        setup = dataclasses.replace(setup, servers=self._reserve(group_reservation))
        engine = Engine(self, setup, self._launch, group_reservation)
        with ThreadPoolExecutor(1, "raytf_engine") as thread, contextlib.closing(engine):
            future = thread.submit(engine.run)
            if self._launch.ending is None:
                return future.result()
            return self._launch.ending.result_of(future, engine.stop)

    def loop(self, context):
        """Returns the train loop with a context, without arguments."""
        return construct_train_func(
            self.train_loop_per_worker, self.train_loop_config, context, "train_loop_per_worker"
        )

    def _fit_in_driver(self):
        self._cancelled = False
        cancelled = lambda: self._cancelled or (self._launch is not None and self._launch.cancelled)
        loop = self.loop(functools.partial(backend.local_context, self.backend_config))
        with quiet.quiet_native():
            run = functools.partial(local.run, loop, self.train_run_context, self.datasets, cancelled)
            return (
                run()
                if self._launch is None or self._launch.ending is None
                else self._launch.ending.run_in_process(run)
            )

    def sidecar_resources(self) -> dict[str, dict[str, float]]:
        """Returns the resources of each task in addition to the workers, by name."""
        plan = getattr(self.backend_config, "servers", None)
        tasks = {str(task): plan.bundle(task) for task in plan.tasks()} if plan else {}
        return tasks | ({self.sidecar.name: self.sidecar.resources} if self.sidecar else {})

    def _reserve(self, group_reservation: Reservation):
        """Reserves all resources of the run, unless its number of workers is open; returns the servers' plan."""
        scaling, plan = self.scaling_config, getattr(self.backend_config, "servers", None)
        if not isinstance(scaling.num_workers, int) or is_slice(scaling):
            return plan
        per_worker = ray_configs.resources_per_worker(scaling)
        selectors = ray_configs.label_selectors(scaling, scaling.num_workers)
        group_reservation.take(scaling.num_workers, per_worker, scaling.placement_strategy, selectors)
        return (
            dataclasses.replace(plan, group=group_reservation.group, bundle_indices=group_reservation.bundle_indices)
            if plan
            else plan
        )

    def _cancel(self) -> None:
        """Ends a `fit` that runs in another thread; that `fit` raises an error."""
        self._cancelled = True
        if self._launch is not None:
            self._launch.cancel()
