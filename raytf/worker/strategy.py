"""Builds the strategy of a worker before any other TensorFlow operation, with raytf's ring and ports."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable

import tensorflow as tf

from raytf.collectives import ring_token
from raytf.collectives.communicator import spans_workers
from raytf.compat import legacy_keras
from raytf.data import worker_part
from raytf.runtime import ports
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.runtime.topology import pick_strategy

# Factor of `first_step_timeout_s`: before this timeout the hang watch ends workers that wait for a late one.
_JOIN_FACTOR = 3


def communication_options(config: TensorflowConfig):
    """Returns TensorFlow's CommunicationOptions for a config."""
    implementation = tf.distribute.experimental.CommunicationImplementation[config.communication.upper()]
    return tf.distribute.experimental.CommunicationOptions(
        implementation=implementation, bytes_per_pack=config.bytes_per_pack, timeout_seconds=config.timeout_s
    )


@contextlib.contextmanager
def patched_strategy(config: TensorflowConfig, built: Callable):
    """Patches MultiWorkerMirroredStrategy: each one that is built gets the worker's port, options and a ring.

    Args:
        config: Config of the run.
        built: Function that is called with each strategy.
    """
    options = communication_options(config)
    kind = tf.distribute.MultiWorkerMirroredStrategy
    original = kind.__init__

    @functools.wraps(original)
    def init(self, cluster_resolver=None, communication_options=None):
        auto = communication_options is None and config.communication == "auto"
        communication_options = options if communication_options is None else communication_options
        if legacy_keras.is_enabled():
            _with_collectives(original, self, cluster_resolver, communication_options)
            self.experimental_distribute_dataset = _distribute_for_keras_2(self)
        else:
            if not (auto and _with_ring(config, original, self, cluster_resolver, communication_options)):
                _with_collectives(original, self, cluster_resolver, communication_options)
            from raytf.parallel import local_sgd  # not with Keras 2

            local_sgd.attach(self, config.sync_every)
        built(self)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


def _with_ring(config: TensorflowConfig, init: Callable, strategy, resolver, options) -> bool:
    """Builds a strategy over raytf's ring, without TensorFlow's cluster. Returns whether a ring is possible.

    This depends only on values that all workers share: the cluster, the driver's config, and whether there is a token.
    """
    from raytf.collectives import exchange, gradient_ring, recovery_client
    from raytf.compat import multi_worker

    members = gradient_ring.members(resolver)
    if members is None:
        return False
    if ring_token.token() is None:
        gradient_ring.check_without(config.gradient_dtype)
        return False
    recovery, placeholder = recovery_client.client, None
    if recovery.replacement_state is not None or recovery.warms_up:
        placeholder = recovery_client.PlaceholderRing(
            members.rank, len(members.addresses), config.timeout_s, recovery.warms_up
        )
    joined = gradient_ring.join(
        members,
        placeholder=placeholder,
        join_timeout_s=_JOIN_FACTOR * config.first_step_timeout_s,
        timeout_s=config.timeout_s,
        pack_bytes=config.bytes_per_pack,
        wire_dtype=config.gradient_dtype,
    )
    with multi_worker.ring_extended(joined):
        init(strategy, resolver, options)
    exchange.register(strategy, joined)
    return True


def _with_collectives(init: Callable, strategy, resolver, options) -> None:
    """Builds a strategy over TensorFlow's collectives."""
    ports.release_port()
    init(strategy, resolver, options)
    _restrict_listener()


def _distribute_for_keras_2(strategy):
    """Returns `strategy.experimental_distribute_dataset` for Keras 2 `fit`, which keeps a worker's shard as it is."""
    original = strategy.experimental_distribute_dataset

    @functools.wraps(original)
    def distribute(dataset, options=None):
        shard = spans_workers(strategy) and isinstance(dataset, tf.data.Dataset) and worker_part.is_worker_part(dataset)
        return worker_part.distributed(dataset, strategy) if shard else original(dataset, options)

    return distribute


def _restrict_listener() -> None:
    """Binds TensorFlow's server to this worker's address only, if raytf chose that: then there is a token."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}"))
    if "cluster" in task and ring_token.token() is not None:
        ports.listen_only_at(task["cluster"][task["task"]["type"]][task["task"]["index"]])


def _cluster() -> dict:
    return json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})


def connect_to_servers(setup: WorkerSetup):
    """Starts the servers of a ParameterServerStrategy and connects to them; this process becomes their coordinator.

    Returns:
        Tuple (strategy, `servers.ServerGroup`).
    """
    (address,) = _cluster()["worker"]
    servers = setup.servers.start(address, setup.config.listening)
    ports.release_port()
    strategy = tf.distribute.ParameterServerStrategy(servers.resolver())
    _restrict_listener()
    return strategy, servers


def uses_tpu(setup: WorkerSetup) -> bool:
    """Returns whether a run trains on TPUs."""
    return setup.strategy == "tpu" or setup.tpu


def build_strategy(setup: WorkerSetup) -> tf.distribute.Strategy:
    """Builds the strategy of a setup (by name, or "auto") from this worker's devices and TF_CONFIG."""
    workers = len(_cluster().get("worker", [None]))
    gpus = len(tf.config.list_physical_devices("GPU"))
    name = pick_strategy(setup.strategy, workers=workers, devices=gpus, tpu=uses_tpu(setup))
    if name == "multi_worker_mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    ports.release_port()
    if name == "default":
        return tf.distribute.get_strategy()
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy("gpu:0" if gpus else "cpu:0")
    if name == "mirrored":
        return tf.distribute.MirroredStrategy()
    if name == "central_storage":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tf.distribute.experimental.CentralStorageStrategy()
    from raytf.worker import tpu

    return tpu.connect_to_tpus([address.rpartition(":")[0] for address in _cluster()["worker"]])
