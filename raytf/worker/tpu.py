"""TPUs: one worker for each host. The first one coordinates all chips; the others reserve their hosts for it.

A TPU program of TensorFlow has one coordinator; on the other hosts of a slice the TPU runtime serves it. This code has
never run on a TPU: the tests replace TensorFlow's TPU functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from ray.train.collective import broadcast_from_rank_zero

from raytf.data.feed import Feed
from raytf.errors import ConfigError
from raytf.worker.job import TrainJob
from raytf.worker.session import Session

# Port of the TPU runtime on each host.
RUNTIME_PORT = 8470
# Steps of one call in Keras: each call is a round trip from the coordinator to all hosts.
STEPS_PER_EXECUTION = 32


def connect_to_tpus(hosts: Sequence[str]) -> tf.distribute.Strategy:
    """Connects to the chips of some hosts and initializes them. No TensorFlow operation may have run before.

    Args:
        hosts: Addresses of the hosts without ports, this one's first.
    """
    # several hosts as one string: the resolver refuses a list of more than one
    address = "local" if len(hosts) == 1 else ",".join(f"grpc://{host}:{RUNTIME_PORT}" for host in hosts)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(address)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def with_steps_per_call(task: TrainJob, model, feed: Feed) -> TrainJob:
    """Returns a task with the number of steps of each call.

    Args:
        task: The task.
        model: Its compiled model, whose own number of steps holds if it has one.
        feed: Feed of its training rows.

    Raises:
        ConfigError: Its steps cannot be compiled for the chips.
    """
    batch, replicas = feed.global_batch, model.distribute_strategy.num_replicas_in_sync
    if batch % replicas:
        raise ConfigError(
            "On TPUs every step has the same shape on each replica, so that batch_size must be a multiple of them",
            f"batch_size={batch} for {replicas} replicas",
            f"Use {batch // replicas * replicas or replicas} or {(batch // replicas + 1) * replicas}",
        )
    if feed.rows < batch:
        raise ConfigError(
            "On TPUs an epoch's last step is left out where it is smaller, so that an epoch needs a whole one",
            f"{feed.rows} rows for batch_size={batch}",
            "Use a smaller batch_size",
        )
    if task.steps_per_execution != "auto":
        return task
    model_steps = model.steps_per_execution
    return dataclasses.replace(
        task, steps_per_execution=model_steps if model_steps > 1 else min(STEPS_PER_EXECUTION, feed.steps)
    )


class _CoordinatorSession(Session):
    """Session of the coordinator; signals the workers on the other hosts when to report."""

    def __init__(self, session: Session):
        super().__init__()  # the coordinator feeds all chips
        self._session, self.storage, self.saves = session, session.storage, session.saves
        self.checkpoint, self.ready, self.save_step = session.checkpoint, session.ready, session.save_step
        self.emit = session.emit

    def report(self, metrics: dict, snapshot, keep: bool = False):
        broadcast_from_rank_zero(True)
        return self._session.report(metrics, snapshot, keep)


@contextlib.contextmanager
def coordinated_session(session):
    """Yields the coordinator's session, and None at the end on the other workers. For runs on several hosts.

    Args:
        session: `session.RaySession` of this worker.
    """
    if session.rank == 0:
        yield _CoordinatorSession(session)
        broadcast_from_rank_zero(False)
        return
    with session.checkpoint():
        while broadcast_from_rank_zero(None):
            session.report({}, None)
    yield None
