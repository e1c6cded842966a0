"""On a worker: prepare TensorFlow, and build the strategy before any other TensorFlow operation."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings

import tensorflow as tf

from raytf import legacy_keras, ports, ring, worker_part
from raytf.collectives import spans_workers
from raytf.errors import ConfigError
from raytf.servers import Servers
from raytf.settings import Settings
from raytf.topology import pick_strategy

_current: dict[str, object] = {}


@contextlib.contextmanager
def prepared(config: Settings):
    """Makes this process ready for a train loop, and leaves nothing of it behind.

    Where it is one for Keras 2, Keras 3 and what raytf changes in it are left alone.
    """
    if not legacy_keras.is_on():
        from raytf import keras_multiworker

        keras_multiworker.install(allow_untested=config.allow_untested_keras)
    if config.seed is not None:
        tf.random.set_seed(config.seed)
    _current.update(config=config, strategy=None, servers=None)
    with _strategy_hook(config):
        try:
            yield
        finally:
            ports.release_port()
            if _current["servers"] is not None:
                _current["servers"].close()
            _current.clear()


def communication_options(config: Settings):
    """TensorFlow's CommunicationOptions for a config."""
    implementation = tf.distribute.experimental.CommunicationImplementation[config.communication.upper()]
    return tf.distribute.experimental.CommunicationOptions(
        implementation=implementation, bytes_per_pack=config.bytes_per_pack, timeout_seconds=config.timeout_s
    )


@contextlib.contextmanager
def _strategy_hook(config: Settings):
    """A MultiWorkerMirroredStrategy that anybody builds gets the port that was kept for it, options and a ring."""
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
        _current["strategy"] = self

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


def _attach_for_keras_3(strategy, config: Settings, ring: bool) -> None:
    from raytf import gradient_ring, multiworker_averaging

    if ring:
        gradient_ring.attach(
            strategy,
            timeout_s=config.timeout_s,
            pack_bytes=config.bytes_per_pack,
            wire_dtype=config.gradient_dtype,
            ports=config.ports,
        )
    multiworker_averaging.attach(strategy, config.sync_every)


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


def get_strategy() -> tf.distribute.Strategy:
    """Inside a train loop: the strategy of this worker, built at the first call.

    It must be called, or the strategy be built by hand, before any other TensorFlow operation of the process.

    Raises:
        ConfigError: called outside a train loop of a raytf trainer.
    """
    if "config" not in _current:
        raise ConfigError(
            "raytf.get_strategy() works inside a train loop",
            "a call outside of one",
            "Call it in the function that a raytf trainer runs on its workers",
        )
    if _current["strategy"] is None:
        _current["strategy"] = build(_current["config"].strategy)
    return _current["strategy"]


def config() -> Settings | None:
    """The config of the train loop that runs in this process, or None outside of one."""
    return _current.get("config")


def servers() -> Servers | None:
    """The servers of this process' ParameterServerStrategy, or None."""
    return _current.get("servers")


def uses_tpu() -> bool:
    """Whether this run trains on TPUs."""
    return "config" in _current and (_current["config"].strategy == "tpu" or _current["config"].tpu)


def _cluster() -> dict:
    return json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {})


def _coordinate(plan) -> tf.distribute.Strategy:
    """Starts servers and connects to them; this process becomes their coordinator."""
    (address,) = _cluster()["worker"]
    _current["servers"] = found = Servers(plan, address, _current["config"].ports)
    ports.release_port()
    made = tf.distribute.ParameterServerStrategy(found.resolver())
    _listen_only_here()
    return made


def build(name: str) -> tf.distribute.Strategy:
    """Builds the strategy of a name (or "auto") from this worker's devices and TF_CONFIG."""
    if name == "parameter_server":
        return _coordinate(_current["config"].servers)
    workers = len(_cluster().get("worker", [None]))
    gpus = len(tf.config.list_physical_devices("GPU"))
    name = pick_strategy(name, workers=workers, devices=gpus, tpu=uses_tpu())
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
    from raytf import tpu

    return tpu.connect([address.rpartition(":")[0] for address in _cluster()["worker"]])
