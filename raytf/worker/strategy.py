"""On a worker: the strategy, built before any other TensorFlow operation, with raytf's ring and ports attached."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable

import tensorflow as tf

from raytf.collectives import ring
from raytf.collectives.communicator import spans_workers
from raytf.compat import legacy_keras
from raytf.data import worker_part
from raytf.runtime import ports
from raytf.runtime.settings import TensorflowConfig, WorkerSetup
from raytf.runtime.topology import pick_strategy


def communication_options(config: TensorflowConfig):
    """TensorFlow's CommunicationOptions for a config."""
    implementation = tf.distribute.experimental.CommunicationImplementation[config.communication.upper()]
    return tf.distribute.experimental.CommunicationOptions(
        implementation=implementation, bytes_per_pack=config.bytes_per_pack, timeout_seconds=config.timeout_s
    )


@contextlib.contextmanager
def hooked(config: TensorflowConfig, built: Callable):
    """Within it a MultiWorkerMirroredStrategy, whoever builds it, gets the port kept for it, options and a ring.

    Args:
        config: the run's.
        built: called with each.
    """
    options = communication_options(config)
    kind = tf.distribute.MultiWorkerMirroredStrategy
    original = kind.__init__

    @functools.wraps(original)
    def init(self, cluster_resolver=None, communication_options=None):
        ports.release_port()
        original(self, cluster_resolver, options if communication_options is None else communication_options)
        _listen_only_here()
        if legacy_keras.is_on():
            self.experimental_distribute_dataset = _distribute_for_keras_2(self)
        else:
            _attach_for_keras_3(self, config, ring=communication_options is None and config.communication == "auto")
        built(self)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


def _attach_for_keras_3(strategy, config: TensorflowConfig, ring: bool) -> None:
    from raytf.collectives import gradient_ring
    from raytf.parallel import local_sgd

    if ring:
        gradient_ring.attach(
            strategy,
            timeout_s=config.timeout_s,
            pack_bytes=config.bytes_per_pack,
            wire_dtype=config.gradient_dtype,
            ports=config.ports,
        )
    local_sgd.attach(strategy, config.sync_every)


def _distribute_for_keras_2(strategy):
    """`strategy.experimental_distribute_dataset`, which leaves a worker's part as it is; Keras 2 calls it in `fit`."""
    original = strategy.experimental_distribute_dataset

    @functools.wraps(original)
    def distribute(dataset, options=None):
        ours = spans_workers(strategy) and isinstance(dataset, tf.data.Dataset) and worker_part.is_worker_part(dataset)
        return worker_part.distributed(dataset, strategy) if ours else original(dataset, options)

    return distribute


def _listen_only_here() -> None:
    """Keeps TensorFlow's server to this worker's address, where raytf chose that: a token tells of it."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}"))
    if "cluster" in task and ring.token() is not None:
        ports.listen_only_at(task["cluster"][task["task"]["type"]][task["task"]["index"]])


def _cluster() -> dict:
    return json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})


def coordinate(setup: WorkerSetup):
    """Starts the servers of a ParameterServerStrategy and connects to them; this process becomes their coordinator.

    Returns:
        (strategy, `servers.ServerGroup`).
    """
    (address,) = _cluster()["worker"]
    servers = setup.servers.start(address, setup.config.ports)
    ports.release_port()
    made = tf.distribute.ParameterServerStrategy(servers.resolver())
    _listen_only_here()
    return made, servers


def uses_tpu(setup: WorkerSetup) -> bool:
    """Whether a run trains on TPUs."""
    return setup.strategy == "tpu" or setup.tpu


def build(setup: WorkerSetup) -> tf.distribute.Strategy:
    """Builds the strategy of a setup's name (or "auto") from this worker's devices and TF_CONFIG."""
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

    return tpu.connect([address.rpartition(":")[0] for address in _cluster()["worker"]])
