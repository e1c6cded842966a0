"""TPUs: a worker for each host, of which the first coordinates all chips and the others hold their hosts for it.

A TPU program of TensorFlow has one coordinator; on the other hosts of a slice the TPU runtime serves it. No TPU has run
this: the tests stand at the calls into TensorFlow's TPU functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf
from ray.train.collective import broadcast_from_rank_zero

from raytf.errors import ConfigError

# Where the TPU runtime of a host listens.
RUNTIME_PORT = 8470
# What Keras makes in one call: each call goes from the coordinator to all hosts and back.
STEPS_PER_EXECUTION = 32


def connect(hosts: Sequence[str]) -> tf.distribute.Strategy:
    """Connects to the chips of some hosts and initializes them; nothing of TensorFlow may have run before.

    Args:
        hosts: addresses of the hosts, this one's first, without ports.
    """
    # several hosts as one string: the resolver refuses a list of more than one
    where = "local" if len(hosts) == 1 else ",".join(f"grpc://{host}:{RUNTIME_PORT}" for host in hosts)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(where)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def check_batch(batch: int, rows: int, replicas: int) -> None:
    """Raises ConfigError unless steps of `batch` rows can be compiled for the chips.

    Args:
        batch: rows of a step.
        rows: of an epoch.
        replicas: cores that train.
    """
    if batch % replicas:
        raise ConfigError(
            "On TPUs every step has the same shape on each replica, so that batch_size must be a multiple of them",
            f"batch_size={batch} for {replicas} replicas",
            f"Use {batch // replicas * replicas or replicas} or {(batch // replicas + 1) * replicas}",
        )
    if rows < batch:
        raise ConfigError(
            "On TPUs an epoch's last step is left out where it is smaller, so that an epoch needs a whole one",
            f"{rows} rows for batch_size={batch}",
            "Use a smaller batch_size",
        )


class _LedSession:
    """The coordinator's session: tells the workers that hold the other hosts when to report."""

    rank, size = 0, 1  # it feeds all chips

    def __init__(self, session):
        self._session, self.storage, self.checkpoint = session, session.storage, session.checkpoint
        self.keep = session.keep

    def report(self, metrics: dict, write):
        broadcast_from_rank_zero(True)
        return self._session.report(metrics, write)


@contextlib.contextmanager
def led(session):
    """On every worker of a run on several hosts: gives the coordinator its session, and the others None at the end.

    Args:
        session: `session.RaySession` of this worker.
    """
    if session.rank == 0:
        yield _LedSession(session)
        broadcast_from_rank_zero(False)
        return
    with session.checkpoint():
        while broadcast_from_rank_zero(None):
            session.report({}, None)
    yield None
