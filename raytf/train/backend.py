"""The setup of a worker: address, port and TF_CONFIG at every (re)start, and the context of its train loop."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.backend import BackendConfig

from raytf import activity
from raytf.collectives import ring_token
from raytf.compat import autograph, legacy_keras, legacy_names
from raytf.compat.fast_import import import_keras
from raytf.compat.ray_train import TrainingFramework
from raytf.console import output, shared_warnings
from raytf.runtime import cores, ports, settings
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.runtime.topology import tf_config
from raytf.worker import clearing


@dataclass(frozen=True, kw_only=True)
class TensorflowBackendConfig(WorkerSetup, BackendConfig):
    """A `settings.WorkerSetup` as a backend config of Ray Train, which its dashboard shows."""

    @property
    def framework(self) -> TrainingFramework:
        """Returns the framework that the Train tab of Ray's dashboard shows."""
        return TrainingFramework.TENSORFLOW

    def to_dict(self) -> dict[str, Any]:
        """Returns the config that the Train tab shows."""
        return vars(self.config) | {"strategy": self.strategy}


@contextlib.contextmanager
def worker_context(setup: WorkerSetup):
    import_keras()
    from raytf.worker import context  # imports TensorFlow, so on a worker only

    if not legacy_keras.is_enabled():
        clearing.record_settings()
    chief = ray.train.get_context().get_world_rank() == 0
    with (
        output.as_status(),
        autograph.in_memory(),
        context.prepared(setup),
        keras_output(chief, setup.board),
        shared_warnings.shown_once(setup.warned),
        legacy_names.explaining(),
        track_activity(),
    ):
        yield


@contextlib.contextmanager
def track_activity():
    """Marks this thread as the training thread in `activity`, until the context ends."""
    activity.tracker.reset()
    activity.tracker.register_thread()
    try:
        yield
    finally:
        activity.tracker.enter(activity.END)


@contextlib.contextmanager
def local_context(setup: WorkerSetup):
    """Prepares the driver's process for a train loop, without a change of its output."""
    from raytf.worker import context

    with context.prepared(setup), legacy_names.explaining():
        yield


# ------------------------------------------------------------------------------------------ on the worker


def keras_output(chief: bool, board):
    """Returns the context of `verbosity.limit_output` on a worker with Keras 3; Keras 2 prints as usual."""
    if chief and board is not None:
        board.begin("")  # the user's loop may make no steps of Keras
    if legacy_keras.is_enabled():
        return contextlib.nullcontext()
    from raytf.parallel import verbosity
    from raytf.worker import callbacks

    line = None if board is None else functools.partial(callbacks.ProgressCallback, board, None, None)
    return verbosity.limit_output(chief, line)


def reserve(allowed: settings.Listening, count: int) -> tuple[str, bool]:
    """Reserves an address, and claims `count` cores.

    Returns:
        This worker's "host:port", and whether it has claimed the cores; False if `count` is 0.
    """
    return ports.reserve_address(allowed), cores.claim_cores(count)


def cores_to_claim(setup: WorkerSetup, cpus: float) -> int:
    """Returns the number of cores that a worker with `cpus` CPUs of Ray claims.

    Workers with less than one CPU share cores.
    """
    if setup.config.pin_cpus is False or setup.servers is not None:  # a coordinator only sends steps to its servers
        return 0
    return int(cpus)


def set_environment(
    config: TensorflowConfig, addresses: list[str], rank: int, cpus: int, token: bytes, pinned: bool = False
) -> None:
    """Sets the variables that TensorFlow reads from the environment; runs before TensorFlow is imported.

    Args:
        config: Config of the run.
        addresses: "host:port" of all workers, by rank.
        rank: Rank of this worker.
        cpus: Number of its CPUs in Ray, at least 1.
        token: Token of the workers' ring, the same for all. It stays in memory, where no other user's process can read
            it.
        pinned: Whether this worker keeps to the cores that it has claimed; otherwise it releases them.
    """
    if pinned:
        cores.enforce_cores()
    else:
        cores.release_cores()
    output.set_output_name(f"worker {rank}")
    ring_token.keep_token(token)
    set_variables(config, addresses, rank, cpus)


def set_variables(config: TensorflowConfig, addresses: list[str], rank: int, cpus: int) -> None:
    """Sets the environment variables only, see `set_environment`."""
    os.environ["TF_CONFIG"] = tf_config({"worker": addresses}, "worker", rank)
    intra_op, inter_op = config.intra_op_threads or cpus, config.inter_op_threads or max(2, cpus)
    os.environ.update(settings.variables(intra_op, inter_op, config.memory_growth))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
