"""The train loop of this process: its setup, its strategy, and `raytf.get_strategy()`. Runs on a worker."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import tensorflow as tf

from raytf import timeouts
from raytf.compat import legacy_keras
from raytf.compat.tensorflow import disable_thread_spinning
from raytf.errors import ConfigError
from raytf.runtime import cores, ports
from raytf.runtime.settings import WorkerSetup
from raytf.worker import strategy


@dataclasses.dataclass
class TrainContext:
    """State of the train loop in this process.

    Args:
        setup: Setup that the driver sent.
        strategy: Strategy of this worker, or None before it is built.
        servers: `servers.ServerGroup` of a ParameterServerStrategy, or None.
        rows: What `get_dataset` has read, by name of the dataset.
    """

    setup: WorkerSetup
    strategy: tf.distribute.Strategy | None = None
    servers: Any = None
    rows: dict[str, Any] = dataclasses.field(default_factory=dict)

    def built(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy


_context: list[TrainContext] = []


@contextlib.contextmanager
def prepared(setup: WorkerSetup):
    """Prepares this process for a train loop, and cleans up afterwards.

    With Keras 2 it leaves Keras 3 and raytf's changes to it alone.
    """
    timeouts.set_current(setup.timeouts)
    if not legacy_keras.is_enabled():
        from raytf.parallel import shards, sparse_rows, trainer

        trainer.install()
        sparse_rows.lazy = setup.config.sparse_updates == "lazy"
        shards.enabled = setup.config.shard_optimizer
    if cores.count_usable() == 1:  # a thread that looks for work takes the core from those that have some
        disable_thread_spinning()
    if setup.config.seed is not None:
        tf.random.set_seed(setup.config.seed)
    context = TrainContext(setup)
    _context[:] = [context]
    with strategy.patched_strategy(setup.config, context.built):
        try:
            yield
        finally:
            cores.release_cores()
            ports.end_claims()
            if context.servers is not None:
                context.servers.close()
            _context.clear()


def get_strategy() -> tf.distribute.Strategy:
    """Returns the strategy of this worker, in a train loop; builds it at the first call.

    Call it before any other TensorFlow operation of the process: TensorFlow then connects the workers.

    Returns:
        A `tf.distribute.Strategy`, of the trainer's `strategy`.

    Raises:
        ConfigError: It was called outside of a train loop of a raytf trainer.

    Example:
        >>> import raytf
        >>> def train_loop():
        ...     import raytf
        ...     assert raytf.get_strategy().num_replicas_in_sync == 1
        >>> result = raytf.TensorflowTrainer(train_loop).fit()
    """
    if not _context:
        raise ConfigError(
            "raytf.get_strategy() works inside a train loop",
            "a call outside of one",
            "Call it in the function that a raytf trainer runs on its workers",
        )
    (context,) = _context
    if context.strategy is None and context.setup.strategy == "parameter_server":
        context.strategy, context.servers = strategy.connect_to_servers(context.setup)
    elif context.strategy is None:
        context.strategy = strategy.build_strategy(context.setup)
    return context.strategy


def setup() -> WorkerSetup | None:
    """Returns the setup of the train loop in this process, or None outside of one."""
    return _context[0].setup if _context else None


def rows() -> dict[str, Any]:
    """Returns what `get_dataset` has read in the train loop of this process, by name of the dataset."""
    return _context[0].rows


def servers():
    """Returns the `servers.ServerGroup` of this process' ParameterServerStrategy, or None."""
    return _context[0].servers if _context else None


def uses_tpu() -> bool:
    """Returns whether this run trains on TPUs."""
    return bool(_context) and strategy.uses_tpu(_context[0].setup)
